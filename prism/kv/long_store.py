"""KV of prompts that are larger than their device, outside of it: in memory that other devices lend, and in the
machine's pool of host memory, by units (:mod:`prism.policy.long_prompts`), dealt over several of these places where
their rates are known (:mod:`prism.policy.long_places`).

One process's own, summed, and gone with it. What a lender wants back goes to another one or to host memory between two
steps; what finds no room there is lost, and the prompt is computed again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import xxhash

from prism.core.errors import PrismError
from prism.kv.claims import ClaimedBytes
from prism.kv.host_pool import HostPool
from prism.kv.lent_shelf import Key, Lender, LentShelf
from prism.kv.pacing import LinkPace
from prism.kv.piece_file import BadPiece, MemoryBytes
from prism.memory.rows import Packed
from prism.policy.long_places import AHEAD, deal_round, place_of
from prism.policy.long_prompts import LongShape, TierRoom, TierVerdict, WindowPlan, first_host_bytes, judge_tiers

Unit = tuple[int, int]
"""Layer and piece."""
_GROWS: Final = 8
"""Units by which a claim on host memory is followed by another."""


class TiersFull(PrismError):
    """Neither lenders nor host memory have room for a unit."""


class LongTiers:
    """Where one engine's long prompts may have KV."""

    def __init__(
        self, pool: HostPool, lent: LentShelf | None, host_bytes_per_s: float, owner: str = "", ranks: int = 1
    ) -> None:
        """``owner``: the model, for who looks at the pool's books. ``ranks``: of the engine, which share the pool."""
        self._pool, self._lent = pool, lent
        self._host_bytes_per_s, self.host_pace = host_bytes_per_s, LinkPace(host_bytes_per_s)
        self.owner, self._ranks = owner, ranks
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self.brought_bytes = 0
        """To the device, so far."""

    @property
    def ahead(self) -> int:
        """Units that should be on their way at once."""
        return AHEAD if len(self._round(() if self._lent is None else self._lent.lenders)) > 1 else 1

    def _round(self, lenders: Sequence[Lender]) -> list[Lender | None]:
        """Where units go, one after the other; None: to host memory."""
        places: list[Lender | None] = [*lenders, None]
        rates = [*(lender.bytes_per_s for lender in lenders), self._host_bytes_per_s]
        return [places[number] for number in deal_round(rates)]

    def brought(self, nbytes: int) -> None:
        """One more unit is on the device. Safe in several threads."""
        with self._guard:
            self.brought_bytes += nbytes

    def rooms(self) -> tuple[TierRoom, ...]:
        """As they are now."""
        host = TierRoom("host memory", self._pool.claimable_bytes(), self._pool.bound_bytes // self._ranks)
        if self._lent is None:
            return (host,)
        free, held = self._lent.offered_bytes, self._lent.held_bytes
        return TierRoom("lent memory", free, free + held), host

    @property
    def lent_bytes(self) -> int:
        """What lenders have of this engine's long prompts, in whole pages."""
        return 0 if self._lent is None else self._lent.held_bytes

    def begin(self, shape: LongShape, plan: WindowPlan, tokens: int) -> LongStore | TierVerdict:
        """Room for a request of ``tokens``; or that there is not enough, with the numbers."""
        verdict = judge_tiers(shape, plan, tokens, self.rooms())
        if not verdict.fits:
            return verdict
        lenders = () if self._lent is None else self._lent.lenders
        places = self._round([lender for lender in lenders if lender.device.offered_bytes() > 0])
        store = LongStore(f"long-{next(self._numbers)}", plan.unit_bytes, self, self._pool, self._lent, places)
        lent = 0 if self._lent is None else self._lent.offered_bytes
        if not store.claim(first_host_bytes(verdict.needed_bytes, lent)):
            return verdict  # somebody was quicker
        return store

    def close(self) -> None:
        """The model leaves."""
        if self._lent is not None:
            self._lent.empty(lambda key, memory: None)


class LongStore:
    """One request's units. :meth:`put` and :meth:`drop` may be called by one thread and :meth:`read` by others, for
    different units, and :meth:`answer` while none is."""

    def __init__(
        self,
        name: str,
        unit_bytes: int,
        tiers: LongTiers,
        pool: HostPool,
        lent: LentShelf | None,
        places: Sequence[Lender | None],
    ) -> None:
        """``places``: where units go while there is room, one after the other; None: to host memory."""
        self._name, self._unit_bytes, self._tiers, self._pool, self._lent = name, unit_bytes, tiers, pool, lent
        self._dealt = places
        self._claims: list[ClaimedBytes] = []
        self._used_bytes = 0
        """Of the last claim."""
        self._places: dict[Unit, tuple[ClaimedBytes, int]] = {}
        """Units in host memory."""
        self._free: list[tuple[ClaimedBytes, int]] = []
        """Where units were that were dropped."""
        self._sums: dict[Unit, int] = {}

    def claim(self, nbytes: int) -> bool:
        """Take so much host memory ahead of use. False: there is not so much."""
        if nbytes <= 0:
            return True
        if (claim := self._pool.claim(nbytes, self._tiers.owner)) is None:
            return False
        self._claims.append(claim)
        self._used_bytes = 0
        return True

    def put(self, unit: Unit, data: Packed) -> None:
        """Store a unit, in place of what was stored of it (a tail that was put away and has grown). Raises
        :class:`TiersFull`."""
        known = unit in self._sums
        self._sums[unit] = xxhash.xxh3_64_intdigest(data.data)
        if unit in self._places:
            self._write_in_host(*self._places[unit], data)
            return
        if known and self._lent is not None:
            self._lent.drop(self._key(unit))

        def write(place: MemoryBytes, pace: LinkPace) -> None:
            began_s = pace.begin()
            place.write(data, 0)
            pace.copied(len(data), began_s)

        first = place_of(*unit, self._dealt)
        if first is None and self._put_in_host(unit, data):
            return
        if self._lent is not None and self._lent.put(self._key(unit), len(data), write, first):
            return
        if first is None or not self._put_in_host(unit, data):
            raise TiersFull(f"no room for a unit of {self._unit_bytes} bytes: {self._tiers.rooms()}")

    def drop(self, units: Iterable[Unit]) -> None:
        """Of these nothing is needed any more; some may not be stored."""
        for unit in units:
            if self._sums.pop(unit, None) is None:
                continue
            if (place := self._places.pop(unit, None)) is not None:
                self._free.append(place)
            elif self._lent is not None:
                self._lent.drop(self._key(unit))

    def _put_in_host(self, unit: Unit, data: Packed) -> bool:
        place = self._free.pop() if self._free else self._new_place()
        if place is None:
            return False
        try:
            self._write_in_host(*place, data)
        except OSError:
            return False
        self._places[unit] = place
        return True

    def _new_place(self) -> tuple[ClaimedBytes, int] | None:
        last = self._claims[-1] if self._claims else None
        if last is None or self._used_bytes + self._unit_bytes > last.nbytes:
            if not (self.claim(_GROWS * self._unit_bytes) or self.claim(self._unit_bytes)):
                return None
            last = self._claims[-1]
        place = last, self._used_bytes
        self._used_bytes += self._unit_bytes
        return place

    def _write_in_host(self, claim: ClaimedBytes, offset: int, data: Packed) -> None:
        pace = self._tiers.host_pace
        began_s = pace.begin()
        claim.write(data, offset)
        pace.copied(len(data), began_s)

    @contextmanager
    def read(self, unit: Unit) -> Iterator[Packed]:
        """The unit where it lies, verified; when it is left the link has carried it. Raises :class:`BadPiece` for one
        that is gone or not what was stored."""
        if unit in self._places:
            claim, offset = self._places[unit]
            began_s = self._tiers.host_pace.begin()
            yield self._verified(unit, claim.memory[offset : offset + self._unit_bytes])
            self._tiers.host_pace.copied(self._unit_bytes, began_s)
        elif self._lent is not None:
            with self._lent.opened(self._key(unit)) as lent:
                if lent is None:
                    raise BadPiece(f"the unit {unit} was lent, and is gone")
                place, pace = lent
                began_s = pace.begin()
                yield self._verified(unit, place.memory)
                pace.copied(self._unit_bytes, began_s)
        else:
            raise BadPiece(f"the unit {unit} was not stored")
        self._tiers.brought(self._unit_bytes)

    def _verified(self, unit: Unit, memory: Packed) -> Packed:
        if xxhash.xxh3_64_intdigest(memory.data) != self._sums[unit]:
            raise BadPiece(f"the unit {unit} is not what was stored")
        return memory

    def answer(self) -> None:
        """Between two steps: what lenders want back goes to another one or to host memory, where there is room."""
        if self._lent is not None:
            self._lent.answer(self._to_host)

    def _to_host(self, key: Key, memory: Packed) -> None:
        layer, piece = key[1].split("-")
        if key[0] == self._name:
            self._put_in_host((int(layer), int(piece)), memory)

    def _key(self, unit: Unit) -> Key:
        return self._name, f"{unit[0]}-{unit[1]}"

    @property
    def host_bytes(self) -> int:
        """Claimed."""
        return sum(claim.nbytes for claim in self._claims)

    @property
    def lent_bytes(self) -> int:
        """Of units that are lent."""
        return (len(self._sums) - len(self._places)) * self._unit_bytes if self._lent is not None else 0

    def close(self) -> None:
        """Everything is given back."""
        if self._lent is not None:
            for unit in self._sums.keys() - self._places.keys():
                self._lent.drop(self._key(unit))
        for claim in self._claims:
            claim.close()
        self._claims.clear()
        self._places.clear()
        self._free.clear()
        self._sums.clear()
