"""Layers of this engine run for the requests of others, on KV of their own: what every rank of it does alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from prism import memory
from prism.core.errors import PrismError
from prism.memory.errors import OutOfMemory
from prism.remote.messages import FetchKv, RunPieces
from prism.remote.notes import DoForeign
from sglang_patches.remote_batches import BatchPart, forward_batch
from sglang_patches.remote_check import BadMessage, check_kv, check_state, check_work
from sglang_patches.remote_memory import ForeignKv
from sglang_patches.remote_passes import Passenger, in_one_pass, out_of_pass
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_ranks import Ranks
from sglang_patches.remote_rows import RowShape, has_plain_rows
from sglang_patches.remote_tensors import Unpacked, unpack_tensors

log = logging.getLogger(__name__)

_MOST_WORDS: Final = 500
_LOOK_S: Final = 0.02
"""Layers that take less are run in one go."""
Called = Callable[[], bool]
"""Whether this engine is wanted between two layers of others' work."""


class NotDone(PrismError):
    """What a leader asked was not done, by no rank."""


@dataclass(slots=True, eq=False)
class Member:
    """Of a pass: a batch of this engine's own, or a leader's (:class:`Begun`), wherever it stands."""

    on: Passenger

    @property
    def over(self) -> bool:
        return self.on.piece == self.on.end


@dataclass(slots=True, eq=False)
class Begun(Member):
    """Work of a leader that was begun."""

    leader: int
    kv: ForeignKv
    work: RunPieces


