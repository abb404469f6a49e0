"""A ``prism-serve`` of one's own for the length of a run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx


def exit_on_sigterm() -> None:
    """For a program that is told to end: its server stops first, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class ServerFailed(RuntimeError):
    """The server did not come up, or a model did not; the message has the end of its log."""


class Server:
    """Starts ``prism-serve CATALOG`` on a free port and stops it, with all its children, at the end of the block. Its
    state directory is temporary (and short, as sockets are in it) and is kept only when the block fails."""

    def __init__(self, catalog: Path, start_timeout_s: float = 240.0) -> None:
        self.catalog, self.start_timeout_s = catalog.resolve(), start_timeout_s
        self.state = Path(tempfile.mkdtemp(prefix="slo-"))
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_key = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0

    def __enter__(self) -> Server:
        command = [
            sys.executable, "-m", "prism.cli.main", "serve", str(self.catalog), "--host", "127.0.0.1",
            "--port", str(self.port), "--state-dir", str(self.state),
        ]  # fmt: skip
        began_s = time.monotonic()
        with (self.state / "console.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            self._wait_until_up()
        except BaseException:
            self._stop()
            raise
        self.started_s = time.monotonic() - began_s
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop()
        if kind is None:
            shutil.rmtree(self.state, ignore_errors=True)
        else:
            print(f"the server's logs are in {self.state / 'logs'}", file=sys.stderr)

    def admin(self, path: str) -> dict[str, Any]:
        """``GET /admin/PATH``."""
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        reply = httpx.get(f"{self.url}/admin/{path}", headers=headers, timeout=10.0)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def command(self, path: str) -> dict[str, Any]:
        """``POST /admin/PATH``."""
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        reply = httpx.post(f"{self.url}/admin/{path}", headers=headers, timeout=60.0)
        if reply.status_code != 200:
            raise ServerFailed(f"{path}: HTTP {reply.status_code}: {reply.text[:500]}\n{self.tail()}")
        found: dict[str, Any] = reply.json()
        return found

    def settle(self, unload: bool, timeout_s: float = 60.0) -> None:
        """Wait until no request is open; with ``unload`` have every model leave, until none is loaded: one that had to
        make room earlier may be loaded ahead into the memory that the others give back (:mod:`prism.policy.prewarm`),
        and is told to leave, too."""
        self._until(lambda: not self.admin("requests")["requests"], timeout_s, lambda: "requests are still open")
        if unload:
            self._until(self._unload_all, timeout_s, lambda: f"models are still loaded: {self._replicas()}")

    def _unload_all(self) -> bool:
        """Whether none is loaded, once all that are have been told to leave and have left."""
        for name in self._replicas():
            self.command(f"models/{name}/unload")
        return not self._replicas()

    def _replicas(self) -> dict[str, list[str]]:
        """States of the instances of every model that has any."""
        found = {m["name"]: [r["state"] for r in m["replicas"]] for m in self.admin("models")["models"]}
        return {name: states for name, states in found.items() if states}

    def _until(self, condition: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"after {timeout_s:.0f} s {otherwise()}\n{self.tail()}")
            time.sleep(0.1)

    def ask(self, model: str, timeout_s: float = 120.0) -> float:
        """One short request; returns how long it took. Brings the model up where the policy allows it."""
        began_s = time.monotonic()
        body = {"model": model, "prompt": "the time of day", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
        if reply.status_code != 200:
            raise ServerFailed(f"{model}: HTTP {reply.status_code}: {reply.text[:500]}\n{self.tail()}")
        return time.monotonic() - began_s

    def tail(self, lines: int = 25) -> str:
        """The end of the server's output."""
        text = (self.state / "console.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _wait_until_up(self) -> None:
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s:
            assert self._process is not None
            if self._process.poll() is not None:
                raise ServerFailed(f"prism-serve ended with code {self._process.returncode}\n{self.tail()}")
            try:
                if self._is_up():
                    return
            except (httpx.HTTPError, OSError):
                pass
            time.sleep(0.2)
        raise ServerFailed(f"prism-serve did not answer within {self.start_timeout_s:.0f} s\n{self.tail()}")

    def _is_up(self) -> bool:
        """It answers, and its node has reported its devices."""
        if httpx.get(f"{self.url}/v1/models", timeout=5.0).status_code not in (200, 401):
            return False
        self.admin_key = (self.state / "admin.key").read_text().strip()
        return bool(self.admin("devices")["devices"])

    def _stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
