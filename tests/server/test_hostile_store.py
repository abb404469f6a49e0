"""The front door over a Redis that is full, slow, or emptied behind our back: clients hear of it, nobody waits on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis

from prism.config.catalog import load_catalog
from prism.engine.fake import FakeSpeed
from prism.server import broker
from prism.store.connect import open_store
from prism.store.embedded import EmbeddedServer
from prism.wire import keys
from tests.patience import PATIENCE_S, until
from tests.server.conftest import CATALOG, LETTERS
from tests.server.live import LiveFront
from tests.server.test_streams import nothing_left
from tests.server.tiny import make_model

pytestmark = [pytest.mark.redis, pytest.mark.hostile]


@pytest.fixture
def served() -> Iterator[tuple[LiveFront, redis.Redis]]:
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    make_model(folder / "tiny")
    (folder / "catalog.yaml").write_text(CATALOG)
    server = EmbeddedServer(folder / "redis")
    server.start(PATIENCE_S)
    speeds = {"slow": FakeSpeed(prefill_s=0.01, step_s=0.02, vocab=LETTERS)}
    with (
        LiveFront(load_catalog(folder / "catalog.yaml"), folder, speeds, open_store(server.url)) as front,
        redis.Redis(unix_socket_path=str(server.socket_path)) as other,
    ):
        yield front, other
        other.config_set("maxmemory", 0)
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def ask(live: LiveFront, tokens: int = 20, model: str = "slow") -> httpx.Response:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens}
    with httpx.Client(transport=httpx.HTTPTransport(uds=live.socket), timeout=PATIENCE_S) as client:
        return client.post("http://prism/v1/completions", json=body)


def begun(live: LiveFront, answers: Sequence[Future[httpx.Response]]) -> bool:
    """Whether each has a token, or has ended: a stream alone says only that its entry is about to be written."""
    answering = sum(stream.last_token_s is not None for stream in list(live.front.broker.streams.values()))
    return answering + sum(answer.done() for answer in answers) >= len(answers)


def unserved(live: LiveFront) -> int:
    """Entries in the queue of models without an engine: who is written there only after the store was emptied waits
    on, and rightly."""
    return sum(live.run(live.store.lengths([keys.INACTIVE_QUEUE])))


def test_full_is_said_with_503_and_what_runs_ends(served: tuple[LiveFront, redis.Redis]) -> None:
    live, other = served
    assert ask(live).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, live, 100) for _ in range(4)]
        until(lambda: begun(live, running), "the first token of each")
        other.config_set("maxmemory", 1)
        refused = ask(live)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "unavailable" and "retry-after" in refused.headers
        assert [answer.result().status_code for answer in running] == [200] * 4
    other.config_set("maxmemory", 0)
    assert ask(live).status_code == 200
    until(lambda: nothing_left(live), "every request being acknowledged")


def test_slow_is_waited_for(served: tuple[LiveFront, redis.Redis]) -> None:
    live, other = served
    other.execute_command("CLIENT", "PAUSE", "1500", "ALL")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(live), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    until(lambda: nothing_left(live), "every request being acknowledged")


def test_emptied_behind_our_back_ends_every_request_one_way_or_the_other(
    served: tuple[LiveFront, redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "LOST_AFTER_S", 2.0)
    monkeypatch.setattr(broker, "AUDIT_S", 0.5)
    live, other = served
    assert ask(live).status_code == 200
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, live, 3, "cold") for _ in range(2)]  # nobody serves it
        until(lambda: unserved(live) == 2, "two requests being written")
        answers = [pool.submit(ask, live, 60) for _ in range(4)]
        until(lambda: begun(live, answers), "the first token of each of the others")
        other.flushall()
        for answer in answers:
            assert answer.result().status_code in (200, 503)
        for answer in waiting:
            lost = answer.result()
            assert lost.status_code == 503 and lost.json()["error"]["code"] == "request_lost", lost.text
    until(lambda: not live.front.broker.streams, "nothing being open")
