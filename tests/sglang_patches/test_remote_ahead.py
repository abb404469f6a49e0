"""What waits for a peer is run at the leader meanwhile, and the peer is left with the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.remote_ahead import RunAhead
from sglang_patches.remote_batches import BatchPart
from sglang_patches.remote_stops import Stop

LAYERS, SLOTS = 6, 10
STOP = Stop(SimpleNamespace(), 2, 6)  # type: ignore[arg-type]


def part(prefix: int = 0, decodes: bool = False) -> BatchPart:
    extends = [] if decodes else [2]
    return BatchPart([0], [prefix + 2], [4, 5], [prefix, prefix + 1], [7, 8], [] if decodes else [prefix], extends)


class Link:
    """With so many bytes that the kernel has not taken."""

    def __init__(self, unsent_bytes: int = 0, closed: bool = False) -> None:
        self.unsent_bytes, self.closed, self.sent = unsent_bytes, closed, list[Any]()

    def send(self, message: Any, tensors: Any = ()) -> None:
        self.sent.append(message)


class Asking:
    """A peer that has not begun."""

    def __init__(self) -> None:
        self.open, self.sent = True, list[tuple[int, list[Any]]]()
        self.questions = SimpleNamespace(waits=lambda question: self.open)

    def run_rest(self, question: Any, first: int, tensors: list[Any]) -> None:
        self.sent.append((first, tensors))


def leader(asking: Asking, held: set[int]) -> RunAhead:
    buffers = [torch.zeros(SLOTS, 1, 2) + layer for layer in range(LAYERS)]
    cache = SimpleNamespace(head_num=1, head_dim=2, v_head_dim=2, store_dtype=torch.float32, k_buffer=buffers)
    cache.v_buffer = [10 + one for one in buffers]
    allocator = SimpleNamespace(get_kvcache=lambda: cache)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    return RunAhead(scheduler, asking, lambda: frozenset(held))  # type: ignore[arg-type]


def run_here(stop: Stop, part: BatchPart, state: Any) -> Any:
    assert stop.end == stop.first + 1
    return state[0] + 1, state[1] + 1


def test_it_goes_as_far_as_weights_are_there_and_leaves_one_piece() -> None:
    asking, held = Asking(), {0, 1, 2}
    ahead, question = leader(asking, held), (Link(), 1)

    def go_on() -> bool:
        return ahead.go_on(STOP, part(), (torch.zeros(2), torch.zeros(2)), question, run_here)  # type: ignore[arg-type]

    assert [go_on(), go_on()] == [True, False], "piece 3 is not here"
    held |= {3, 4, 5}
    assert [go_on(), go_on(), go_on()] == [True, True, False], "the last piece is the peer's"
    assert [first for first, _ in asking.sent] == [3, 4, 5] and ahead.pieces == 3
    state, _, k, v = asking.sent[-1][1]
    assert state.tolist() == [3.0, 3.0]
    assert k[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0] and v[:, 1, 0, 1].tolist() == [11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("which", "unsent", "waits"),
    [(part(decodes=True), 0, True), (part(prefix=3), 0, True), (part(), 1, True), (part(), 0, False)],
    ids=["decodes", "has KV at the peer", "is being sent", "is answered"],
)
def test_what_is_not_run_ahead(which: BatchPart, unsent: int, waits: bool) -> None:
    asking = Asking()
    asking.open = waits
    ahead, question = leader(asking, set(range(LAYERS))), (Link(unsent), 1)
    assert not ahead.go_on(STOP, which, None, question, run_here)  # type: ignore[arg-type]
    assert not asking.sent


def test_what_was_answered_meanwhile_is_not_said() -> None:
    asking = Asking()

    def answered(stop: Stop, part: BatchPart, state: Any) -> Any:
        asking.open = False
        return state

    ahead, question = leader(asking, set(range(LAYERS))), (Link(), 1)
    assert ahead.go_on(STOP, part(), (torch.zeros(2), torch.zeros(2)), question, answered)  # type: ignore[arg-type]
    assert not asking.sent
