"""A stage whose items behave badly on purpose; what they count is in the scratch folder."""

from __future__ import annotations

import os
import signal
import time

from scripts.gpu.run import Run
from scripts.gpu.stage import Item, Stage


def _count(run: Run, name: str) -> None:
    with (run.scratch / "ran").open("a") as file:
        file.write(f"{name}\n")


def good(run: Run) -> None:
    _count(run, "good")
    run.reading("speed", 3.0, "GB/s", goal=3.1, less_is_better=False)


def slow(run: Run) -> None:
    run.reading("time", 200.0, "us", goal=100.0)


def wrong(run: Run) -> None:
    run.reading("before", 1.0, "s")
    raise ValueError("two and two are five")


def hangs(run: Run) -> None:
    run.reading("before", 1.0, "s")
    child = os.fork()
    if child == 0:
        (run.scratch / "part").write_text(str(os.getpid()))
        (run.scratch / "part").rename(run.scratch / "child")
    time.sleep(600)


def dies(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def waits(run: Run) -> None:
    """Until the file ``go`` is there."""
    _count(run, "waits")
    while not (run.scratch / "go").exists():
        time.sleep(0.05)


def needs_one(run: Run) -> None:
    run.needs_gpu()
    raise AssertionError("went on without a GPU")


STAGE = Stage(
    __name__,
    "Items that behave badly.",
    (
        Item("good", good, 60),
        Item("slow", slow, 60),
        Item("wrong", wrong, 60),
        Item("hangs", hangs, 20),
        Item("dies", dies, 60),
        Item("waits", waits, 60),
        Item("needs_one", needs_one, 60),
    ),
)
