"""Where one activation's weights live: a region of the device's account, filled by SGLang once, by block copies after.

The first activation of a model on a machine runs SGLang's own loader, over the pack of the model's files if there is
one; the parameters it leaves are packed into the machine's :class:`~prism.weights.store.weight_store.WeightStore` as
they lie in the engine. Later activations construct the same parameters at the pack's places and copy whole blocks: no
file is read, no tensor is looped over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import torch

from prism import memory
from prism.engine.growing_region import ALIGN_BYTES, ROOM_WAIT_S, GrowingRegion
from prism.engine.partial_weights import HeldTensors
from prism.weights.errors import WeightsError
from prism.weights.loading.loader import load
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier

log = logging.getLogger(__name__)

_COLD_PAGE_BYTES: Final = 2 << 20
"""Pages of a region whose size is not known yet: it grows tensor by tensor."""


class ImageMeta(msgspec.Struct, frozen=True):
    """What an engine image remembers beside the tensors: for the n-th allocation during the model's construction, the
    name of the parameter it became, or "" if it became none."""

    created: list[str]


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
    ) -> None:
        """``virtual_bytes`` bounds and ``estimated_bytes`` guesses the size of weights no image exists of."""
        self._store, self._key, self._label = store, key, label
        self.beside = GrowingRegion(owner, virtual_bytes)
        self.packed: ResidentPack | None = store.get(key) if store is not None else None
        self.from_image = self.packed is not None
        self._raw = self._find_raw() if self.packed is None else None
        self.phases: dict[str, float] = {}
        self._created: list[Any] = []
        self._held: HeldTensors | None = None
        self._resting: PackHeader | None = None
        """Of the image that filled the region last."""
        self._used_bytes = 0
        if self.packed is not None:
            header = self.packed.header
            self._names = msgspec.msgpack.decode(header.meta, type=ImageMeta).created
            self._places = {t.name: header.blocks[t.block].offset + t.offset for t in header.tensors}
            self._region = owner.weight_region(header.data_bytes)
            self._region.commit(timeout_s=ROOM_WAIT_S)
            self._used_bytes = self.expected_bytes = header.data_bytes
        else:
            self.expected_bytes = estimated_bytes
            self._region = owner.weight_region(virtual_bytes, page_bytes=_COLD_PAGE_BYTES)
        self._bytes = self._region.tensor(0, (self._region.nbytes,), torch.uint8)

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
    def held_bytes(self) -> int:
        """Physical bytes the weights, and what is beside them, hold now."""
        return int(self._region.committed_bytes) + self.beside.held_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The next tensor of the model under construction, as flat bytes."""
        index = len(self._created)
        if self.packed is not None:
            name = self._names[index] if index < len(self._names) else ""
            if not name:
                tensor = torch.empty(nbytes, dtype=torch.uint8)
            else:
                tensor = self._bytes[self._places[name] : self._places[name] + nbytes]
        else:
            tensor = self._bump(nbytes)
        self._created.append(tensor)
        return tensor

    def _bump(self, nbytes: int) -> torch.Tensor:
        start = -(-self._used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        end = start + nbytes
        self._region.commit(offset_bytes=start, nbytes=nbytes, timeout_s=ROOM_WAIT_S)
        self._used_bytes = end
        return self._bytes[start:end]

    def fill(self, model: torch.nn.Module) -> bool:
        """See :meth:`sglang_patches.seat.WeightSeat.fill`."""
        if self.packed is None:
            return False
        start_s = time.perf_counter()
        load(self.packed, self._region)
        self.phases["copy"] = time.perf_counter() - start_s
        self._adopt(model)
        self._created.clear()
        return True

    def hold(self, model: torch.nn.Module, wanted: Callable[[str], bool]) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.hold`. Raises :class:`WeightsError` when there is no image."""
        if self.packed is None:
            raise WeightsError(f"the weights of {self._label} came from no image: all of them stay")
        if self._held is None:
            self._held = HeldTensors(self._region, self.packed)
        self._held.hold(model, wanted)

    @property
    def whole(self) -> bool:
        """Whether all parameters are in memory."""
        return self._held is None or self._held.whole

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

    def _adopt(self, model: torch.nn.Module) -> None:
        """Point every tensor of ``model`` at its place in the region (most are there from their construction)."""
        assert self.packed is not None
        found = dict(named_tensors(model))
        for entry in self.packed.header.tensors:
            place = self._region.tensor(self._places[entry.name], entry.shape, getattr(torch, entry.dtype))
            for name in (entry.name, *entry.aliases):
                tensor = found.pop(name, None)
                if tensor is None or tensor.dtype != place.dtype:
                    raise WeightsError(
                        f"the image of {self._label} does not fit the model: {name} is missing or differs"
                    )
                if tensor.data_ptr() != place.data_ptr() or tensor.shape != place.shape:
                    tensor.data = place
        if found:
            raise WeightsError(f"the image of {self._label} lacks {', '.join(sorted(found)[:5])}")

    def loaded(self, model: torch.nn.Module) -> None:
        """See :meth:`sglang_patches.seat.WeightSeat.loaded`."""
        self._move_in(model)
        if self._store is not None and is_plain(model):
            start_s = time.perf_counter()
            self._pack(model, self._store)
            self.phases["pack"] = time.perf_counter() - start_s
            if self._raw is not None:  # the image serves from now on: no second copy in memory
                self._store.rm(self._raw.key, (Tier.HOST,))
        self._close_raw()
        self._created.clear()

    def _move_in(self, model: torch.nn.Module) -> None:
        base = self._region.address
        for _, tensor in named_tensors(model):
            inside = base <= tensor.data_ptr() < base + self._used_bytes
            if inside or tensor.numel() == 0:
                continue
            place = self._bump(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            tensor.data = place

    def _pack(self, model: torch.nn.Module, store: WeightStore) -> None:
        names: dict[tuple[int, torch.Size], list[str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors(model):
            same = names.setdefault((tensor.data_ptr(), tensor.shape), [])
            same.append(name)
            if len(same) == 1:
                tensors[name] = tensor
        plans = [
            TensorPlan(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                () if tensor.is_contiguous() else tuple(tensor.stride()),
                aliases=tuple(names[tensor.data_ptr(), tensor.shape][1:]),
            )
            for name, tensor in tensors.items()
        ]
        at = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        meta = ImageMeta(created=[at.get(t.data_ptr(), "") for t in self._created])
        with store.writer(
            self._key, plan_blocks(plans), label=self._label, meta=msgspec.msgpack.encode(meta)
        ) as writer:
            for name, tensor in tensors.items():
                writer.write(name, storage_bytes(tensor))
            writer.finish()

    def rest(self) -> None:
        """Give the memory back and keep the addresses. No tensor of the model may be used until :meth:`wake`. Only for
        weights that came from an image."""
        assert self.packed is not None
        self._resting = self.packed.header
        self._held = None
        self.packed.close()
        self.packed = None
        self._region.decommit()

    def find_again(self) -> bool:
        """Whether the image that filled the addresses is still there, as it was; before :meth:`wake`."""
        self.packed = self._store.get(self._key) if self._store is not None else None
        if self.packed is not None and self.packed.header != self._resting:
            self.packed.close()
            self.packed = None
        return self.packed is not None

    def wake(self) -> None:
        """Memory behind the addresses again, and the weights in it."""
        assert self.packed is not None
        start_s = time.perf_counter()
        self._region.commit(timeout_s=ROOM_WAIT_S)
        load(self.packed, self._region)
        self.phases = {"copy": time.perf_counter() - start_s}

    def release(self) -> None:
        """Give the memory back. No tensor of the model may be used any more."""
        self._created.clear()
        self._held = None
        del self._bytes
        self._region.close()
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
    """All parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def is_plain(model: torch.nn.Module) -> bool:
    """Whether parameters and buffers are all there is. Quantized layers keep more; SGLang loads those each time."""
    return getattr(model, "quant_config", None) is None


def storage_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes from its first to its last element, as a numpy array of ``uint8``."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = torch.as_strided(tensor.detach(), (span,), (1,))
    return flat.cpu().view(torch.uint8).numpy()
