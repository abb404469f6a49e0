"""What waits for a peer is run here meanwhile, layer by layer, as far as the weights are here.

A batch's split between a leader and its peer is that of the moment at which it is begun; the peer may have much to do,
and while the batch waits there further layers come to the leader. BlitzScale's queue (5.2) has the old instance take
the oldest batch from wherever it stands by then. Here the leader runs such layers and says so: the peer, if it has not
begun, is left with less (:class:`prism.remote.messages.RunRest`)::

    leader   | a: 0 1 | b: 0 1 | a: 2 | a: 3 | b: 2 | ...
    peer     | its own step                         | a: from 4 on | b: from 3 on

The route stays as it is: K and V of what was run here go to the peer, too, which has all KV of its pieces as ever, and
if it had begun, its answer is the same. So only prompts from their beginning are run ahead: what was before them has
its KV at the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.remote_asking import PeerAsking
from sglang_patches.remote_batches import BatchPart
from sglang_patches.remote_pieces import State
from sglang_patches.remote_questions import Question
from sglang_patches.remote_rows import RowShape, read_rows
from sglang_patches.remote_stops import Stop
from sglang_patches.remote_tensors import can_travel


class RunAhead:
    """Of one engine. ``held``: the pieces that it has by now; none, while it has something better to do."""

    def __init__(self, scheduler: Any, asking: PeerAsking, held: Callable[[], frozenset[int]]) -> None:
        self._cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._travels = can_travel(RowShape.of(self._cache).dtype)
        self._asking, self._held = asking, held
        self._states: dict[Question, tuple[int, State]] = {}
        """Of what waits at peers: up to which piece it ran here, and its state there."""
        self.pieces = 0
        """That were run so, so far."""

    def go_on(
        self,
        stop: Stop,
        part: BatchPart,
        state: State | None,
        question: Question,
        run_here: Callable[[Stop, BatchPart, State | None], State],
    ) -> bool:
        """Run one further piece of ``part``, which waits at ``stop`` since it came there with ``state``. False: it
        cannot be."""
        link, waits = question[0], self._asking.questions.waits
        self._states = {asked: found for asked, found in self._states.items() if waits(asked)}
        if part.decodes or any(part.prefix_lens) or not waits(question) or not self._travels:
            return False
        piece, state = self._states.get(question, (stop.first, state))
        if not 1 <= piece < stop.end - 1 or link.unsent_bytes or piece not in self._held():
            return False  # layers change their states in place: these are on their way still
        state = run_here(Stop(None, piece, piece + 1), part, state)
        self._states[question] = piece + 1, state
        self.pieces += 1
        if waits(question):
            kept = self._kv(range(stop.first - 1, piece), part)
            self._asking.run_rest(question, piece + 1, [*(t for t in state if t is not None), *kept])
        return True

    def _kv(self, layers: range, part: BatchPart) -> list[torch.Tensor]:
        """Rows of the part's tokens in ``layers``, as a peer takes them."""
        return read_rows(self._cache, layers, torch.tensor(part.out_slots))