class ForeignRun:
    """Of one engine. Leaders are known by numbers."""

    def __init__(
        self, scheduler: Any, pieces: ModelPieces, new_owner: Callable[[], memory.Owner], ranks: Ranks
    ) -> None:
        self._scheduler, self._runner = scheduler, scheduler.tp_worker.model_runner
        self._config = scheduler.model_config
        self._none = scheduler.spec_algorithm
        self._pieces, self._new_owner, self._ranks = pieces, new_owner, ranks
        self.held = frozenset(range(pieces.count))
        """Pieces whose weights are here."""
        self._rows = RowShape.of(self._runner.token_to_kv_pool)
        self.shares = ranks.world == 1 and has_plain_rows(self._runner.token_to_kv_pool)
        """Several engines' work runs in one pass. Ranks would have to agree on what has come of each of them; latent
        attention asks the batch what it is, and computes prompts and decoding in different ways; with windows it was
        not tried."""
        self._kv: dict[int, ForeignKv] = {}

    @property
    def full_tokens(self) -> int:
        """Of prompts in one pass: as many as this engine takes in one step of its own."""
        scheduler = self._scheduler
        return int(scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)

    def begin(self, note: DoForeign, work: RunPieces, tensors: Unpacked) -> Begun:
        """``work``, with memory behind it: on all ranks or on none. Raises :class:`NotDone`, on all of them alike."""
        begun: Begun = self._agreed(note.leader, lambda: self._prepared(note, work, tensors))
        return begun

    def advance(self, begun: Sequence[Member], called: Called | None = None) -> bool:
        """Those of ``begun`` that are furthest behind run in one pass, until one of them is through or they meet the
        next ones; False: until this engine was ``called`` between two layers. Raises :class:`NotDone`: they are lost,
        and stand where they stood."""
        behind = furthest_behind(begun)
        ends = [one.on.end for one in behind] + [one.on.piece for one in begun if one not in behind]
        try:
            return self._pass([one.on for one in behind], min(ends), called)
        except Exception as error:
            if self._ranks.world > 1:
                raise  # ranks out of step would wait for each other for ever
            log.exception("a pass of %d batches was not done", len(behind))
            if len(behind) > 1:
                self.shares = False
                log.warning("work of several engines does not run in one pass any more")
            raise NotDone(f"{type(error).__name__}: {error}"[:_MOST_WORDS]) from error

    def stands(self, begun: Begun) -> bool:
        """Whether what is kept for it is still here."""
        return self._kv.get(begun.leader) is begun.kv

    def fetch(self, note: DoForeign, wanted: FetchKv) -> Sequence[Any]:
        """Rows of KV with all ranks' heads, on rank 0. Raises :class:`NotDone`."""
        found: Sequence[Any] = self._agreed(note.leader, lambda: self._read(note.leader, wanted))
        return [self._ranks.collected(one, 2) for one in found] if self._rows.dealt else found

    def wanted_back(self, number: int) -> bool:
        """Whether this rank's device needs what is kept for a leader."""
        return number in self._kv and self._kv[number].wanted_back

    def wanted_back_anywhere(self) -> list[int]:
        """Leaders whose KV any rank's device needs. All ranks ask at the same time."""
        numbers = sorted(self._kv)
        free = self._ranks.least([int(not self.wanted_back(number)) for number in numbers])
        return [number for number, is_free in zip(numbers, free, strict=True) if not is_free]

    def drop(self, number: int) -> None:
        """Give back what is kept for a leader."""
        if (kv := self._kv.pop(number, None)) is not None:
            kv.close()

    def drop_all(self) -> None:
        for number in list(self._kv):
            self.drop(number)

    def _agreed(self, leader: int, prepare: Callable[[], Any]) -> Any:
        """What ``prepare`` made, once it has on every rank: a batch that one of them cannot run, none may begin."""
        problem, made = None, None
        try:
            made = prepare()
        except OutOfMemory as error:
            problem = NotDone(f"no memory for its KV: {error}")
        except Exception as error:
            if not isinstance(error, BadMessage):
                log.exception("work for a leader was not done")
            problem = NotDone(f"{type(error).__name__}: {error}"[:_MOST_WORDS])
        if not self._ranks.all(problem is None):
            self.drop(leader)
            raise problem or NotDone("another rank of this engine could not")
        return made

    def _prepared(self, note: DoForeign, work: RunPieces, tensors: Unpacked) -> Begun:
        kv = self._kv_of(note.leader, note.slots)
        table = kv.rows.req_to_token
        bounds = (table.shape[0], table.shape[1], kv.slots, self._config.vocab_size)
        check_work(work, self.held - {self._pieces.count - 1}, *bounds, mrope=self._config.model_is_mrope)
        came = unpack_tensors(tensors, self._runner.device)
        ran = 0 if work.since is None else work.first - work.since
        due = kv.rows_like(ran, len(work.token_ids)) if ran else []
        cut = max(len(came) - len(due), 0)
        state, rows = came[:cut], came[cut:]
        parts = self._pieces.tensors_before(work.first)
        check_state(state, parts, len(work.token_ids), self._config.hidden_size, self._runner.dtype)
        check_kv(rows, due)
        kv.back(work.out_slots)
        if not kv.has(work.table_slots):
            raise BadMessage("its request table names slots that nothing was written to")
        if work.since is not None:
            kv.write(work.since - 1, work.out_slots, rows)
        before = None if not state else (state[0], state[1] if len(state) > 1 else None)
        on = Passenger(kv.backend, self._batch(kv, work), work.first, work.end, before)
        return Begun(on, note.leader, kv, work)

    def _kv_of(self, number: int, slots: int) -> ForeignKv:
        if (kv := self._kv.get(number)) is None:
            layers = [piece - 1 for piece in self.held if 1 <= piece <= self._pieces.layers]
            if not layers:
                raise BadMessage("this engine has no layers")
            kv = ForeignKv(self._runner, self._new_owner(), min(layers), max(layers) + 1, slots)
            self._kv[number] = kv
            kv.back([0])
        return kv

    def _pass(self, passengers: Sequence[Passenger], end: int, called: Called | None) -> bool:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad(), self._behind_steps():
            together = in_one_pass(passengers)
            together.backend.init_forward_metadata(together.batch)
            at_once = end if called is None else 1 + (together.piece == 0)  # the embedding says nothing of a layer
            with forward_context(ForwardContext(attn_backend=together.backend)):
                while together.piece < end:
                    start_s = time.monotonic()
                    self._run_some(together, min(end, together.piece + at_once))
                    out_of_pass(together, passengers)
                    if called is None or together.piece == end:
                        continue
                    if called():
                        return False
                    at_once = max(1, int(at_once * _LOOK_S / max(time.monotonic() - start_s, 1e-6)))
        return True

    def _run_some(self, one: Passenger, end: int) -> None:
        batch = one.batch
        one.state = self._pieces.run(one.piece, end, one.state, batch.input_ids, batch.positions, batch)
        one.piece = end

    @contextmanager
    def _behind_steps(self) -> Iterator[None]:
        """On a GPU with overlap a step of this engine's may be under way on a stream of its own, with buffers that
        kernels share: foreign work goes behind it."""
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            yield
            return
        with torch.get_device_module(self._runner.device).stream(scheduler.forward_stream):
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            yield
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)

    def _batch(self, kv: ForeignKv, work: RunPieces) -> Any:
        """SGLang's ``ForwardBatch`` of the work; the request table gets the slots of its tokens."""
        device = self._runner.device
        entries = torch.tensor(work.table_slots, dtype=torch.int32, device=device)
        kv.rows.req_to_token[work.table_rows, work.table_positions] = entries
        part = BatchPart(
            rows=work.rows,
            seq_lens=work.seq_lens,
            out_slots=work.out_slots,
            positions=work.positions,
            token_ids=work.token_ids,
            prefix_lens=work.prefix_lens,
            extend_lens=work.extend_lens,
            mrope=work.mrope,
        )
        return forward_batch(part, device, self._none)

    def _read(self, number: int, wanted: FetchKv) -> Sequence[Any]:
        kv = self._kv.get(number)
        if kv is None or not kv.first <= wanted.first_layer < wanted.end_layer <= kv.end:
            raise BadMessage(f"there is no KV of layers [{wanted.first_layer}, {wanted.end_layer}) for it here")
        if not wanted.slots or not 0 <= min(wanted.slots) <= max(wanted.slots) < kv.slots or not kv.has(wanted.slots):
            raise BadMessage("it asks for KV of slots that nothing was written to")
        return kv.read(wanted.first_layer, wanted.end_layer, wanted.slots)


AnyMember = TypeVar("AnyMember", bound=Member)


def furthest_behind(begun: Sequence[AnyMember]) -> list[AnyMember]:
    """Those that run next."""
    first = min(one.on.piece for one in begun)
    return [one for one in begun if one.on.piece == first]


def answer_of(begun: Begun) -> list[Any]:
    """The tensors that answer work that is over."""
    assert begun.on.state is not None  # there was a piece to be run
    return [tensor for tensor in begun.on.state if tensor is not None]
