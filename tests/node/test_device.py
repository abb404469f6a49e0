"""The life of a request on a device: what is acknowledged, moved, refused, asked, run again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prism.core.device_events import WaitingShared
from prism.engine import events
from prism.node.fronts import DEAD_AFTER_S
from prism.store.values import FRONT_DEAD
from prism.wire import keys
from prism.wire.messages import Failed, Finish, ResumeQuery, ResumeReply
from tests.patience import happens

from .conftest import QUEUE, Bench, Engine


async def until(condition: Callable[[], object]) -> None:
    await happens(condition, "what the test waits for")


def finished(rid: str, attempt: int = 1) -> events.AttemptFinished:
    return events.AttemptFinished(rid=rid, attempt=attempt, reason="stop", total_tokens=3, final=b"last")


async def test_a_request_is_acknowledged_only_when_its_front_door_has_everything(bench: Bench) -> None:
    engine = bench.engine_up()
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    await bench.submit("a")
    await until(lambda: engine.works)
    assert engine.works[0].attempt == 1 and engine.works[0].resumed == ()
    engine.queue.put_nowait(finished("a"))
    await until(lambda: bench.outbox.of(Finish))
    await bench.settle()
    assert await bench.left() == 1, "the front door has not confirmed yet"
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, complete=True))
    await bench.settle()
    assert await bench.left() == 0
    assert not len(bench.shell.desk.requests)
    engine.queue.put_nowait(None)
    assert await consuming is None


async def test_the_store_is_told_how_many_requests_run(bench: Bench) -> None:
    """So that others go elsewhere while some wait here."""
    told: list[int] = []
    bench.store.tell_running = lambda queue, running: noted(told, running)  # type: ignore[method-assign, assignment]
    engine = bench.engine_up()
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    await bench.submit("a")
    await until(lambda: told[-1:] == [1])
    engine.queue.put_nowait(finished("a"))
    await until(lambda: bench.outbox.of(Finish))
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, complete=True))
    await until(lambda: told[-1] == 0)
    engine.queue.put_nowait(None)
    await consuming


async def noted(told: list[int], running: int) -> None:
    told.append(running)


async def test_a_front_door_that_lacks_tokens_gets_the_request_run_again_from_where_it_is(bench: Bench) -> None:
    engine = bench.engine_up()
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    await bench.submit("a")
    await until(lambda: engine.works)
    engine.queue.put_nowait(finished("a"))
    await until(lambda: bench.outbox.of(Finish))
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, attempt=2, token_ids=[7, 8]))
    await until(lambda: len(engine.works) == 2)
    assert engine.works[1].attempt == 2 and engine.works[1].resumed == (7, 8)
    engine.queue.put_nowait(finished("a", attempt=1))  # late news of the first attempt
    await bench.settle()
    assert len(bench.outbox.of(Finish)) == 1
    engine.queue.put_nowait(None)
    await consuming


async def test_requests_of_a_dead_engine_go_on_with_the_tokens_their_clients_have(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("a")
    await until(lambda: engine.works)
    bench.shell.engine_down(engine.key)
    await until(lambda: bench.outbox.of(ResumeQuery))
    second = bench.engine_up(generation=2)
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, attempt=2, token_ids=[1, 2, 3]))
    await until(lambda: second.works)
    assert second.works[0].resumed == (1, 2, 3)
    assert await bench.left() == 1


async def test_a_request_whose_model_left_goes_back_to_the_inactive_queue(bench: Bench) -> None:
    await bench.submit("a")
    await bench.stands(1, keys.INACTIVE_QUEUE)
    assert await bench.left() == 0
    (entry,) = await bench.store.read_new([keys.INACTIVE_QUEUE], "c", 1, 0)
    assert entry.submission.hops == 1


async def test_a_moved_request_asks_its_front_door_before_it_runs(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("a", hops=1)
    await until(lambda: bench.outbox.of(ResumeQuery))
    assert not engine.works
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, attempt=3, token_ids=[5]))
    await until(lambda: engine.works)
    assert (engine.works[0].attempt, engine.works[0].resumed) == (3, (5,))


async def test_a_request_whose_client_is_gone_is_dropped_instead_of_run_again(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("a", hops=1)
    await until(lambda: bench.outbox.of(ResumeQuery))
    bench.shell.desk.fronts.answer(ResumeReply(id="a", known=False))
    await bench.settle()
    assert await bench.left() == 0 and not engine.works


async def test_a_dead_front_door_answers_no_and_its_running_requests_stop(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("running")
    await until(lambda: engine.works)
    await bench.submit("asking", hops=1)
    await until(lambda: bench.outbox.of(ResumeQuery))
    bench.now_s += 2 * DEAD_AFTER_S
    bench.shell.desk.fronts.tick(bench.now_s)
    bench.shell.desk.drop_dead_fronts(bench.now_s)
    await bench.settle()
    assert engine.aborted == ["running"]
    assert await bench.left() == 0


async def test_a_front_door_whose_end_was_seen_is_dead_at_once(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("running")
    await until(lambda: engine.works)
    await bench.submit("asking", hops=1)
    await until(lambda: bench.outbox.of(ResumeQuery))
    bench.shell.desk.fronts.refresh({"ipc:///front": FRONT_DEAD}, bench.now_s)
    bench.shell.desk.fronts.tick(bench.now_s)
    bench.shell.desk.drop_dead_fronts(bench.now_s)
    await bench.settle()
    assert engine.aborted == ["running"]
    assert await bench.left() == 0


async def test_a_living_front_door_is_not_dropped_after_the_store_was_away(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("a")
    await until(lambda: engine.works)
    bench.shell.desk.fronts.refresh({"ipc:///front": bench.now_s}, bench.now_s)
    bench.now_s += 2 * DEAD_AFTER_S  # nobody could announce anything meanwhile
    bench.shell.desk.fronts.refresh({"ipc:///front": bench.now_s - 2 * DEAD_AFTER_S}, bench.now_s)
    bench.shell.desk.drop_dead_fronts(bench.now_s)
    assert not engine.aborted and len(bench.shell.desk.requests)


async def test_cancel_reaches_a_running_a_waiting_and_a_coming_request(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("running")
    await until(lambda: engine.works)
    assert bench.shell.desk.cancel("running")
    assert engine.aborted == ["running"]
    assert not bench.shell.desk.cancel("coming")
    await bench.submit("coming")
    await bench.stands(0)
    assert [w.rid for w in engine.works] == ["running"]


async def test_an_endless_tour_between_devices_ends_with_an_error(bench: Bench) -> None:
    await bench.submit("a", hops=51, died_of="killed by SIGKILL")
    await until(lambda: bench.outbox.of(Failed))
    (failed,) = bench.outbox.of(Failed)
    assert failed.status == 503 and failed.code == "model_unstable"  # type: ignore[attr-defined]
    assert failed.message.endswith("Its engine said: killed by SIGKILL")  # type: ignore[attr-defined]
    await bench.settle()
    assert await bench.left() == 0


async def test_an_unreadable_entry_is_dropped_and_the_next_is_served(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.store.add(QUEUE, "junk", b"\x00junk")
    await bench.submit("a")
    await until(lambda: engine.works)
    await bench.settle()
    assert await bench.left() == 1


async def test_a_model_that_drains_finishes_what_runs_and_gives_back_what_waits(bench: Bench) -> None:
    engine = bench.engine_up()
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    await bench.submit("a")
    await until(lambda: engine.works)
    bench.shell.stop_admitting(engine.key)
    await bench.submit("b")
    await bench.stands(1, keys.INACTIVE_QUEUE)
    assert not bench.emptied and bench.shell.running(engine.key) == 1
    engine.queue.put_nowait(finished("a"))
    await until(lambda: bench.emptied)
    assert set(bench.emptied) == {engine.key} and not bench.shell.running(engine.key)
    assert await bench.left(keys.INACTIVE_QUEUE) == 1
    engine.queue.put_nowait(None)
    await consuming


async def dies(bench: Bench, engine: Engine, *suspects: str) -> None:
    """The engine dies by itself in a step of ``suspects``."""
    consuming = asyncio.create_task(bench.shell.consume(engine.key, engine))
    engine.queue.put_nowait(events.Died(reason="illegal instruction", suspects=suspects))
    await consuming
    bench.shell.engine_down(engine.key)
    await bench.settle()


async def test_a_request_that_was_in_two_engines_that_died_is_refused_as_poison(bench: Bench) -> None:
    engine = bench.engine_up()
    await bench.submit("poison")
    await until(lambda: engine.works)
    await dies(bench, engine, "poison")
    bench.shell.desk.fronts.answer(ResumeReply(id="poison", known=True, attempt=2))
    await bench.stands(1, keys.INACTIVE_QUEUE)
    (entry,) = await bench.store.read_new([keys.INACTIVE_QUEUE], "c", 1, 0)
    assert entry.submission.suspicions == 1, "another device has to know"
    assert entry.submission.died_of == "illegal instruction"
    second = bench.engine_up(generation=2)
    await bench.submit("again", hops=2, suspicions=1)
    await until(lambda: len(bench.outbox.of(ResumeQuery)) == 2)
    bench.shell.desk.fronts.answer(ResumeReply(id="again", known=True, attempt=3))
    await until(lambda: second.works)
    await dies(bench, second, "again")
    await until(lambda: len(bench.outbox.of(ResumeQuery)) == 3)
    bench.shell.desk.fronts.answer(ResumeReply(id="again", known=True, attempt=4))
    await until(lambda: bench.outbox.of(Failed))
    (failed,) = bench.outbox.of(Failed)
    assert (failed.status, failed.code, failed.retry_after_s) == (500, "poison_request", None)  # type: ignore[attr-defined]
    assert "illegal instruction" in failed.message  # type: ignore[attr-defined]
    await bench.settle()
    assert await bench.left() == 0


async def test_neighbours_of_a_poison_request_run_after_it_one_at_a_time(bench: Bench) -> None:
    engine = bench.engine_up(generation=2)
    for id in ("poison", "b", "c"):
        await bench.submit(id, hops=2, suspicions=1)
    await bench.submit("fresh")
    await until(lambda: len(bench.outbox.of(ResumeQuery)) == 3)
    for id in ("poison", "b", "c"):
        bench.shell.desk.fronts.answer(ResumeReply(id=id, known=True, attempt=2))
    await until(lambda: len(engine.works) == 2)
    await bench.settle()
    assert {w.rid for w in engine.works} == {"poison", "fresh"}, "one suspect, and who is under no suspicion"
    await dies(bench, engine, "poison", "fresh")
    third = bench.engine_up(generation=3)
    consuming = asyncio.create_task(bench.shell.consume(third.key, third))
    for id in ("poison", "fresh"):
        bench.shell.desk.fronts.answer(ResumeReply(id=id, known=True, attempt=3))
    for done in ("b", "c", "fresh"):
        await until(lambda last=done: third.works and third.works[-1].rid == last)
        third.queue.put_nowait(finished(done, attempt=third.works[-1].attempt))
        await until(lambda last=done: any(f.id == last for f in bench.outbox.of(Finish)))  # type: ignore[attr-defined]
        bench.shell.desk.fronts.answer(ResumeReply(id=done, known=True, complete=True))
    await bench.stands(0)
    assert [f.id for f in bench.outbox.of(Failed)] == ["poison"]  # type: ignore[attr-defined]
    third.queue.put_nowait(None)
    await consuming


async def test_a_killed_engine_is_nobodys_fault(bench: Bench) -> None:
    await bench.submit("a", hops=1)
    for attempt in range(1, 6):
        engine = bench.engine_up(generation=attempt)
        await until(lambda n=attempt: len(bench.outbox.of(ResumeQuery)) >= n)
        bench.shell.desk.fronts.answer(ResumeReply(id="a", known=True, attempt=attempt))
        await until(lambda e=engine: e.works)
        await dies(bench, engine)
    assert not bench.outbox.of(Failed)


async def test_two_generations_stand_side_by_side_and_the_old_one_finishes_what_it_has(bench: Bench) -> None:
    old = bench.engine_up(generation=1)
    consuming = asyncio.create_task(bench.shell.consume(old.key, old))
    await bench.submit("a")
    await until(lambda: old.works)
    new = bench.engine_up(generation=2)
    await bench.submit("b")
    await until(lambda: new.works)
    assert [w.rid for w in old.works] == ["a"] and [w.rid for w in new.works] == ["b"]
    assert (bench.shell.counts(old.key).running, bench.shell.counts(new.key).running) == (1, 1)
    bench.shell.stop_admitting(old.key)
    await bench.submit("c")
    await until(lambda: len(new.works) == 2)
    assert not bench.emptied
    old.queue.put_nowait(finished("a"))
    await until(lambda: old.key in bench.emptied)
    old.queue.put_nowait(None)
    await consuming
    bench.shell.engine_down(old.key)
    await bench.settle()
    assert not bench.outbox.of(ResumeQuery), "nobody's request was lost with the old one"
    assert bench.shell.counts(new.key).running == 2


async def test_what_waits_is_handed_back_when_other_instances_have_come_up(bench: Bench) -> None:
    """Eight run, four wait; half of these are routed anew, those that run stay."""
    engine = bench.engine_up()
    for number in range(12):
        await bench.submit(f"r{number}")
    await until(lambda: len(engine.works) == 8)
    await until(lambda: bench.shell.scheduler.queued == 4)
    bench.shell.feed(WaitingShared(engine.key, 0.5))
    await bench.stands(2, keys.INACTIVE_QUEUE)
    assert bench.shell.scheduler.queued == 2
    assert len(engine.works) == 8
