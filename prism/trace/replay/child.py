"""The parent's end of the sending process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prism.core.errors import PrismError
from prism.trace.replay.plan import API_KEY_VARIABLE, SendPlan


class SenderFailed(PrismError):
    """The sending process could not do its work."""


class SenderProcess:
    """Starts the sender of ``plan`` and carries its messages. Use as a context manager: it never outlives the block."""

    def __init__(self, plan: SendPlan, folder: Path, api_key: str | None) -> None:
        plan_path, records = folder / "plan.json", folder / "records.jsonl"
        plan_path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        environment = {**os.environ, **({API_KEY_VARIABLE: api_key} if api_key else {})}
        command = [sys.executable, "-m", "prism.trace.replay.sender", str(plan_path), str(records)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def ready(self) -> dict[str, Any]:
        """Wait until the sender has prepared its prompts."""
        found = dict(next(self._messages(), {}).get("ready", {}))
        return found

    def go(self) -> Iterator[dict[str, Any]]:
        """Let it begin; yields its messages until it ends. Meanwhile the first Ctrl-C lets it end well (in the main
        thread, which alone hears of it) and the second has its usual effect. Raises :class:`SenderFailed`."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        finished = False
        with self._interruptible():
            for message in self._messages():
                finished = finished or "finished" in message
                yield message
        if not finished:
            raise SenderFailed(f"the sending process ended without a word (exit code {self._process.wait()})")

    def interrupt(self) -> None:
        """Let it cancel what is under way, record that, and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """An exception in the middle of reading a message would lose the rest of them: a handler does not raise."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        def once(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            self.interrupt()

        signal.signal(signal.SIGINT, once)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = msgspec.json.decode(line)
            if "failed" in message:
                raise SenderFailed(message["failed"])
            yield message
