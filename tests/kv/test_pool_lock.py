"""One holder at a time, among threads and processes; a dead one's lock is free."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prism.kv.pool_lock import PoolLock


def test_threads_and_others_of_the_same_file_exclude_each_other(tmp_path: Path) -> None:
    locks = [PoolLock(tmp_path / "lock") for _ in range(2)]
    inside: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            with locks[number % 2]():
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_a_fork_has_a_lock_of_its_own(tmp_path: Path) -> None:
    """One that is made while a thread holds the lock neither has it nor waits for that thread's memory of it."""
    lock, held, end = PoolLock(tmp_path / "lock"), threading.Event(), threading.Event()

    def hold() -> None:
        with lock():
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        with lock():
            os._exit(7)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_lock_of_who_was_killed_is_free_though_it_has_a_child(tmp_path: Path) -> None:
    """A child that was forked while its parent held the lock has the parent's descriptor no longer."""
    lock = PoolLock(tmp_path / "lock")
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        with lock():
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(write_end, str(child).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(read_end, 20))
    try:
        with lock():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read_end)
        os.close(write_end)
