"""A prism-serve and some prism-nodes as processes of their own, all on loopback or each on a host of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests import warm
from tests.net.netns import Hosts, inside
from tests.patience import PATIENCE_S, START_S, free_port, until

from .server import HTTP, REPO, family

PRISM = [sys.executable, "-m", "prism.cli.main"]


@dataclass(frozen=True)
class Host:
    """Where processes run: behind which command, under which address."""

    prefix: tuple[str, ...] = ()
    ip: str = "127.0.0.1"


@dataclass
class Fleet:
    """Started by :meth:`serve` and :meth:`join`; :meth:`stop` leaves nothing behind."""

    folder: Path
    hosts: Sequence[Host]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    store_port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0].ip}:{self.port}"

    @property
    def secret_file(self) -> Path:
        return self.folder / "local" / "fleet.secret"

    def begin_serving(self, catalog: dict[str, Any]) -> None:
        self.port, self.store_port = free_port(), free_port()
        file = self.folder / "catalog.yaml"
        file.write_text(json.dumps(catalog))
        ip = self.hosts[0].ip
        options = ["--host", ip, "--port", str(self.port), "--fleet", f"{ip}:{self.store_port}"]
        self._spawn("local", 0, [*PRISM, "serve", str(file), "--state-dir", str(self.folder / "local"), *options])
        store = self.folder / "local" / "run" / "valkey.sock"
        until(lambda: self._runs("local") and self.secret_file.exists(), "the secret")
        until(lambda: self._runs("local") and store.exists(), "the store")

    def begin_joining(
        self,
        name: str,
        host: int,
        *,
        hide: Path | None = None,
        secret: Path | None = None,
        memory: str = "32MiB",
    ) -> None:
        """``hide``: this folder does not exist on that machine (needs root)."""
        command = [
            *[*PRISM, "node", "--redis-url", f"redis://{self.hosts[0].ip}:{self.store_port}"],
            *["--secret-file", str(secret or self.secret_file), "--listen", self.hosts[host].ip, "--name", name],
            *["--device", f"host:0={memory}", "--state-dir", str(self.folder / name)],
        ]
        if hide is not None:
            covered = f'mount -t tmpfs none {hide} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", covered, "sh", *command]
        self._spawn(name, host, command)

    def ready(self, *names: str) -> None:
        for name in names:
            word = "ready" if name == "local" else "part of the fleet"
            until(lambda n=name, w=word: self._says(n, w), f"{name} being ready", limit_s=START_S)  # type: ignore[misc]

    def _says(self, name: str, word: str) -> bool:
        return self._runs(name) and word in self.output(name)

    def _runs(self, name: str) -> bool:
        """Fails with what it said when it has ended: nobody waits for what cannot come."""
        assert self.processes[name].poll() is None, f"{name} ended:\n{self.output(name)}"
        return True

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def _spawn(self, name: str, host: int, command: list[str]) -> None:
        with (self.folder / f"{name}.txt").open("wb") as out:
            environment = {**warm.environment(), "OMP_NUM_THREADS": "1"}
            self.processes[name] = subprocess.Popen(
                [*self.hosts[host].prefix, *command], stdout=out, stderr=out, cwd=REPO, env=environment
            )

    def prism(self, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """One command of the operator, on the server's host."""
        command = [*self.hosts[0].prefix, *PRISM, *arguments, "--state-dir", str(self.folder / "local")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=PATIENCE_S, check=False)
        assert not ok or done.returncode == 0, done.stderr
        return done

    def look(self, path: str) -> dict[str, Any]:
        """What the admin API says, asked on the server's host: for who asks again and again, where a command would take
        the processors from what is waited for."""
        key = (self.folder / "local" / "admin.key").read_text().strip()
        asked = partial(HTTP.get, f"{self.url}/admin/{path}", headers={"Authorization": f"Bearer {key}"})
        return dict(inside(self.hosts[0].prefix, asked).raise_for_status().json())

    def shown(self, model: str) -> dict[str, Any]:
        """Everything about a model, as ``prism show`` has it."""
        return self.look(f"models/{model}")

    def replicas(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self.shown(model)["replicas"] if r["state"] == "ready"]

    def ask(self, model: str, prompt: str, tokens: int, at: Callable[[int], object] = lambda pieces: None) -> str:
        """A streamed greedy completion; ``at`` hears how many pieces have come."""
        return self.ask_counted(model, prompt, tokens, at)[0]

    def ask_counted(
        self, model: str, prompt: str, tokens: int, at: Callable[[int], object] = lambda pieces: None
    ) -> tuple[str, int]:
        """The same, and how many tokens of the prompt were not computed for it."""
        command = [sys.executable, "-m", "tests.e2e.ask", self.url, model, prompt, str(tokens)]
        pieces: list[str] = []
        cached = 0
        with subprocess.Popen([*self.hosts[0].prefix, *command], stdout=subprocess.PIPE, text=True, cwd=REPO) as client:
            assert client.stdout is not None
            for line in client.stdout:
                message = json.loads(line)
                if "status" in message:
                    assert message["status"] == 200
                    cached = int(message["cached"])
                    break
                assert message["error"] is None, message
                pieces.append(message["text"])
                at(len(pieces))
        return "".join(pieces), cached

    def kill(self, name: str) -> None:
        """kill -9 of the machine: all of its processes, if it has not ended by itself."""
        for process in self.family(name) if self.processes[name].poll() is None else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes.pop(name).wait(PATIENCE_S)

    def leave(self, name: str) -> None:
        """SIGTERM, and its end; no process is left of it."""
        family = self.family(name)
        os.kill(self._leader(name), signal.SIGTERM)
        assert self.processes.pop(name).wait(PATIENCE_S) == 0
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive

    def stop(self) -> None:
        for name in [n for n in self.processes if n != "local"] + ["local"] * ("local" in self.processes):
            self.leave(name)

    def family(self, name: str) -> list[psutil.Process]:
        return family(self.processes[name].pid, self.folder / name)

    def _leader(self, name: str) -> int:
        """The program behind ``ip netns exec`` or ``unshare``, which replace themselves: the process itself."""
        return self.processes[name].pid


@contextmanager
def serving(
    folder: Path, hosts: Sequence[Host], config: dict[str, Any], machines: Sequence[str], memory: str
) -> Iterator[Fleet]:
    """The server on the first host and ``machines`` on those behind it, ready; nothing is left of them afterwards."""
    fleet = Fleet(folder, hosts)
    try:
        fleet.begin_serving(config)
        for host, name in enumerate(machines, 1):
            fleet.begin_joining(name, host, memory=memory)
        fleet.ready("local", *machines)
        yield fleet
        fleet.stop()
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


def on_hosts(links: Hosts) -> list[Host]:
    """Processes on hosts of their own."""
    return [Host(tuple(links.command(i, [])), links.ip(i)) for i in range(links.count)]
