"""What a leader asks its peers: who they are, to run pieces of the model on a batch, and for KV that they keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from prism.remote.link import PeerLink, Received
from prism.remote.messages import (
    VERSION,
    FetchKv,
    HiddenStates,
    KvRows,
    Measured,
    MeasureLink,
    PeerHello,
    PeerWelcome,
    RunPieces,
    RunRest,
)
from sglang_patches.remote_batches import BatchPart
from sglang_patches.remote_peer import MEASURED_BYTES
from sglang_patches.remote_pieces import State
from sglang_patches.remote_questions import NAP_S, PeerLost, Pump, Question, Questions
from sglang_patches.remote_ranks import Ranks, RanksOutcome
from sglang_patches.remote_rows import RowShape
from sglang_patches.remote_stops import TOLD_BYTES, KvRate, RoutePeer, Stop
from sglang_patches.remote_tensors import pack_tensors, unpack_tensors

_GATHERED: Final = 2.0
"""KV takes so much longer than bytes that lie in a row: it is gathered there and scattered here (until some came)."""

_SLOW_S: Final = 0.01
"""A link over which the small measurement takes longer is not given the large one, too: own requests stand still
meanwhile, and where weights come over the same link, these."""
_LEAST_S: Final = 1e-4
"""Both answers may be found at the same moment."""
_MOST_PIECES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerGreeting:
    """What a peer was sent first."""

    peer: RoutePeer
    hello: Question
    measured: tuple[Question, Question]
    sent_s: float
    ahead: bool = False
    """Before there was a route over it: it may have got more pieces since."""


@dataclass(frozen=True, slots=True)
class WantedKv:
    """KV of some layers, which a peer keeps."""

    peer: RoutePeer
    layers: range


class PeerAsking:
    """Of one engine. Only rank 0 asks; :meth:`state_behind` and :meth:`fetch` are called by all ranks, and all have
    what came."""

    def __init__(self, runner: Any, pump: Pump, ranks: Ranks, tensors_before: Callable[[int], range]) -> None:
        """``tensors_before``: of how many tensors the state before a piece may be made."""
        self._runner, self._ranks, self._tensors_before = runner, ranks, tensors_before
        self._batch = 0
        self.questions = Questions(pump)
        self._ahead: WeakKeyDictionary[PeerLink, PeerGreeting] = WeakKeyDictionary()
        self.answer_s = 60.0
        """A peer that has not answered after it counts as lost."""

    def take(self, link: PeerLink, received: Received) -> None:
        """An answer."""
        self.questions.take(link, received)

    def greet(self, peer: RoutePeer, engine: str, model: str, slots: int) -> PeerGreeting:
        """Introduce this engine to a peer, and measure the link. A peer looks at messages between two of its steps: all
        that is asked at once, of it and of others, waits for one."""
        ahead = self._ahead.pop(peer.link, None)
        if ahead is not None and all(map(self.questions.answered, (ahead.hello, *ahead.measured))):
            return PeerGreeting(peer, ahead.hello, ahead.measured, ahead.sent_s, ahead=True)
        introduced = PeerHello(version=VERSION, engine=engine, model=model, slots=slots)
        hello, sent_s = self.questions.send(peer.link, introduced, 0, ()), time.monotonic()
        return PeerGreeting(peer, hello, self._measure(peer.link, TOLD_BYTES), sent_s)

    def greet_ahead(self, peer: RoutePeer, engine: str, model: str, slots: int) -> None:
        """Before a route is to lead over it: the answer would wait for the step that the peer is in, and what measures
        a new connection takes several round trips, beside weights that come over the same link."""
        self._ahead[peer.link] = self.greet(peer, engine, model, slots)

    def welcomed(self, greeting: PeerGreeting, limit_s: float) -> frozenset[int]:
        """The pieces that the peer had when it was greeted. Raises :class:`PeerLost`."""
        peer = greeting.peer
        answer = self.questions.wait_for(greeting.hello, limit_s).message
        if not isinstance(answer, PeerWelcome) or answer.version != VERSION:
            raise PeerLost(f"a peer answered a greeting with {type(answer).__name__}")
        fixed_s = self.questions.came_s - greeting.sent_s
        took_s, nbytes = self._took_s(greeting.measured, limit_s), TOLD_BYTES
        if took_s <= _SLOW_S:
            took_s, nbytes = self._took_s(self._measure(peer.link, MEASURED_BYTES), limit_s), MEASURED_BYTES
        peer.name, peer.rate = answer.engine, KvRate(fixed_s, nbytes / max(took_s, _LEAST_S) / _GATHERED)
        return frozenset(piece for piece in answer.pieces if 0 <= piece < _MOST_PIECES)

    def _measure(self, link: PeerLink, nbytes: int) -> tuple[Question, Question]:
        """Have so many bytes sent behind none."""
        asked = []
        for size in (0, nbytes):
            self._batch += 1
            asked.append(self.questions.send(link, MeasureLink(batch=self._batch, nbytes=size), self._batch, ()))
        return asked[0], asked[1]

    def _took_s(self, measured: tuple[Question, Question], limit_s: float) -> float:
        """From the answer without bytes to the one with them: who was busy before makes no difference."""
        came_s = []
        for question in measured:
            if not isinstance(self.questions.wait_for(question, limit_s).message, Measured):
                raise PeerLost("a peer answered a measurement with something else")
            came_s.append(self.questions.came_s)
        return came_s[1] - came_s[0]

    def fetch(self, wanted: Sequence[WantedKv], slots: list[int]) -> list[Sequence[Any]]:
        """The parts that peers keep for this rank, of each of ``wanted``: ``[layers, slots, heads, dim]``
        (:mod:`sglang_patches.remote_rows`). All are asked at once: each answers between two of its steps. Raises
        :class:`PeerLost`; whose link has ended then is known to all ranks between two steps."""
        shape = self._row_shape
        found = self._ranks.together(lambda: self._asked_kv(wanted, slots)).tensors
        mine = [self._ranks.own(tensor, 2) for tensor in found] if shape.dealt else found
        count = len(shape.parts)
        return [mine[at : at + count] for at in range(0, len(mine), count)]

    @property
    def _row_shape(self) -> RowShape:
        return RowShape.of(self._runner.token_to_kv_pool)

    def _asked_kv(self, wanted: Sequence[WantedKv], slots: list[int]) -> RanksOutcome:
        """Of all heads."""
        start_s, asked = time.monotonic(), list[Question]()
        for one in wanted:
            self._batch += 1
            about = FetchKv(batch=self._batch, first_layer=one.layers.start, end_layer=one.layers.stop, slots=slots)
            asked.append(self.questions.send(one.peer.link, about, self._batch, ()))
        tensors: list[Any] = []
        for one, question in zip(wanted, asked, strict=True):
            received = self.questions.wait_for(question, self.answer_s)
            nbytes = sum(head.nbytes for head, _ in received.tensors)
            one.peer.rate = one.peer.rate.seen(nbytes, self.questions.came_s - start_s)
            tensors += self._kv(one, len(slots), received)
        return RanksOutcome(tensors=tensors)

    def _kv(self, wanted: WantedKv, slots: int, received: Received) -> list[Any]:
        tensors = self._tensors(received)
        row = self._row_shape
        due = [(row.dtype, shape) for shape in row.shapes(len(wanted.layers), slots, self._ranks.world)]
        if not isinstance(received.message, KvRows) or [(t.dtype, tuple(t.shape)) for t in tensors] != due:
            wanted.peer.link.close("it sent something else than the KV it was asked for")
            raise PeerLost("a peer sent something else than the KV it was asked for")
        return tensors

    def _tensors(self, received: Received) -> list[Any]:
        try:
            return unpack_tensors(received.tensors, self._runner.device)
        except ValueError as error:
            raise PeerLost(str(error)) from error

    def state_behind(self, stop: Stop, part: BatchPart, state: State | None) -> State:
        """The state behind ``stop``, on every rank."""

        def ask() -> RanksOutcome:
            question = self.send_part(stop, part, state)
            found = self.state(stop, part, self.questions.wait_for(question, self.answer_s))
            return RanksOutcome(tensors=[t for t in found if t is not None])

        return as_state(self._ranks.together(ask).tensors)

    def send_part(self, stop: Stop, part: BatchPart, state: State | None) -> Question:
        """Have the pieces of ``stop``, at a peer, run on ``part``."""
        assert stop.peer is not None
        self._batch += 1
        sent = pack_tensors(t for t in state or () if t is not None)
        return self.questions.send(stop.peer.link, self._work(stop, part), self._batch, sent)

    def run_rest(self, question: Question, first: int, tensors: Sequence[Any]) -> None:
        """What was asked has run here up to ``first``: state, K and V (:class:`prism.remote.messages.RunRest`)."""
        link, batch = question
        link.send(RunRest(batch=batch, first=first), pack_tensors(tensors))

    def nap(self, waits: bool, since_s: float, most_s: float = NAP_S) -> None:
        """See :meth:`Questions.nap`."""
        self.questions.nap(waits, since_s + self.answer_s, most_s)

    def state(self, stop: Stop, part: BatchPart, received: Received) -> State:
        """What an answer says. Raises :class:`PeerLost` when it is something else."""
        tensors = self._tensors(received)
        wanted = self._tensors_before(stop.end)
        parts = len(tensors)
        shape = (len(part.token_ids), int(self._runner.model_config.hidden_size))
        if (
            not isinstance(received.message, HiddenStates)
            or parts not in wanted
            or [tuple(t.shape) for t in tensors] != parts * [shape]
        ):
            raise PeerLost("a peer answered with something else than hidden states")
        return as_state(tensors)

    def _work(self, stop: Stop, part: BatchPart) -> RunPieces:
        assert stop.peer is not None
        table_rows, table_positions, table_slots = self._changes(stop.peer, part.rows, part.seq_lens)
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
            mrope=part.mrope,
        )

    def _changes(
        self, peer: RoutePeer, of_rows: Sequence[int], to: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Rows, positions and slots of what the peer does not know yet of these rows of the request table, up to the
        length of each. SGLang changes entries of old tokens too, when it finds that the prefix tree had them."""
        table = self._runner.req_to_token_pool.req_to_token
        rows, lengths = (torch.tensor(values, dtype=torch.int64, device=table.device) for values in (of_rows, to))
        known = peer.known = torch.zeros_like(table) if peer.known is None else peer.known
        most = int(lengths.max())
        now = table[rows, :most]
        inside = torch.arange(most, device=table.device) < lengths[:, None]
        index, positions = ((now != known[rows, :most]) & inside).nonzero().unbind(1)
        changed, slots = rows[index], now[index, positions]
        known[changed, positions] = slots
        return changed.tolist(), positions.tolist(), slots.tolist()


def as_state(tensors: Sequence[Any]) -> State:
    return tensors[0], tensors[1] if len(tensors) > 1 else None
