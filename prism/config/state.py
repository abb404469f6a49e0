"""What lies in the state directory. Nobody else writes these names out."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from prism.core.errors import PrismError

DEFAULT_STATE_DIR: Final = "./state"


class StateError(PrismError):
    """The state directory cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below one server's state directory (``--state-dir``)::

    ROOT/redis/          append-only file of the embedded server
    ROOT/run/            sockets (short names: a unix socket path has 107 bytes at most)
    ROOT/store/          packed weights
    ROOT/logs/           NAME.jsonl per process, decisions.jsonl
    ROOT/admin.key       secret of the admin API, made when the catalog has no admin key
    ROOT/fleet.secret    what other machines need to join, made when they may
    ROOT/profiles.json   what models can carry on devices of their own (``prism profile``)
    ROOT/server.json     where the running server listens: {"url", "pid", "catalog", "started_s"}
    """

    root: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str] = DEFAULT_STATE_DIR) -> StateDir:
        return cls(Path(path).expanduser().absolute())

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def accounts(self) -> Path:
        """The devices' memory accounts."""
        return self.run / "accounts"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def decision_log(self) -> Path:
        return self.logs / "decisions.jsonl"

    @property
    def admin_key_file(self) -> Path:
        return self.root / "admin.key"

    @property
    def fleet_secret_file(self) -> Path:
        return self.root / "fleet.secret"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles.json"

    @property
    def server_file(self) -> Path:
        return self.root / "server.json"

    def create(self) -> None:
        """Make the directories, readable by their owner only. Raises :class:`StateError`."""
        try:
            for folder in (self.root, self.redis, self.run, self.store, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"state directory {self.root} cannot be made: {error.strerror or error}") from error

    def take(self) -> IO[str]:
        """Make this process the one server of the directory: before it writes anything here. The lock is held until
        the returned file is closed. Raises :class:`StateError`."""
        lock = (self.run / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            running = self.read_server() or {}
            raise StateError(
                f"another server uses the state directory {self.root} (process {running.get('pid', 'unknown')}); "
                "stop it or choose another one with --state-dir"
            ) from None
        return lock

    def admin_key(self) -> str:
        """The secret in :attr:`admin_key_file`; made on first use, whole: front doors that start at the same time all
        get the one that was there first."""
        file = self.admin_key_file
        try:
            if not file.exists():
                with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=file.parent, prefix=file.name) as fresh:
                    fresh.write("prism-admin-" + secrets.token_urlsafe(24) + "\n")
                    fresh.flush()
                    with suppress(FileExistsError):
                        os.link(fresh.name, file)
            return file.read_text("ascii").strip()
        except OSError as error:
            raise StateError(f"{file} cannot be written: {error.strerror or error}") from error

    def write_server(self, url: str, catalog: Path, started_s: float) -> None:
        """Say where the server listens, in one step, so that a reader never sees half a file."""
        text = json.dumps({"url": url, "pid": os.getpid(), "catalog": str(catalog), "started_s": started_s})
        fresh = self.server_file.with_suffix(".new")
        fresh.write_text(text + "\n", "utf-8")
        fresh.replace(self.server_file)

    def withdraw_server(self) -> None:
        """At the end of this process: what it wrote with :meth:`write_server` goes, another process' file stays."""
        if (self.read_server() or {}).get("pid") == os.getpid():
            self.server_file.unlink(missing_ok=True)

    def read_server(self) -> dict[str, Any] | None:
        """What :meth:`write_server` wrote; None when no server was started here."""
        try:
            data = json.loads(self.server_file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None
