"""Who is taken out of a batch and who waits, by turns; without an engine."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engine import boot, cuda_stub
from prism.policy.fair import ROUND_STEPS

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and torch warn of many things when they are imported


def request(rid: str, prompt: int, generated: int = 0, answer: int = 400) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        output_ids=[1] * generated,
        prefix_indices=[],
        input_embeds=None,
        multimodal_inputs=None,
        sampling_params=SimpleNamespace(max_new_tokens=answer),
        finished=lambda: False,
    )


class Running:
    """What runs, as far as a round touches it."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs, self.batch_is_full = reqs, True

    def is_empty(self) -> bool:
        return not self.reqs

    def release_req(self, index: int, left: int, server_args: object) -> None:
        assert left < len(self.reqs)

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]


class Rounds:
    """Rounds over an engine with slots for ``tokens``, whose copies take ``trip_s``."""

    def __init__(self, tokens: int, trip_s: float, running: list[Any], waiting: list[Any]) -> None:
        boot.prepare_environment("host")
        cuda_stub.load()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sglang_patches.fair import FairRounds
        pool = SimpleNamespace(block_slots=4096)
        lease = SimpleNamespace(
            used_tokens=lambda: tokens,
            available_tokens=lambda: 0,
            parts=[SimpleNamespace(group=SimpleNamespace(pool=pool, slot_tokens=1))],
        )
        self.scheduler: Any = SimpleNamespace(
            waiting_queue=list(waiting),
            chunked_req=None,
            server_args=None,
            token_to_kv_pool_allocator=SimpleNamespace(lease=lease),
            chunked_prefill_size=512,
            max_running_requests=64,
            prism_room=SimpleNamespace(width=SimpleNamespace(rows=64)),
        )
        self.scheduler._add_request_to_queue = lambda req, is_retracted: self.scheduler.waiting_queue.append(req)
        self.batch = Running(list(running))
        store: Any = SimpleNamespace(trip_s=lambda count: trip_s)
        moves: Any = SimpleNamespace(coming={}, agree=lambda count: count)
        self.rounds = FairRounds(self.scheduler, store, moves)
        self.rounds._step_s = 0.01

    def turn(self) -> tuple[list[str], list[str], set[str]]:
        """Who runs, who waits in which order, and who of them is left out."""
        outside = self.rounds.turn(self.batch)
        return [r.rid for r in self.batch.reqs], [r.rid for r in self.scheduler.waiting_queue], set(outside)


def test_who_has_most_makes_room_and_comes_back_in_its_turn() -> None:
    most, less, new = request("most", 100, 60), request("less", 100, 20), request("new", 100)
    rounds = Rounds(320, 0.0, [most, less], [])
    assert rounds.turn() == (["most", "less"], [], set())
    rounds.scheduler.waiting_queue.append(new)
    most.output_ids += [1] * 40  # what both were given since they began together counts
    less.output_ids += [1] * 5
    assert rounds.turn() == (["less"], ["new", "most"], {"most"})
    rounds.scheduler.waiting_queue.remove(new)
    new.output_ids += [1]
    rounds.batch.reqs.append(new)
    for _ in range(ROUND_STEPS - 1):
        assert rounds.turn() == (["less", "new"], ["most"], {"most"})
    late = request("late", 100)
    rounds.scheduler.waiting_queue.append(late)
    less.output_ids += [1] * 60
    running, waiting, outside = rounds.turn()
    assert running == ["new"] and waiting[0] == "late" and outside == {"most", "less"}


def test_where_paging_costs_more_than_it_gains_the_order_of_arrival_stays() -> None:
    rounds = Rounds(320, 100.0, [request("a", 100, 60), request("b", 100, 20)], [request("new", 100)])
    assert rounds.turn() == (["a", "b"], ["new"], set())
    assert not rounds.rounds.pays
    with rounds.rounds._reserving():
        from sglang.srt.managers import schedule_policy

        assert schedule_policy.CLIP_MAX_NEW_TOKENS == 4096, "SGLang reserves whole answers then"


def test_an_answer_longer_than_usual_does_not_keep_newcomers_out() -> None:
    rounds = Rounds(320, 0.01, [request("long", 40, 130, answer=1000), request("b", 100, 20)], [request("new", 100)])
    rounds.rounds._usual.note(50)
    running, waiting, _ = rounds.turn()
    assert rounds.rounds.pays and running == ["b"] and waiting == ["new", "long"], "whose KV is largest makes room"


def test_memory_that_became_too_small_does_not_end_turns() -> None:
    rounds = Rounds(320, 100.0, [request("a", 100, 60), request("b", 100, 20)], [])
    assert rounds.turn() == (["a", "b"], [], set())
    rounds.scheduler.token_to_kv_pool_allocator.lease.used_tokens = lambda: 200
    rounds.rounds._steps = ROUND_STEPS
    running, waiting, outside = rounds.turn()
    assert len(running) == len(waiting) == 1 and outside == set(waiting) and rounds.rounds.pays
