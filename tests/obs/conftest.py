"""Tests of logging see what they log themselves, and leave the process's loggers as they were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def threads_of_other_tests_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that the tests of other folders share run on in this process, and log when they please."""
    others = set(threading.enumerate()) - {threading.current_thread()}
    handle = logging.Logger.handle

    def handle_ours(self: logging.Logger, record: logging.LogRecord) -> None:
        if threading.current_thread() not in others:
            handle(self, record)

    monkeypatch.setattr(logging.Logger, "handle", handle_ours)


@pytest.fixture(autouse=True)
def restore_logging(threads_of_other_tests_are_not_heard: None) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
