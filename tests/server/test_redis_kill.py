"""The front door on a real store that is killed with SIGKILL under running streams."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from prism.config.catalog import load_catalog
from prism.engine.fake import FakeSpeed
from prism.engine.fake_payload import fake_tokens
from prism.store.connect import open_store
from prism.store.embedded import EmbeddedServer
from tests.patience import PATIENCE_S, until
from tests.server.conftest import CATALOG, LETTERS
from tests.server.live import LiveFront
from tests.server.test_streams import nothing_left
from tests.server.tiny import make_model

pytestmark = pytest.mark.redis


@pytest.fixture
def killed() -> Iterator[tuple[LiveFront, EmbeddedServer]]:
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    make_model(folder / "tiny")
    (folder / "catalog.yaml").write_text(CATALOG)
    server = EmbeddedServer(folder / "redis")
    server.start()
    watched = threading.Thread(target=lambda: asyncio.run(server.watch()), daemon=True)
    watched.start()
    speeds = {"slow": FakeSpeed(prefill_s=0.01, step_s=0.01, vocab=LETTERS)}
    with LiveFront(load_catalog(folder / "catalog.yaml"), folder, speeds, open_store(server.url)) as front:
        yield front, server
    server.stop()
    watched.join(PATIENCE_S)
    shutil.rmtree(folder, ignore_errors=True)


def test_every_answer_is_whole_while_redis_is_killed(killed: tuple[LiveFront, EmbeddedServer]) -> None:
    live, server = killed
    dice = random.Random(7)

    def ask(index: int) -> None:
        time.sleep(dice.random())
        body = {"model": "slow", "prompt": [1, 2, index % 200], "max_tokens": 40, "stream": bool(index % 2)}
        with httpx.Client(transport=httpx.HTTPTransport(uds=live.socket), timeout=PATIENCE_S) as client:
            answer = client.post("http://prism/v1/completions", json={**body, "stream": False})
        assert answer.status_code == 200, answer.text
        wanted = bytes(fake_tokens((1, 2, index % 200), 0, 40, LETTERS)).decode()
        assert answer.json()["choices"][0]["text"] == wanted

    def killer() -> None:
        for kills in range(3):
            pid = until(lambda: server.pid, "the store's running")
            time.sleep(0.25)
            os.kill(pid, signal.SIGKILL)
            until(lambda before=kills: server.restarts > before, "its being restarted")  # type: ignore[misc]

    thread = threading.Thread(target=killer)
    thread.start()
    asked = 0
    with ThreadPoolExecutor(16) as pool:
        while asked < 60 or thread.is_alive():
            for done in [pool.submit(ask, index) for index in range(asked, asked + 20)]:
                done.result()
            asked += 20
    assert server.restarts == 3
    until(lambda: nothing_left(live), "every request was acknowledged once")
