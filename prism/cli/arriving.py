"""Weights on their way to machines, live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path
from prism.cli.errors import CliError
from prism.core.ids import node_of

LOOK_S: Final = 0.25
LATE_S: Final = 1.5
"""What the server shows is up to a second old: so long after the end an arrival may still come to be known."""


@contextmanager
def watched(client: AdminClient, model: str) -> Iterator[None]:
    """Shows, while the block runs, what has come to which machine: bars on a terminal, a line per machine and end
    elsewhere (on the error stream)."""
    done = threading.Event()
    before = _look(client, model)
    with output.progress(f"loading {model}") as report:
        watcher = threading.Thread(target=_watch, args=(client, model, done, report, before), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


@dataclass(frozen=True, slots=True)
class _Look:
    """By machine."""

    coming: dict[str, dict[str, Any]]
    """What is on its way, or has just arrived."""
    with_model: set[str]
    """Machines where the model is loaded or being loaded, or that have its weights."""


def _look(client: AdminClient, model: str) -> _Look:
    try:
        shown = client.get(model_path(model))
    except CliError:
        return _Look({}, set())  # the load itself says what is wrong
    replicas = {str(node_of(r["devices"][0])): r for r in shown.get("replicas", ())}
    coming = {node: arriving for node, r in replicas.items() if (arriving := r.get("arriving"))}
    return _Look(coming, {*replicas, *shown.get("held", {})})


def _watch(client: AdminClient, model: str, done: threading.Event, report: Any, before: _Look) -> None:
    """Until ``done``, and then until what came to machines without the model is known."""
    old = {arriving["session"] for arriving in before.coming.values()}
    said: set[str] = set()
    ended_s: float | None = None
    while True:
        if done.wait(LOOK_S) and ended_s is None:
            ended_s = time.monotonic()
        now = _look(client, model)
        coming = {node: a for node, a in now.coming.items() if a["session"] not in old}
        if coming:
            report(sum(a["bytes_done"] for a in coming.values()), sum(a["bytes_all"] for a in coming.values()))
        for node, arriving in coming.items():
            if arriving["took_s"] is not None and node not in said:
                said.add(node)
                click.echo(line(node, arriving), err=True)
        missing = now.with_model - before.with_model - said
        alone = len(now.with_model) < 2  # then nothing can have come from elsewhere
        if ended_s is not None and (alone or not missing or time.monotonic() - ended_s > LATE_S):
            return
        if ended_s is not None:
            time.sleep(LOOK_S)


def line(node: str, arriving: dict[str, Any]) -> str:
    """``b: 15.1 MiB in 80ms from local (12 pieces, 190.0 MiB/s), c (4 pieces, 180.2 MiB/s)``."""
    links = [
        f"{source} ({pieces} pieces{f', {output.size(nbytes / took_s)}/s' if took_s else ''})"
        for source, (pieces, nbytes, took_s) in sorted(arriving["sources"].items())
    ]
    took = output.seconds(arriving["took_s"])
    return f"{node}: {output.size(arriving['bytes_all'])} in {took} from {', '.join(links) or 'its own memory'}"
