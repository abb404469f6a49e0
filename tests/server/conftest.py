"""One front door for all tests of a session: building SGLang's side takes seconds."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.catalog import Catalog, load_catalog
from prism.engine.fake import FakeSpeed
from prism.wire import keys
from prism.wire.commands import AdminCommand
from prism.wire.messages import CommandResult
from tests.server.live import LiveFront
from tests.server.tiny import make_model

LETTERS = range(97, 123)
CATALOG = """
devices: [{id: "host:0", memory: 1GiB}]
server: {sse_keepalive: 200ms, write_timeout: 1s, max_body: 1MiB, max_queue: 20000}
models:
  - {name: fast, path: tiny, aliases: [quick]}
  - {name: slow, path: tiny}
  - {name: endless, path: tiny}
  - {name: cold, path: tiny}
  - {name: busy, path: tiny, max_queue: 2}
  - {name: "org/thinker:7b", path: tiny, reasoning_parser: qwen3, tool_call_parser: qwen}
  - {name: broken, path: nowhere}
  - {name: vectors, path: tiny, kind: embed}
  - {name: slow-vectors, path: tiny, kind: embed}
  - {name: cold-vectors, path: tiny, kind: embed}
  - {name: labels, path: tiny, kind: classify}
  - {name: pairs, path: tiny, kind: rerank}
"""
SPEEDS = {
    "fast": FakeSpeed(vocab=LETTERS),
    "slow": FakeSpeed(prefill_s=0.01, step_s=0.02, vocab=LETTERS),
    "endless": FakeSpeed(prefill_s=0.01, step_s=0.5, vocab=LETTERS),  # minutes for an answer: something ends it
    "org/thinker:7b": FakeSpeed(vocab=LETTERS),
    "vectors": FakeSpeed(),
    "slow-vectors": FakeSpeed(prefill_s=60.0),  # something ends it
    "labels": FakeSpeed(),
    "pairs": FakeSpeed(),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang reads fields that it has marked deprecated itself."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"))


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="prism-"))
    make_model(path / "tiny")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def catalog(folder: Path) -> Catalog:
    file = folder / "catalog.yaml"
    file.write_text(CATALOG)
    return load_catalog(file)


@pytest.fixture(scope="session")
def live(catalog: Catalog, folder: Path) -> Iterator[LiveFront]:
    with LiveFront(catalog, folder, SPEEDS) as front:
        yield front


@pytest.fixture
def commands(live: LiveFront) -> Iterator[list[AdminCommand]]:
    """Commands as the controller read them; it refuses to unload and does everything else."""
    seen: list[AdminCommand] = []

    async def serve() -> None:
        while True:
            for entry in await live.store.read_new([keys.COMMANDS], "controller", 10, 0.2):
                command = entry.command
                seen.append(command)
                refused = command.verb == "unload"
                result = CommandResult(
                    command=command.command,
                    ok=not refused,
                    error="CommandRefused" if refused else "",
                    detail={"detail": "it is pinned"} if refused else {"verb": command.verb},
                    phases={"load": 0.1} if command.verb == "load" else {},
                )
                live.node.pool._outbox.send(command.reply_to, result)
                await live.store.done(entry, "controller")

    task = asyncio.run_coroutine_threadsafe(serve(), live._loop)
    yield seen
    task.cancel()
