"""Tensors that a loader made outside of the account's memory move into it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch

from prism.engine.growing_region import GrowingRegion
from prism.engine.module_state import ATTRIBUTE, BeforeLoading, holders_in, members

_MOSTLY_OURS = 2
"""A storage so many times larger than what a tensor has of it is another's (a mapped file): only the part moves."""


def move_in(modules: Iterable[torch.nn.Module], region: GrowingRegion, before: BeforeLoading | None) -> int:
    """Moves every parameter and buffer of ``modules`` (not of their children) that lies elsewhere into ``region``, and
    tensors that loading hung on them (``before`` does not know them). Tensors that share memory still do so afterwards;
    objects stay the same, so that whoever refers to one sees it move. Returns the bytes moved."""
    moved: dict[int, torch.Tensor] = {}
    nbytes = 0
    for module in modules:
        for tensor in _outside(module, region, before):
            storage, span = tensor.untyped_storage(), _span_bytes(tensor)
            if storage.nbytes() > _MOSTLY_OURS * span:
                nbytes += span
                _point(tensor, _copied(tensor, region), 0)
                continue
            target = moved.get(storage.data_ptr())
            if target is None:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                target = moved[storage.data_ptr()] = _copied(whole, region)
                nbytes += storage.nbytes()
            _point(tensor, target, tensor.storage_offset())
    return nbytes


def _outside(module: torch.nn.Module, region: GrowingRegion, before: BeforeLoading | None) -> Iterator[torch.Tensor]:
    for _, holder in holders_in("", module):
        for name, kind in [(name, kind) for name, kind, value in members(holder) if isinstance(value, torch.Tensor)]:
            if kind == ATTRIBUTE and sys.getrefcount(vars(holder)[name]) > 2:
                continue  # others know it too (a workspace of all layers, perhaps of all models): it is not this one's
            tensor = getattr(holder, name)
            if kind == ATTRIBUTE and (before is None or before.knows(tensor)):
                continue
            if tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta and region.lacks(tensor):
                yield tensor


def _span_bytes(tensor: torch.Tensor) -> int:
    """From its first element to its last."""
    last: int = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * int(tensor.element_size())


def _copied(tensor: torch.Tensor, region: GrowingRegion) -> torch.Tensor:
    """The bytes from the first element of ``tensor`` to its last, in ``region``."""
    nbytes = _span_bytes(tensor)
    place = region.allocate(nbytes)
    source = tensor.detach().as_strided((nbytes // tensor.element_size(),), (1,))
    place.view(tensor.dtype).copy_(source)
    return place


def _point(tensor: torch.Tensor, place: torch.Tensor, offset: int) -> None:
    """``tensor`` lies at the ``offset``-th of its elements in the bytes of ``place`` from now on."""
    flat = place.view(tensor.dtype)
    tensor.data = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset() + offset)
