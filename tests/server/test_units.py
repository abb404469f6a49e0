"""Small pieces, without SGLang, sockets or clocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import whole_model
from prism.core.views import InstanceState
from prism.server import resuming
from prism.server.errors import ApiError, from_abort
from prism.server.pace import Pace
from prism.server.placements import Placements
from prism.server.stream import held_back
from prism.server.token_log import TokenLog
from prism.store.memory import MemoryStore
from prism.store.values import Replica
from prism.wire import keys
from prism.wire.messages import Finish, ResumeReply, TokenItem, Tokens, encode
from tests.patience import PATIENCE_S, happens


def item(attempt: int, start: int, ids: list[int], finish: bool = False) -> TokenItem:
    return TokenItem(
        id="r",
        attempt=attempt,
        start=start,
        token_ids=ids,
        finish={"type": "stop"} if finish else None,
        cached_tokens=0,
        engine_time_s=0.0,
        extra=b"",
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens to a request of 12 tokens: deliveries (start, count), possibly repeated or lost, and restarts."""
    steps = st.tuples(st.sampled_from(["send", "send", "send", "restart"]), st.integers(0, 12), st.integers(0, 6))
    return draw(st.lists(steps, max_size=30))


@given(histories())
def test_the_log_is_always_a_prefix_of_the_answer(history: list[tuple[str, int, int]]) -> None:
    answer = list(range(100, 112))
    log = TokenLog()
    for kind, start, count in history:
        if kind == "restart":
            stale = log.attempt
            log.supersede()
            assert log.take(item(stale, len(log.tokens), [1, 2, 3])) is None
        else:
            before = len(log.tokens)
            ids = answer[start : start + count]
            fresh = log.take(item(log.attempt, start, ids, finish=start + count >= 12 and bool(ids)))
            added = log.tokens[before:]
            assert (fresh.token_ids if fresh else []) == added
            assert fresh is None or ids[fresh.skipped :] == added
        assert log.tokens == answer[: len(log.tokens)]
        assert not log.complete(12) or log.tokens == answer


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_held_back_is_the_longest_end_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    sizes = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    assert held_back(text, stops) == max(sizes, default=0)


def test_pace_is_honest() -> None:
    pace = Pace()
    assert pace.wait_s(100, 100, 0.0) == 5.0
    for i in range(100):
        pace.finished(i * 0.1)
    assert pace.rate(10.0) == pytest.approx(10.0, rel=0.05)
    assert pace.wait_s(500, 200, 10.0) == pytest.approx(20.0, rel=0.05)
    assert pace.rate(100.0) == 0.0


async def test_placements_name_the_queues_of_ready_replicas_and_count_what_is_sent() -> None:
    store, model = MemoryStore(), ModelName("m")
    placements = Placements(store)
    assert placements.queues_for_one(model) == [keys.INACTIVE_QUEUE]
    holder = await store.acquire_lease("c", "ipc:///c", 60)
    assert holder is not None
    a, b, c = (
        Replica(parts=whole_model([DeviceId(f"n/host:{i}")]), state=InstanceState(state), generation=Generation(i))
        for i, state in enumerate(["ready", "ready", "loading"])
    )
    await store.set_placement(model, [c], holder)
    await placements._reload()
    assert placements.queues_for_one(model) == [keys.INACTIVE_QUEUE] and placements.state(model) == "loading"
    await store.set_placement(model, [a, b, c], holder)
    await placements._reload()
    assert placements.queues_for_one(model) == [keys.device_queue("n/host:0"), keys.device_queue("n/host:1")]
    assert placements.waiting == 3
    await store.add(keys.device_queue("n/host:1"), "r", b"")
    measuring = asyncio.create_task(placements.measure(0.001))
    await happens(lambda: placements.waiting == 1, "the queues being looked at")
    measuring.cancel()


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ({"type": "abort", "status_code": 400, "message": "bad grammar"}, 400),
        ({"type": "abort", "status_code": 503, "message": "m"}, 503),
        ({"type": "abort", "status_code": 500}, 500),
        ({"type": "abort"}, 409),
    ],
)
def test_aborts_become_errors(finish: dict[str, object], status: int) -> None:
    error = from_abort(finish)
    assert isinstance(error, ApiError) and error.status == status


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "Failed to compile json grammar: [13:15:28] /project/cpp/schema.cc:2999: Unsupported type x\n",
            "Unsupported type x.",
        ),
        (
            "Failed to compile json grammar: [13:15:28] /cpp/a.cc:29: Check failed: (err.empty()) is false: Bad: 1",
            "Bad: 1.",
        ),
        ("Failed to compile regex grammar: no place", "no place."),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_told_by_its_field(said: str, why: str) -> None:
    error = from_abort({"type": "abort", "status_code": 400, "message": said}, "response_format")
    assert (error.status, error.param) == (400, "response_format")
    assert error.message == f"'response_format' cannot be turned into a grammar: {why}"


class Kept:
    """What of a stream and of an outbox the answers to agents need."""

    id, model, error = "r", "m", None

    def __init__(self) -> None:
        self.log, self.sent = TokenLog(), list[ResumeReply]()

    @property
    def finished(self) -> bool:
        return self.log.finish is not None

    def send(self, address: str, message: ResumeReply) -> bool:
        self.sent.append(message)
        return True


async def test_an_end_waits_while_the_mailbox_holds_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens may be among them: running the request again would be for nothing."""
    monkeypatch.setattr(resuming, "SETTLE_S", 0.0)
    monkeypatch.setattr(resuming, "BEHIND_S", 0.01)
    kept, unread = Kept(), asyncio.Event()
    unread.set()
    answers: Any = resuming.Resuming({"r": kept}, kept, kept.log.take, unread.is_set)  # type: ignore[dict-item, arg-type]
    final = encode(Tokens(engine="e", items=[item(1, 2, [30], finish=True)]))
    answers.finish(Finish(id="r", reply_to="a", attempt=1, total_tokens=3, final=final))
    await asyncio.sleep(0.05)
    assert not kept.sent
    kept.log.take(item(1, 0, [10, 20]))
    unread.clear()
    async with asyncio.timeout(PATIENCE_S):
        while not kept.sent:
            await asyncio.sleep(0.01)
    assert kept.sent[0].complete and kept.log.tokens == [10, 20, 30]
