"""The leader's side: ``model.forward`` follows a route; what this engine lacks runs in peers.

A *route* is a list of stops, each some pieces of the model at one engine; together they are all pieces, in order. The
head is always the leader's, so that hidden states come back and everything about sampling stays where the requests are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from prism.policy.live.micro_batches import micro_batches
from prism.remote.link import PeerLink, Received
from prism.remote.messages import (
    VERSION,
    FetchKv,
    HiddenStates,
    KvRows,
    Leading,
    Measured,
    MeasureLink,
    PeerHello,
    PeerWelcome,
    RunPieces,
)
from sglang_patches.remote_batches import BatchPart, forward_batch, whole_batch
from sglang_patches.remote_peer import MEASURED_BYTES
from sglang_patches.remote_pieces import ModelPieces, State
from sglang_patches.remote_questions import PeerLost, Pump, Question, Questions
from sglang_patches.remote_stages import Stages, run_stages
from sglang_patches.remote_tensors import pack_tensors, unpack_tensors

log = logging.getLogger(__name__)

_TOLD_BYTES: Final = 1 << 17
_GATHERED: Final = 2.0
"""KV takes so much longer than bytes that lie in a row: it is gathered there and scattered here (until some came)."""
_TIMED_TOKENS: Final = 32
"""Shorter prefills tell more about a step than about tokens."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Pieces [first, end) at the engine behind ``link``; None: here."""

    link: PeerLink | None
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class KvRate:
    """How fast something comes over a link, as it was measured at the greeting and whenever KV came."""

    fixed_s: float
    """From a question until the beginning of its answer."""
    bytes_s: float

    def seen(self, nbytes: int, seconds: float) -> KvRate:
        """With an answer of ``nbytes`` that took so long; one that is too small tells nothing."""
        if nbytes < _TOLD_BYTES:
            return self
        return KvRate(self.fixed_s, nbytes / max(seconds - self.fixed_s, seconds / 10, 1e-6))


