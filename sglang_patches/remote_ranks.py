"""The ranks of a tensor-parallel engine are one towards other engines: rank 0 speaks, the others do as it says.

::

    other engine  <--link-->  rank 0  --notes, over the ranks' CPU group-->  rank 1, ...

States between layers are the same on all ranks, so they cross once between two engines and are then passed on inside
each, which is nearer. KV is not: each rank has that of its heads, and rank 0 collects what is asked for. What depends
on links, clocks or a device's memory is decided in one place, or by votes, and ranks wait for each other only: two
engines that lead over each other cannot stop one another, and a rank that dies ends its siblings' waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prism.remote.messages import TensorHead
from prism.remote.notes import DoForeign, LeadersGone, Note, NoteEnvelope, Over, encode_note, note_decoder
from sglang_patches.remote_questions import PeerLost
from sglang_patches.remote_tensors import Packed, Unpacked, pack_tensors, unpack_tensors


class RanksApart(Exception):
    """Rank 0 does not know what the others are doing any more: the engine must end."""


@dataclass(frozen=True, slots=True)
class RanksOutcome:
    """Of what rank 0 did, as all ranks get it."""

    numbers: Sequence[int] = ()
    tensors: Sequence[Any] = ()


Obey = Callable[[Note, Unpacked], None]
"""Do what a note says, whose tensors follow."""


class Ranks:
    """Of one engine. Every rank calls the same methods in the same order; one that is alone waits for nobody."""

    def __init__(self, scheduler: Any) -> None:
        seat = scheduler.server_args.prism_seat
        self.rank, self.world = int(seat.rank), int(seat.world)
        self._group, self._source = scheduler.tp_cpu_group, scheduler.tp_group.ranks[0]
        self._device = scheduler.tp_worker.model_runner.device
        self.foreign: Obey = _nothing_foreign
        """Does what other engines want of this one."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, do: Callable[[], RanksOutcome], obey: Obey | None = None) -> RanksOutcome:
        """Rank 0 does it; the others do what it tells them meanwhile, foreign work and what ``obey`` knows, until it is
        over. Raises :class:`PeerLost` on all ranks when ``do`` does; for anything else :class:`RanksApart`."""
        if self.world == 1:
            return do()
        if not self.leads:
            return self._follow(obey)
        try:
            found = do()
        except PeerLost as lost:
            self.tell(Over(lost=str(lost)))
            raise
        except Exception as error:
            raise RanksApart(f"{type(error).__name__}: {error}") from error
        self.tell(Over(numbers=list(found.numbers)), pack_tensors(found.tensors))
        return found

    def _follow(self, obey: Obey | None) -> RanksOutcome:
        while True:
            envelope, tensors = self._hear()
            note = envelope.note
            if isinstance(note, Over):
                if note.lost is not None:
                    raise PeerLost(note.lost)
                return RanksOutcome(note.numbers, unpack_tensors(tensors, self._device))
            (self.foreign if obey is None or isinstance(note, DoForeign | LeadersGone) else obey)(note, tensors)

    def tell(self, note: Note, tensors: Sequence[Packed] = ()) -> None:
        """To the other ranks, which are in :meth:`together`; rank 0 only."""
        if self.world == 1:
            return
        envelope = encode_note(NoteEnvelope(note, [TensorHead(t, list(s), d.nbytes) for t, s, d in tensors]))
        parts = [memoryview(bytearray(envelope)), *(data for _, _, data in tensors if data.nbytes)]
        blob = torch.cat([torch.frombuffer(part, dtype=torch.uint8) for part in parts])
        head = torch.tensor([len(envelope), blob.numel()], dtype=torch.int64)
        torch.distributed.broadcast(head, self._source, group=self._group)
        torch.distributed.broadcast(blob, self._source, group=self._group)

    def _hear(self) -> tuple[NoteEnvelope, Unpacked]:
        head = torch.empty(2, dtype=torch.int64)
        torch.distributed.broadcast(head, self._source, group=self._group)
        size, total = head.tolist()
        blob = torch.empty(total, dtype=torch.uint8)
        torch.distributed.broadcast(blob, self._source, group=self._group)
        data = memoryview(blob.numpy())
        envelope = note_decoder.decode(data[:size])
        tensors, at = [], size
        for tensor in envelope.tensors:
            tensors.append((tensor, data[at : at + tensor.nbytes]))
            at += tensor.nbytes
        return envelope, tuple(tensors)

    def least(self, mine: Sequence[int]) -> list[int]:
        """Of each number the least that a rank has."""
        if self.world == 1 or not mine:
            return list(mine)
        votes = torch.tensor(list(mine), dtype=torch.int64)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group)
        return [int(vote) for vote in votes.tolist()]

    def all(self, mine: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.least([int(mine)])[0])

    def first(self, numbers: Iterable[int], here: Callable[[int], bool]) -> int | None:
        """The first of these for which ``here`` says so on every rank."""
        if self.world == 1:
            return next((number for number in numbers if here(number)), None)
        asked = list(numbers)
        votes = self.least([int(here(number)) for number in asked])
        return next((number for number, vote in zip(asked, votes, strict=True) if vote), None)

    def same(self, mine: int) -> int:
        """Rank 0's number."""
        if self.world == 1:
            return mine
        number = torch.tensor([mine], dtype=torch.int64)
        torch.distributed.broadcast(number, self._source, group=self._group)
        return int(number[0])

    def collected(self, mine: Any, dim: int) -> Any:
        """On rank 0 the tensors of all ranks, which have one shape, side by side along ``dim``; None elsewhere."""
        if self.world == 1:
            return mine
        flat = mine.contiguous().cpu().view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self.world)] if self.leads else None
        torch.distributed.gather(flat, parts, dst=self._source, group=self._group)
        return None if parts is None else torch.cat([part.view(mine.dtype) for part in parts], dim=dim)

    def own(self, whole: Any, dim: int) -> Any:
        """This rank's part of what :meth:`collected` made."""
        return whole.chunk(self.world, dim=dim)[self.rank]


def _nothing_foreign(note: Note, tensors: Unpacked) -> None:
    raise AssertionError(f"nobody does {type(note).__name__} here")
