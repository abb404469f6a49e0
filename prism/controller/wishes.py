"""What operators asked for and what holds until they take it back: pins, drained devices, numbers of instances.

It stands in the store, since the controller that heard it may die: the next one goes by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from prism.core.events import CatalogChanged, OperatorDrain, OperatorLoad, OperatorUnload, PinChanged
from prism.core.ids import DeviceId, ModelName
from prism.store.interface import State
from prism.store.values import StoreUnavailable

log = logging.getLogger(__name__)

DOCUMENT: Final = "operators-wishes"
RETRY_S: Final = 0.2

Wish = PinChanged | OperatorDrain | OperatorLoad | OperatorUnload


class _Held(msgspec.Struct):
    """As it is written."""

    pinned: dict[ModelName, bool] = {}
    """Where an operator said otherwise than the catalog, or the same."""
    drained: dict[DeviceId, bool] = {}
    """Drained devices, and whether running requests move from them with their tokens."""
    instances: dict[ModelName, int] = {}
    """So many of a model at least, where several were asked for."""


class OperatorWishes:
    """:meth:`read` once, then :meth:`hold` each wish when it is carried out."""

    def __init__(self, store: State) -> None:
        self._store, self._held = store, _Held()

    async def read(self) -> None:
        """What earlier controllers were told; waits while the store is away. What cannot be read is logged and left
        out."""
        while True:
            try:
                text = await self._store.doc(DOCUMENT)
                break
            except StoreUnavailable as error:
                log.warning("cannot read what operators asked for: %s", error)
                await asyncio.sleep(RETRY_S)
        try:
            self._held = msgspec.json.decode(text, type=_Held) if text else _Held()
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            log.error("what operators asked for is unreadable and forgotten: %s", error)

    async def hold(self, wish: Wish) -> None:
        """Remembers it, or forgets what it takes back. Raises :class:`StoreUnavailable`: it is remembered here only."""
        held = self._held
        match wish:
            case PinChanged(model, pinned):
                held.pinned[model] = pinned
            case OperatorDrain(devices, on, carry):
                for device in devices:
                    held.drained.pop(device, None)
                held.drained.update({device: carry for device in devices if on})
            case OperatorLoad(model, _, instances):
                held.instances[model] = instances
            case OperatorUnload(model, devices):
                if not devices:
                    held.instances.pop(model, None)
                    held.pinned[model] = False
        await self._write()

    async def forget(self, models: Iterable[ModelName]) -> None:
        """The catalog has a new word on these models' pins. Raises :class:`StoreUnavailable`."""
        for model in models:
            self._held.pinned.pop(model, None)
        await self._write()

    async def _write(self) -> None:
        await self._store.put_doc(DOCUMENT, msgspec.json.encode(self._held).decode())

    def drains(self, devices: Iterable[DeviceId] | None = None) -> list[OperatorDrain]:
        """Of all devices, or of those among ``devices``."""
        among = self._held.drained.keys() if devices is None else set(devices)
        chosen = {d: carry for d, carry in self._held.drained.items() if d in among}
        kinds = [(tuple(d for d, c in chosen.items() if c is carry), carry) for carry in (False, True)]
        return [OperatorDrain(names, True, carry) for names, carry in kinds if names]

    def pins(self, by_catalog: Iterable[ModelName]) -> dict[ModelName, bool]:
        """What is pinned: ``by_catalog``, but for what operators said otherwise (False: of one among those)."""
        pinned = dict.fromkeys(by_catalog, True)
        return pinned | {name: on for name, on in self._held.pinned.items() if on or name in pinned}

    def applied(self, event: CatalogChanged) -> CatalogChanged:
        """``event`` with what operators said of its models' pins: one that was unloaded does not come by itself."""
        pinned = self._held.pinned
        return replace(event, upserted=tuple(replace(s, pinned=pinned.get(s.name, s.pinned)) for s in event.upserted))

    def loads(self) -> list[OperatorLoad]:
        """Models of which several instances were asked for."""
        return [OperatorLoad(model, (), instances) for model, instances in self._held.instances.items()]
