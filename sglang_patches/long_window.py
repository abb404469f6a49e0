"""What of a long request is on the device: the tails of all layers, and slots through which units pass.

::

    | tail of layer 0: K, V | tail of layer 1 | ... | slot 0: K, V | slot 1 |      each of piece_tokens tokens

The memory is charged as *staging*, for as long as the request runs. Threads bring units into slots in the order in
which attention will read them, while the device computes with the ones before, several at once where they come from
several places; another takes full tails out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
import torch

from prism import memory
from prism.policy.long_prompts import WindowPlan
from sglang_patches.long_rows import TokenRows
from sglang_patches.seat import UnitStore

Unit = tuple[int, int]
_GOING: Final = 2


class LongWindow:
    """Raises :class:`prism.memory.errors.OutOfMemory` when the device has no room for it now."""

    def __init__(self, owner: memory.Owner, plan: WindowPlan, layers: int, pool: Any) -> None:
        """``pool``: SGLang's KV pool, which says what a token's K and V are."""
        self._plan, self._layers = plan, layers
        page = owner.page_bytes
        self._region = owner.window_region(-(-plan.nbytes // page) * page)
        try:
            self._region.commit()
        except BaseException:
            self._region.close()
            raise
        self._bytes = torch.from_dlpack(self._region.memory())
        self.rows = TokenRows.of(pool)

    def tail(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``piece_tokens`` tokens, those that are not the tail's yet without meaning."""
        return self._parts(self._unit(layer))

    def slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the unit that was brought there."""
        return self._parts(self._unit(self._layers + slot))

    def fill(self, slot: int, packed: Any) -> None:
        """Bring a unit; it is there when this returns."""
        self._fill(self._layers + slot, packed)

    def fill_tail(self, layer: int, packed: Any) -> None:
        """Bring a tail that was put away; it is there when this returns."""
        self._fill(layer, packed)

    def _fill(self, number: int, packed: Any) -> None:
        self._unit(number).copy_(torch.from_numpy(packed))
        self.settle()

    def settle(self) -> None:
        """What this thread has begun with the window's memory is done."""
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def _unit(self, number: int) -> torch.Tensor:
        return self._bytes[number * self._plan.unit_bytes : (number + 1) * self._plan.unit_bytes]

    def _parts(self, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.parts(unit, self._plan.piece_tokens)

    @property
    def slots(self) -> int:
        return self._plan.slots

    @property
    def held_bytes(self) -> int:
        return self._region.committed_bytes

    def close(self) -> None:
        """Give the memory back. Nothing here may be used any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._region.close()


class Bringing:
    """The units of one step on their way in, as many ahead of the attention that reads them as there are slots.
    ``threads``: as many as may be on their way at once."""

    def __init__(
        self, store: UnitStore, window: LongWindow, order: Iterator[Unit], threads: ThreadPoolExecutor
    ) -> None:
        self._store, self._window, self._order, self._threads = store, window, order, threads
        self._coming: deque[tuple[Unit, int, Future[None]]] = deque()
        for slot in range(window.slots):
            self._send_for(slot)

    def _send_for(self, slot: int) -> None:
        """The next unit of the order, into ``slot``."""
        if (unit := next(self._order, None)) is not None:
            self._coming.append((unit, slot, self._threads.submit(self._bring, unit, slot)))

    def _bring(self, unit: Unit, slot: int) -> None:
        with self._store.read(unit) as packed:
            self._window.fill(slot, packed)

    def next(self, unit: Unit) -> int:
        """The slot of ``unit``, the next of the order. Raises what went wrong with it."""
        found, slot, there = self._coming.popleft()
        assert found == unit, f"attention asks for {unit}, {found} was brought"
        there.result()
        return slot

    def read(self, slot: int) -> None:
        """The unit in ``slot`` is not needed any more."""
        self._window.settle()
        self._send_for(slot)

    def stop(self) -> None:
        """Nothing is on its way any more."""
        for _, _, coming in self._coming:
            if not coming.cancel():
                wait([coming])
        self._coming.clear()


class Storing:
    """Units on their way out: few at once, each of which is memory beside the window."""

    def __init__(self, store: UnitStore, thread: ThreadPoolExecutor) -> None:
        self._store, self._thread = store, thread
        self._going: deque[Future[None]] = deque()

    def put(self, unit: Unit, data: torch.Tensor) -> None:
        """``data``: the unit's bytes. Raises what went wrong with an earlier unit."""
        while len(self._going) >= _GOING:
            self._going.popleft().result()
        packed = data.cpu().numpy()
        self._going.append(self._thread.submit(self._store.put, unit, np.ascontiguousarray(packed)))

    def drop(self, units: Sequence[Unit]) -> None:
        """Behind what was put before; they are read no more."""
        self._going.append(self._thread.submit(self._store.drop, units))

    def finish(self) -> None:
        """All units are stored. Raises what went wrong with one."""
        try:
            while self._going:
                self._going.popleft().result()
        finally:
            self.forget()

    def forget(self) -> None:
        """What is still to be stored is not wanted any more; nothing is on its way when this returns."""
        for going in self._going:
            if not going.cancel():
                wait([going])
        self._going.clear()
