"""Long comparisons in pieces: each piece is a file of its own, so that runs go on where they were interrupted and
several processes share the work. Pieces of one folder belong to one commit; the results' files are made of them at the
end."""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Work = Callable[[], dict[str, Any]]


class Pieces:
    """JSON objects by name in ``folder``. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> dict[str, Any] | None:
        """The piece, if it is done."""
        file = self._file(name)
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def do(self, wanted: Iterable[tuple[str, Work]], until_s: float = float("inf")) -> Iterator[tuple[str, float]]:
        """Make the pieces that are neither done nor under way elsewhere, in order, none after ``until_s``
        (``time.time``). Yields the name and the processor time of each that was made."""
        for name, work in wanted:
            if time.time() >= until_s:
                return
            if self._file(name).exists():
                continue
            with self._claim(name) as mine:
                if mine and not self._file(name).exists():
                    started_s = time.process_time()
                    found = work()
                    self._write(name, found)
                    yield name, time.process_time() - started_s

    def kept(self, name: str, work: Work) -> dict[str, Any]:
        """The piece ``name``, made now if it is not there (twice, when two processes want it at once: alike)."""
        found = self.get(name)
        if found is None:
            found = work()
            self._write(name, found)
        return found

    @contextmanager
    def _claim(self, name: str) -> Iterator[bool]:
        """Whether this process may make the piece; the claim dies with the process."""
        with self._file(name).with_suffix(".claim").open("w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _write(self, name: str, found: dict[str, Any]) -> None:
        file = self._file(name)
        fresh = file.with_suffix(f".{time.time_ns()}.new")
        fresh.write_text(json.dumps(found), "utf-8")
        fresh.rename(file)

    def _file(self, name: str) -> Path:
        return self._folder / f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', name)}.json"