class RouteLeader:
    """Runs batches along :attr:`route`. ``model.forward`` is replaced by :meth:`forward` while :meth:`attach` holds."""

    def __init__(self, scheduler: Any, pieces: ModelPieces, pump: Pump) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self._vocab = int(scheduler.model_config.vocab_size)
        self._pieces = pieces
        self._own = pieces.model.forward
        self.route: tuple[Stop, ...] = (Stop(None, 0, pieces.count),)
        self.answer_s = 60.0
        """A peer that has not answered after it counts as lost."""
        self.cuts = True
        """Prefills go over the route in parts."""
        self.parts = 0
        """That did so far."""
        self.lost = ""
        """Why the last batch has no result; its outcome must be dropped, and its requests begin again."""
        self._known: WeakKeyDictionary[PeerLink, Any] = WeakKeyDictionary()
        """The request table as each peer has it."""
        self.names: WeakKeyDictionary[PeerLink, str] = WeakKeyDictionary()
        """Of peers that were greeted."""
        self.rates: WeakKeyDictionary[PeerLink, KvRate] = WeakKeyDictionary()
        """Of peers that were greeted."""
        self.prefill_tokens_s = 0.0
        """Over the route as it is; 0: not known."""
        self.here: Any = None
        """By slot, whether its KV of the layers that are being taken over was fetched and not written since; None:
        nothing is fetched."""
        self._batch = 0
        self._questions = Questions(pump)

    @property
    def remote(self) -> bool:
        """Whether any piece runs elsewhere."""
        return any(stop.link is not None for stop in self.route)

    @property
    def peers(self) -> list[PeerLink]:
        return list({id(stop.link): stop.link for stop in self.route if stop.link is not None}.values())

    def attach(self) -> None:
        forward = self.forward

        def follow(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.remote or args or forward_batch.forward_mode.is_idle():
                return self._own(input_ids, positions, forward_batch, *args, **kwargs)
            return forward(input_ids, positions, forward_batch)

        self._pieces.model.forward = follow

    def detach(self) -> None:
        self._pieces.model.__dict__.pop("forward", None)

    def take(self, link: PeerLink, received: Received) -> None:
        """An answer."""
        self._questions.take(link, received)

    def greet(self, link: PeerLink, engine: str, model: str, slots: int, limit_s: float) -> frozenset[int]:
        """Introduce this engine to a peer; the pieces it has. Raises :class:`PeerLost`."""
        hello = PeerHello(version=VERSION, engine=engine, model=model, slots=slots)
        answer = self._questions.ask(link, hello, 0, (), limit_s).message
        if not isinstance(answer, PeerWelcome) or answer.version != VERSION:
            raise PeerLost(f"a peer answered a greeting with {type(answer).__name__}")
        self.names[link] = answer.engine
        self.rates[link] = self._measured(link, limit_s)
        return frozenset(answer.pieces)

    def _measured(self, link: PeerLink, limit_s: float) -> KvRate:
        seconds = []
        for nbytes in (0, MEASURED_BYTES):
            self._batch += 1
            start_s = time.monotonic()
            message = MeasureLink(batch=self._batch, nbytes=nbytes)
            if not isinstance(self._questions.ask(link, message, self._batch, (), limit_s).message, Measured):
                raise PeerLost("a peer answered a measurement with something else")
            seconds.append(time.monotonic() - start_s)
        bare = KvRate(seconds[0], 1.0).seen(MEASURED_BYTES, seconds[1])
        return KvRate(bare.fixed_s, bare.bytes_s / _GATHERED)

    def tell_peers(self, links: Iterable[PeerLink]) -> None:
        """Which of them the route leads over."""
        peers = self.peers
        for link in links:
            link.send(Leading(now=any(link is peer for peer in peers)))

    def fetch(self, link: PeerLink, first_layer: int, end_layer: int, slots: list[int]) -> tuple[Any, Any]:
        """K and V that a peer keeps for this engine: ``[layers, slots, heads, dim]``. Raises :class:`PeerLost`."""
        self._batch += 1
        wanted = FetchKv(batch=self._batch, first_layer=first_layer, end_layer=end_layer, slots=slots)
        start_s = time.monotonic()
        received = self._questions.ask(link, wanted, self._batch, (), self.answer_s)
        nbytes = sum(head.nbytes for head, _ in received.tensors)
        self.rates[link] = self.rates[link].seen(nbytes, time.monotonic() - start_s)
        tensors = unpack_tensors(received, self._runner.device)
        layers = end_layer - first_layer
        if not isinstance(received.message, KvRows) or [tuple(t.shape[:2]) for t in tensors] != 2 * [
            (layers, len(slots))
        ]:
            raise PeerLost("a peer sent something else than the KV it was asked for")
        return tensors[0], tensors[1]

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
        start_s = time.monotonic()
        whole = whole_batch(ids, positions, batch)
        counts = micro_batches(whole.extend_lens, 1 + len(self.peers)) if self.cuts and not whole.decodes else []
        if len(counts) > 1:
            self.parts += len(counts)
            state = self._in_parts(list(whole.cut(counts)), ids, positions, batch)
        else:
            state = self._at_once(whole, ids, positions, batch)
        if not whole.decodes and len(ids) >= _TIMED_TOKENS:
            self.prefill_tokens_s = len(ids) / max(time.monotonic() - start_s, 1e-6)
        return state

    def _at_once(self, whole: BatchPart, ids: Any, positions: Any, batch: Any) -> Any:
        state: Any = None
        for stop in self.route:
            if stop.link is None:
                state = self._pieces.run(stop.first, stop.end, state, ids, positions, batch)
            else:
                state = self._await(stop, whole, self._send_part(stop, whole, state))
        return state

    def _in_parts(self, parts: Sequence[BatchPart], ids: Any, positions: Any, batch: Any) -> Any:
        """Engines compute different parts at the same time; the head, which is SGLang's matter, runs on all at once."""
        head = self._pieces.count - 1
        *stops, last = self.route
        if last.first < head:
            stops.append(Stop(None, last.first, head))
        backend = self._runner.attn_backend

        def run_here(stop: Stop, part: BatchPart, state: State | None) -> State:
            one = forward_batch(part, self._runner.device, batch.spec_algorithm)
            backend.init_forward_metadata(one)
            found: State = self._pieces.run(stop.first, stop.end, state, one.input_ids, one.positions, one)
            return found

        try:
            stages = Stages(lambda stop: stop.link is None, run_here, self._send_part, self._received, self._nap)
            states = run_stages(parts, stops, stages)
        finally:
            self._questions.forget()
            backend.init_forward_metadata(batch)
        together = [None if one[0] is None else torch.cat(one) for one in zip(*states, strict=True)]
        return self._pieces.run(head, head + 1, (together[0], together[1]), ids, positions, batch)

    def _send_part(self, stop: Stop, part: BatchPart, state: State | None) -> Question:
        assert stop.link is not None
        self._batch += 1
        sent = pack_tensors(t for t in state or () if t is not None)
        return self._questions.send(stop.link, self._work(stop, part), self._batch, sent)

    def _await(self, stop: Stop, part: BatchPart, question: Question) -> State:
        return self._state(stop, part, self._questions.wait_for(question, self.answer_s))

    def _received(self, stop: Stop, part: BatchPart, question: Question) -> State | None:
        """The answer, if it is there."""
        answer = self._questions.answer(question)
        return None if answer is None else self._state(stop, part, answer)

    def _nap(self, waits: bool, since_s: float) -> None:
        self._questions.nap(waits, since_s + self.answer_s)

    def _state(self, stop: Stop, part: BatchPart, received: Received) -> State:
        try:
            tensors = unpack_tensors(received, self._runner.device)
        except ValueError as error:
            raise PeerLost(str(error)) from error
        wanted = 1 if stop.end == 1 else 2
        shape = (len(part.token_ids), int(self._runner.model_config.hidden_size))
        if not isinstance(received.message, HiddenStates) or [tuple(t.shape) for t in tensors] != wanted * [shape]:
            raise PeerLost("a peer answered with something else than hidden states")
        return (tensors[0], tensors[1] if wanted == 2 else None)

    def _work(self, stop: Stop, part: BatchPart) -> RunPieces:
        assert stop.link is not None
        table_rows, table_positions, table_slots = self._changes(stop.link, part.rows, part.seq_lens)
        return RunPieces(
            batch=self._batch,
            first=stop.first,
            end=stop.end,
            decode=part.decodes,
            rows=part.rows,
            seq_lens=part.seq_lens,
            out_slots=part.out_slots,
            positions=part.positions,
            token_ids=part.token_ids,
            table_rows=table_rows,
            table_positions=table_positions,
            table_slots=table_slots,
            prefix_lens=part.prefix_lens,
            extend_lens=part.extend_lens,
        )

    def _changes(
        self, link: PeerLink, of_rows: Sequence[int], to: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Rows, positions and slots of what the peer does not know yet of these rows of the request table, up to the
        length of each. SGLang changes entries of old tokens too, when it finds that the prefix tree had them."""
        table = self._runner.req_to_token_pool.req_to_token
        rows, lengths = (torch.tensor(values, dtype=torch.int64, device=table.device) for values in (of_rows, to))
        known = self._known.setdefault(link, torch.zeros_like(table))
        most = int(lengths.max())
        now = table[rows, :most]
        inside = torch.arange(most, device=table.device) < lengths[:, None]
        index, positions = ((now != known[rows, :most]) & inside).nonzero().unbind(1)
        changed, slots = rows[index], now[index, positions]
        known[changed, positions] = slots
        return changed.tolist(), positions.tolist(), slots.tolist()

    def _nothing(self, batch: Any) -> Any:
        """An output of the right form."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        logits = torch.zeros(batch.batch_size, self._vocab, device=self._runner.device)
        return LogitsProcessorOutput(next_token_logits=logits)
