"""Steps of an engine's own take along what leaders ask of it: their rows go through its layers in the same passes.

::

    before   own step                | a's prompt, b decodes | own step        | ...
    here     own step, b decodes     | own step, a's prompt  | ...               weights are read once for all of them

A step that runs so goes through the layers as a leader's own part of a route does, piece by piece
(:mod:`sglang_patches.remote_pieces`), in passes that others may join (:mod:`sglang_patches.remote_passes`), and then
through the head by itself. What did not fit into it has a pass of its own behind it, so that nobody waits longer than
without.
"""

from __future__ import annotations

from typing import Any

from sglang_patches.long_prompts import long_of
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_passes import Passenger
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces, State


class OwnSteps:
    """Of one engine. Steps that SGLang runs otherwise (CUDA graphs) take nobody along, and foreign work is done between
    them."""

    def __init__(self, scheduler: Any, pieces: ModelPieces, foreign: ForeignWork, leader: RouteLeader) -> None:
        self._scheduler, self._pieces, self._foreign, self._leader = scheduler, pieces, foreign, leader
        self._runner = scheduler.tp_worker.model_runner
        self._planned = False
        self.take_along = False
        """The last of them did, or would have."""

    @property
    def possible(self) -> bool:
        """Whether this engine's steps may. With overlap what is answered would wait for the stream of the step."""
        scheduler = self._scheduler
        plain = not scheduler.enable_overlap and scheduler.server_args.prism_seat.world == 1
        return plain and long_of(scheduler) is None and not self._leader.remote

    def plan(self, batch: Any) -> None:
        """SGLang runs ``batch`` next; None: nothing. What runs without a plan, as when graphs are captured, is no
        step."""
        self._planned = batch is not None
        if self._planned:
            self.take_along = False

    def run(self, ids: Any, positions: Any, batch: Any) -> State | None:
        """The states of ``batch`` behind all layers. None: it is to be run as ever."""
        planned, self._planned = self._planned, False
        if not (planned and self._foreign.led_over and self.possible and _is_plain(ids, positions, batch)):
            return None
        on = Passenger(self._runner.attn_backend, batch, 0, self._pieces.count - 1, None)
        self.take_along = self._foreign.take_along(on)
        return on.state if self.take_along else None


def _is_plain(ids: Any, positions: Any, batch: Any) -> bool:
    """Whether layers look at nothing of it but what batches in one pass have."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    usual = batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.DECODE) and batch.seq_lens_cpu is not None
    shows = not batch.forward_mode.is_decode() and batch.contains_mm_inputs()
    return usual and not shows and ids is batch.input_ids and positions is batch.positions
