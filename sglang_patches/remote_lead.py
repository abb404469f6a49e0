"""The leader's side: ``model.forward`` follows a route; what this engine lacks runs in peers.

A *route* is a list of stops, each some pieces of the model at one engine; together they are all pieces, in order. The
head is always the leader's, so that hidden states come back and everything about sampling stays where the requests are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from prism.policy.live.micro_batches import micro_batches
from prism.remote.messages import Leading
from prism.remote.notes import Note, PartCame, RunPart
from sglang_patches.remote_asking import PeerAsking, as_state
from sglang_patches.remote_batches import BatchPart, forward_batch, whole_batch
from sglang_patches.remote_deepstack import SeveralLayers
from sglang_patches.remote_pieces import ModelPieces, State
from sglang_patches.remote_questions import PeerLost, Question
from sglang_patches.remote_ranks import Ranks, RanksOutcome
from sglang_patches.remote_stages import Stages, run_stages
from sglang_patches.remote_stops import RoutePeer, Stop
from sglang_patches.remote_tensors import Unpacked, pack_tensors, unpack_tensors

log = logging.getLogger(__name__)

_RunHere = Callable[[Stop, BatchPart, State | None], State]
_TIMED_TOKENS: Final = 32
"""Shorter prefills tell more about a step than about tokens."""


class RouteLeader:
    """Runs batches along :attr:`route`. ``model.forward`` is replaced by :meth:`forward` while :meth:`attach` holds."""

    def __init__(self, scheduler: Any, pieces: ModelPieces, asking: PeerAsking, ranks: Ranks) -> None:
        self.asking, self._ranks = asking, ranks
        self._runner = scheduler.tp_worker.model_runner
        self._vocab = int(scheduler.model_config.vocab_size)
        self._pieces = pieces
        self._own = pieces.model.forward
        self._deep = SeveralLayers(pieces.model, pieces.decoder)
        self.route: tuple[Stop, ...] = (Stop(None, 0, pieces.count),)
        self.cuts = True
        """Prefills go over the route in parts."""
        self.parts = 0
        """That did so far."""
        self.lost = ""
        """Why the last batch has no result; its outcome must be dropped, and its requests begin again."""
        self.prefill_tokens_s = 0.0
        """Over the route as it is; 0: not known."""
        self.step_s = 0.0
        """What the last step over the route took."""
        self.ready: Sequence[State] | None = None
        """Of the batch that SGLang runs next, its parts' states behind all stops but the head
        (:mod:`sglang_patches.remote_under_way`)."""
        self.here: Any = None
        """By slot, whether its KV of the layers that are being taken over was fetched and not written since; None:
        nothing is fetched."""
        self.along: Callable[[Any, Any, Any], State | None] = lambda ids, positions, batch: None
        """Runs a step that leads over nobody up to the head, with what others ask of this engine in its passes, if
        anybody does (:mod:`sglang_patches.remote_along`)."""

    @property
    def remote(self) -> bool:
        """Whether any piece runs elsewhere."""
        return any(stop.peer is not None for stop in self.route)

    @property
    def peers(self) -> list[RoutePeer]:
        return list({id(stop.peer): stop.peer for stop in self.route if stop.peer is not None}.values())

    def stops_before_head(self) -> list[Stop]:
        """The route without the head, which is SGLang's matter and runs on all parts at once."""
        head = self._pieces.count - 1
        *stops, last = self.route
        return [*stops, Stop(None, last.first, head)] if last.first < head else stops

    def attach(self) -> None:
        forward = self.forward

        def follow(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.remote or args or forward_batch.forward_mode.is_idle():
                plain = not args and all(value is None for value in kwargs.values())
                if plain and (state := self.along(input_ids, positions, forward_batch)) is not None:
                    return self._head([state], input_ids, positions, forward_batch)
                with self._pieces.computing():
                    return self._own(input_ids, positions, forward_batch, *args, **kwargs)
            return forward(input_ids, positions, forward_batch)

        self._pieces.model.forward = follow

    def detach(self) -> None:
        self._pieces.model.__dict__.pop("forward", None)
        self._deep.close()

    def tell_peers(self, known: Iterable[RoutePeer]) -> None:
        """Which of them the route leads over."""
        if self._ranks.leads:
            peers = self.peers
            for one in known:
                one.link.send(Leading(now=any(one is peer for peer in peers)))

    def forward(self, ids: Any, positions: Any, batch: Any) -> Any:
        """``model.forward`` along the route. When a peer is lost the result means nothing, and :attr:`lost` says so."""
        if not self.lost:
            try:
                return self._follow(ids, positions, batch)
            except PeerLost as lost:
                self.lost = str(lost)
                log.warning("a batch of %d requests has no result: %s", batch.batch_size, lost)
        return self._nothing(batch)

    def _follow(self, ids: Any, positions: Any, batch: Any) -> Any:
        if self.here is not None:
            self.here[batch.out_cache_loc.cpu()] = False
        if self.ready is not None:
            states, self.ready = self.ready, None
            return self._head(states, ids, positions, batch)
        start_s = time.monotonic()
        shows = not batch.forward_mode.is_decode() and batch.contains_mm_inputs()
        known = ids.clamp(max=self._vocab - 1) if shows else ids  # an image's tokens are hashes of it
        whole = whole_batch(known, positions, batch)
        cuts = self.cuts and not whole.decodes and not shows
        counts = micro_batches(whole.extend_lens, 1 + len(self.peers)) if cuts else []
        if len(counts) > 1:
            self.parts += len(counts)
            state = self._in_parts(list(whole.cut(counts)), ids, positions, batch)
        else:
            state = self._at_once(whole, ids, known, positions, batch)
        self.took(len(ids), time.monotonic() - start_s, whole.decodes)
        return state

    def took(self, tokens: int, seconds: float, decodes: bool) -> None:
        """A batch of so many tokens went over the route."""
        self.step_s = seconds
        if not decodes and tokens >= _TIMED_TOKENS:
            self.prefill_tokens_s = tokens / max(seconds, 1e-6)

    def _at_once(self, whole: BatchPart, ids: Any, known: Any, positions: Any, batch: Any) -> Any:
        """``known``: the ids that an embedding knows, others than ``ids`` where there are images. Those are looked at
        where the embedding runs, which is here, and SGLang forgets them then."""
        state: Any = None
        for stop in self.route if known is ids else self._deep.stops(self.route):
            if stop.peer is None:
                state = self._pieces.run(stop.first, stop.end, state, known if stop.first else ids, positions, batch)
            else:
                state = self.asking.state_behind(stop, whole, state)
            state = self._deep.added(state, stop.end)
        return state

    def _in_parts(self, parts: Sequence[BatchPart], ids: Any, positions: Any, batch: Any) -> Any:
        """Engines compute different parts at the same time."""
        stops = self.stops_before_head()
        backend = self._runner.attn_backend

        def run_here(stop: Stop, part: BatchPart, state: State | None) -> State:
            one = forward_batch(part, self._runner.device, batch.spec_algorithm)
            backend.init_forward_metadata(one)
            found: State = self._pieces.run(stop.first, stop.end, state, one.input_ids, one.positions, one)
            return found

        try:
            states = self._through_stages(parts, stops, run_here)
        finally:
            self.asking.questions.forget()
            backend.init_forward_metadata(batch)
        return self._head(states, ids, positions, batch)

    def _head(self, states: Sequence[State], ids: Any, positions: Any, batch: Any) -> Any:
        head = self._pieces.count - 1
        together = [None if one[0] is None else torch.cat(one) for one in zip(*states, strict=True)]
        return self._pieces.run(head, head + 1, (together[0], together[1]), ids, positions, batch)

    def _through_stages(self, parts: Sequence[BatchPart], stops: Sequence[Stop], run_here: _RunHere) -> list[State]:
        """The state of each part behind the last stop. Which part is computed next depends on what has arrived: rank 0
        sees it, and the other ranks follow."""
        ranks, asking, states = self._ranks, self.asking, dict[int, State]()

        def run(stop: Stop, part: BatchPart, state: State | None) -> State:
            ranks.tell(RunPart(stop=stops.index(stop), part=_index(parts, part)))
            return run_here(stop, part, state)

        def received(stop: Stop, part: BatchPart, question: Question) -> State | None:
            if (answer := asking.questions.answer(question)) is None:
                return None
            state = asking.state(stop, part, answer)
            ranks.tell(PartCame(part=_index(parts, part)), pack_tensors(t for t in state if t is not None))
            return state

        def do() -> RanksOutcome:
            stages = Stages(lambda stop: stop.peer is None, run, asking.send_part, received, asking.nap)
            states.update(enumerate(run_stages(parts, stops, stages)))
            return RanksOutcome()

        def obey(note: Note, tensors: Unpacked) -> None:
            if isinstance(note, RunPart):
                states[note.part] = run_here(stops[note.stop], parts[note.part], states.get(note.part))
            elif isinstance(note, PartCame):
                states[note.part] = as_state(unpack_tensors(tensors, self._runner.device))

        ranks.together(do, obey)
        return [states[i] for i in range(len(parts))]

    def _nothing(self, batch: Any) -> Any:
        """An output of the right form."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        logits = torch.zeros(batch.batch_size, self._vocab, device=self._runner.device)
        return LogitsProcessorOutput(next_token_logits=logits)


def _index(parts: Sequence[BatchPart], part: BatchPart) -> int:
    return next(i for i, one in enumerate(parts) if one is part)
