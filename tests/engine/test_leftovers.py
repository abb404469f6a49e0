"""Files of ended workers go; the latest logs stay."""

from __future__ import annotations

import os
from pathlib import Path

from prism.engine.leftovers import KEPT_LOGS, Leftovers, log_file, rendezvous_file, structured_log_file


def leave(folder: Path, worker: str, age_s: float = 0.0) -> None:
    for file in (log_file(folder, worker), structured_log_file(folder, worker)):
        file.touch()
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    for ranks in (False, True):
        rendezvous_file(folder, worker, ranks).touch()


def test_a_worker_that_ends_leaves_its_logs(tmp_path: Path) -> None:
    leftovers = Leftovers(tmp_path, tmp_path)
    leave(tmp_path, "w1")
    leave(tmp_path, "w10")
    leftovers.ended("w1")
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "engine-w1.jsonl",
        "engine-w1.log",
        "engine-w10.jsonl",
        "engine-w10.log",
        "w10-ranks.rendezvous",
        "w10.rendezvous",
    ]


def test_only_the_latest_logs_stay(tmp_path: Path) -> None:
    for number in range(KEPT_LOGS):  # of the agent before
        leave(tmp_path, f"a{number}", age_s=number)
    leftovers = Leftovers(tmp_path, tmp_path)
    leftovers.begin()
    assert not list(tmp_path.glob("*.rendezvous"))
    leave(tmp_path, "b1")
    leave(tmp_path, "b2")
    leftovers.ended("b1")
    assert log_file(tmp_path, "b1").exists() and log_file(tmp_path, "b2").exists()
    assert not log_file(tmp_path, f"a{KEPT_LOGS - 1}").exists() and log_file(tmp_path, f"a{KEPT_LOGS - 2}").exists()


def test_without_logs(tmp_path: Path) -> None:
    leftovers = Leftovers(tmp_path, None)
    leftovers.begin()
    for number in range(KEPT_LOGS + 1):
        leftovers.ended(f"w{number}")
