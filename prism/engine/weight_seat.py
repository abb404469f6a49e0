"""Where one activation's weights live: a region of the device's account, filled by SGLang once, by block copies after.

The first activation of a model on a machine runs SGLang's own loader, over the pack of the model's files if there is
one; what it leaves - parameters, and what quantisation made of them - is packed into the machine's
:class:`~prism.weights.store.weight_store.WeightStore` as it lies in the engine. Later activations construct the same
tensors at the pack's places and copy whole blocks: no file is read, nothing is quantised or repacked again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import torch

from prism import memory
from prism.engine.growing_region import ROOM_WAIT_S, GrowingRegion
from prism.engine.module_state import ATTRIBUTE, BeforeLoading, HolderState, Unrecordable, restore, take_away
from prism.engine.moving_in import move_in
from prism.engine.partial_weights import HeldTensors
from prism.weights.errors import WeightsError
from prism.weights.loading.links import LoadLinks
from prism.weights.loading.loader import load
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.store.disk_fill import WHOLE_TURN, Turn
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier

log = logging.getLogger(__name__)

_PROCESSED_ROOM: Final = 2
"""Address space for weights that are loaded, in sizes of the device: what quantisation makes comes behind what it read,
whose pages are given back."""


class ImageMeta(msgspec.Struct, frozen=True):
    """What an engine image remembers beside the tensors."""

    created: list[str | None]
    """For the n-th allocation during the model's construction, the name of the tensor it became; "": one that is not in
    the image; None: loading replaced it."""
    gone: list[str]
    """Modules that loading took away."""
    states: list[HolderState]
    """What loading made of the others."""
    platform: str
    """Where it was loaded; "": loading left everything as any device has it."""


class EngineWeights:
    """The weights of one activation. Exactly one of :meth:`fill` and :meth:`loaded` completes it."""

    def __init__(
        self,
        owner: memory.Owner,
        store: WeightStore | None,
        key: PackKey,
        label: str,
        virtual_bytes: int,
        estimated_bytes: int,
        platform: str = "cpu",
        *,
        first_pieces: Sequence[int] = (),
        links: LoadLinks | None = None,
        turn: Turn = WHOLE_TURN,
    ) -> None:
        """``virtual_bytes`` bounds and ``estimated_bytes`` guesses the size of weights no image exists of.
        ``platform`` names what quantised weights are laid out for. ``first_pieces``: :meth:`fill` waits for these
        only; without an image it is all or nothing (:attr:`began_with`). ``links``: what :meth:`fill` may load over.
        ``turn``: in which order the image comes from disk."""
        self.links = links
        self._store, self._key, self._label, self._platform = store, key, label, platform
        self.beside = GrowingRegion(owner, virtual_bytes)
        self._keeps_image = store is not None
        self.packed: ResidentPack | None = store.get(key, turn) if store is not None else None
        if self.packed is not None and not self._fits(self.packed):
            self.packed.close()
            self.packed = None
        self.from_image = self.packed is not None
        self._raw = self._find_raw() if self.packed is None else None
        self.phases: dict[str, float] = {}
        self._held: HeldTensors | None = None
        self._growing = GrowingRegion(owner, _PROCESSED_ROOM * virtual_bytes)
        self._before: BeforeLoading | None = None
        self._region: memory.WeightRegion | None = None
        self._asked = 0
        self.began_with: tuple[int, ...] = ()
        """Pieces that were there when the engine was; none: all were."""
        self._begin(first_pieces)
        self.draft: EngineWeights | None = None
        """Of a model that guesses for this one; they come and go with these."""
        self._resting: PackHeader | None = None
        """Of the image that filled the region last."""
        self.expected_bytes = estimated_bytes
        if self.packed is not None:
            header = self.packed.header
            entries = [(name, t) for t in header.tensors for name in (t.name, *t.aliases)]
            self._entries = dict(entries)
            self._offsets = {name: header.blocks[t.block].offset + t.offset for name, t in entries}
            self._region = owner.weight_region(header.data_bytes)
            self._region.commit(timeout_s=ROOM_WAIT_S)
            self._bytes = self._region.tensor(0, (self._region.nbytes,), torch.uint8)
            self.expected_bytes = header.data_bytes

    def _begin(self, first_pieces: Sequence[int]) -> None:
        if first_pieces and self.packed is None:
            log.info("%s has no image here yet: all of its weights are loaded before it serves", self._label)
        self.began_with = tuple(first_pieces) if self.packed is not None else ()

    def _fits(self, packed: ResidentPack) -> bool:
        """Whether the image is for such a device. Another one's stays: it may be read here for others' sake."""
        self._meta = msgspec.msgpack.decode(packed.header.meta, type=ImageMeta)
        if self._meta.platform in ("", self._platform):
            return True
        log.warning("%s: its image is for %s, this is %s", self._label, self._meta.platform, self._platform)
        self._keeps_image = False
        return False

    def _find_raw(self) -> ResidentPack | None:
        """The model's files as ``prism pack`` or another machine left them in the store."""
        if self._store is None:
            return None
        try:
            return self._store.get(PackKey(self._key.model))
        except WeightsError as error:  # the files themselves are still there to be loaded
            log.warning("%s: the pack of its files is not used: %s", self._label, error)
            return None

    @property
    def identity(self) -> str:
        """Names the parameters and how they are split and typed; "" when it is not known whose they are."""
        return f"{self._key.model} {self._key.layout}" if self._key.model else ""

    @property
    def helped_bytes(self) -> dict[str, int]:
        """What came over helpers, by their devices."""
        return {} if self.links is None else self.links.helped_bytes

    @property
    def held_bytes(self) -> int:
        """Physical bytes the weights, what is beside them, and those of a guesser hold now."""
        filled = 0 if self._region is None else int(self._region.committed_bytes)
        guesser = 0 if self.draft is None else self.draft.held_bytes
        return filled + self._growing.held_bytes + self.beside.held_bytes + guesser

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The next tensor of the model under construction, as flat bytes."""
        if self.packed is None:
            return self._growing.allocate(nbytes)
        name = self._meta.created[self._asked] if self._asked < len(self._meta.created) else ""
        self._asked += 1
        if name and nbytes <= self._entries[name].nbytes:
            return self._bytes[self._offsets[name] : self._offsets[name] + nbytes]
        if name != "" and nbytes <= self._bytes.numel():
            return self._bytes[:nbytes]  # nothing reads it before it is replaced, and nothing is loaded yet
        return torch.empty(nbytes, dtype=torch.uint8)

    def fill(self, model: torch.nn.Module) -> bool:
        """See :meth:`sglang_patches.seat.WeightSeat.fill`."""
        if self.packed is None or self._region is None:
            return False
        start_s = time.perf_counter()
        if not self.began_with:
            load(self.packed, self._region, links=self.links)
        self.phases["copy"] = time.perf_counter() - start_s
        try:
            take_away(model, self._meta.gone)
            restore(model, self._meta.states, self._place)
        except (AttributeError, KeyError) as error:
            raise WeightsError(f"the image of {self._label} does not fit the model: {error}") from error
        self._check_filled(model)
        if self.began_with:
            self._held = HeldTensors(self._region, self.packed)
            self._held.begin(model, frozenset(self.began_with))
            self.phases["copy"] = time.perf_counter() - start_s
        return True

    def arrived(self, piece: int) -> bool:
        """See :meth:`sglang_patches.seat.WeightSeat.arrived`."""
        return self._held is not None and self._held.arrived(piece)

    @property
    def arrived_bytes(self) -> int:
        """See :meth:`sglang_patches.seat.WeightSeat.arrived_bytes`."""
        return 0 if self.packed is None else self.packed.arrived_bytes

    def hold(self, model: torch.nn.Module, wanted: Callable[[str], bool]) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.hold`. Raises :class:`WeightsError` when there is no image."""
        if self.packed is None or self._region is None:
            raise WeightsError(f"the weights of {self._label} came from no image: all of them stay")
        if self._held is None:
            self._held = HeldTensors(self._region, self.packed)
        self._held.hold(model, wanted)

    def complete(self, model: torch.nn.Module) -> None:
        """The engine is not to begin with some pieces after all: wait for the others."""
        if self.began_with:
            self.began_with = ()
            self.hold(model, lambda name: True)

    def bring(self, model: torch.nn.Module, piece: int) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.bring`."""
        if self._held is not None:
            self._held.bring(model, {piece})

    def tend(self) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.tend`."""
        if self._held is not None:
            self._held.tend()

    @property
    def whole(self) -> bool:
        """Whether all parameters are in memory."""
        return self._held is None or self._held.whole

    def _place(self, name: str) -> torch.Tensor:
        """The image's tensor ``name``, where it lies in the region."""
        entry, dtype = self._entries[name], getattr(torch, self._entries[name].dtype)
        if not entry.strides:
            assert self._region is not None
            return self._region.tensor(self._offsets[name], entry.shape, dtype)
        flat = self._bytes[self._offsets[name] : self._offsets[name] + entry.nbytes].view(dtype)
        return flat.as_strided(entry.shape, entry.strides)

    def _check_filled(self, model: torch.nn.Module) -> None:
        lacking = [name for name, _ in named_tensors(model) if name not in self._entries]
        if lacking:
            raise WeightsError(f"the image of {self._label} lacks {', '.join(sorted(lacking)[:5])}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """See :meth:`sglang_patches.seat.WeightSeat.tensors`."""
        if self._raw is None or not all(hasattr(torch, t.dtype) for t in self._raw.header.tensors):
            return None
        return self._unpack(self._raw)

    def _unpack(self, raw: ResidentPack) -> Iterator[tuple[str, torch.Tensor]]:
        start_s = time.perf_counter()
        memory = raw.private_copy()
        for entry in raw.header.tensors:
            first = raw.wait_tensor(entry)
            dtype = getattr(torch, entry.dtype)
            if entry.nbytes:
                flat = torch.frombuffer(memory[first : first + entry.nbytes], dtype=dtype)
            else:
                flat = torch.empty(0, dtype=dtype)
            for name in (entry.name, *entry.aliases):
                yield name, flat.view(entry.shape)
        self.phases["unpack"] = time.perf_counter() - start_s

    def loading(self, model: torch.nn.Module) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.loading`."""
        if self._keeps_image:
            self._before = BeforeLoading(model)

    def processed(self, module: torch.nn.Module) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.processed`."""
        if move_in([module], self._growing, self._before):
            self._growing.trim()

    def loaded(self, model: torch.nn.Module) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.loaded`."""
        move_in(model.modules(), self._growing, self._before)
        gc.collect()  # modules refer to each other in circles
        self._growing.trim()
        if self._store is not None and self._keeps_image:
            start_s = time.perf_counter()
            self._keep(model, self._store)
            self.phases["pack"] = time.perf_counter() - start_s
        self._before = None
        self._close_raw()

    def _keep(self, model: torch.nn.Module, store: WeightStore) -> None:
        """Writes the image, unless the loader left what none can hold: such a model is loaded by SGLang each time."""
        assert self._before is not None
        try:
            states, tensors = self._before.record(model)
            if len({tensor.device.type for tensor in tensors.values()}) > 1:
                raise Unrecordable("the loader left tensors on more than one kind of device")
        except Unrecordable as why:
            log.warning("no image is kept of %s: %s", self._label, why)
            return
        quantised = getattr(model, "quant_config", None) is not None
        processed = quantised or any(
            state.removed or state.values or state.marks or state.fresh or ATTRIBUTE in state.tensors.values()
            for state in states
        )
        platform = self._platform if processed else ""
        self._pack(ImageMeta([], self._before.gone(model), states, platform), tensors, store)
        if self._raw is not None:  # the image serves from now on: no second copy in memory
            store.rm(self._raw.key, (Tier.HOST,))

    def _pack(self, meta: ImageMeta, tensors: dict[str, torch.Tensor], store: WeightStore) -> None:
        same: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in tensors.items():
            look = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            same.setdefault(look, []).append(name)
        plans = [
            TensorPlan(
                names[0],
                str(tensors[names[0]].dtype).removeprefix("torch."),
                tuple(tensors[names[0]].shape),
                () if tensors[names[0]].is_contiguous() else tuple(tensors[names[0]].stride()),
                aliases=tuple(names[1:]),
            )
            for names in same.values()
        ]
        at = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        created = [None if a is None else at.get(a, "") for a in self._growing.addresses()]
        meta = msgspec.structs.replace(meta, created=created)
        with store.writer(
            self._key, plan_blocks(plans), label=self._label, meta=msgspec.msgpack.encode(meta)
        ) as writer:
            for plan in plans:
                writer.write(plan.name, storage_bytes(tensors[plan.name]))
            writer.finish()

    def rest(self) -> None:
        """Give the memory back and keep the addresses. No tensor of the model may be used until :meth:`wake`. Only for
        weights that came from an image."""
        assert self.packed is not None and self._region is not None
        self._resting = self.packed.header
        self._held = None
        self.packed.close()
        self.packed = None
        self._region.decommit()

    def find_again(self, turn: Turn = WHOLE_TURN) -> bool:
        """Whether the image that filled the addresses is still there, as it was; before :meth:`wake`. ``turn``: in
        which order it comes from disk."""
        self.packed = self._store.get(self._key, turn) if self._store is not None else None
        if self.packed is not None and self.packed.header != self._resting:
            self.packed.close()
            self.packed = None
        return self.packed is not None

    def wake(self, model: torch.nn.Module, first_pieces: Sequence[int] = (), links: LoadLinks | None = None) -> None:
        """Memory behind the addresses again, and the weights in it: all, or these pieces of ``model``'s."""
        self.links = links
        assert self.packed is not None and self._region is not None
        start_s = time.perf_counter()
        self._begin(first_pieces)
        self._region.commit(timeout_s=ROOM_WAIT_S)
        if self.began_with:
            self._held = HeldTensors(self._region, self.packed)
            self._held.begin(model, frozenset(self.began_with))
        else:
            load(self.packed, self._region, links=links)
        self.phases = {"copy": time.perf_counter() - start_s}

    def release(self) -> None:
        """Give the memory back. No tensor of the model may be used any more."""
        self._before = self._held = None
        if self.draft is not None:
            self.draft.release()
        if self._region is not None:
            del self._bytes
            self._region.close()
        self._growing.close()
        self.beside.close()
        if self.packed is not None:
            self.packed.close()
            self.packed = None
        self._close_raw()

    def _close_raw(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers of modules, each module under its first name."""
    for name, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            yield from ((f"{name}.{each}" if name else each, t) for each, t in kind.items() if t is not None)


def storage_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes from its first to its last element, as a numpy array of ``uint8``."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = torch.as_strided(tensor.detach(), (span,), (1,))
    return flat.cpu().view(torch.uint8).numpy()
