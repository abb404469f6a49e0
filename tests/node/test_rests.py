"""How long a model has had nothing to do, as its node says it."""

from __future__ import annotations

import asyncio

from prism.engine import events
from prism.wire.messages import Finish, ResumeReply
from tests.patience import happens

from .conftest import Bench


async def test_a_model_rests_from_the_end_of_its_last_request(bench: Bench) -> None:
    engine = bench.engine_up()
    bench.clock_s = 1.0
    assert bench.shell.idle_s("m") == 1.0, "since it came up"
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    await bench.submit("a")
    await bench.submit("b")
    await happens(lambda: len(engine.works) == 2, "both requests")
    bench.clock_s = 5.0
    assert bench.shell.idle_s("m") == 0.0
    bench.shell.desk.cancel("b")
    assert bench.shell.idle_s("m") == 0.0, "the other one runs"
    bench.clock_s = 6.0
    engine.queue.put_nowait(events.AttemptFinished(rid="a", attempt=1, reason="stop", total_tokens=3, final=b"last"))
    await happens(lambda: bench.outbox.of(Finish), "the end")
    bench.clock_s = 8.0
    assert bench.shell.idle_s("m") == 2.0, "from the engine's last token, not from the front door's confirmation"
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, complete=True))
    assert bench.shell.idle_s("m") == 2.0
    engine.queue.put_nowait(None)
    await consuming


async def test_a_request_whose_front_door_is_asked_counts_and_so_does_one_that_was_cancelled(bench: Bench) -> None:
    bench.engine_up()
    bench.clock_s = 3.0
    await bench.submit("a", hops=1)
    await happens(lambda: len(bench.shell.desk.requests), "the request")
    assert bench.shell.idle_s("m") == 0.0
    bench.shell.desk.cancel("a")
    bench.clock_s = 4.0
    assert bench.shell.idle_s("m") == 1.0
