"""Tensors as they travel between engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from prism.remote.messages import TensorHead

_TYPES: Final = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "uint8")}
"""``uint8``: KV in eight bits, as it is kept."""

Packed = tuple[str, list[int], memoryview]
Unpacked = tuple[tuple[TensorHead, memoryview], ...]
"""Tensors as they arrived."""


def can_travel(dtype: torch.dtype) -> bool:
    """Whether there is a word for the type."""
    return dtype in _TYPES.values()


def pack_tensors(tensors: Iterable[Any]) -> list[Packed]:
    """(dtype, shape, bytes) of each; bytes of host tensors are not copied, so they must not change until sent."""
    packed: list[Packed] = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu()
        data = memoryview(flat.view(torch.uint8).numpy()).cast("B") if flat.numel() else memoryview(b"")
        packed.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data))
    return packed


def unpack_tensors(arrived: Unpacked, device: Any) -> list[Any]:
    """The tensors of a message. Raises ``ValueError`` for what is no tensor."""
    found = []
    for head, data in arrived:
        dtype = _TYPES.get(head.dtype)
        elements = 1
        for length in head.shape:
            elements *= length
        if dtype is None or min(head.shape, default=0) < 0 or elements * dtype.itemsize != head.nbytes:
            raise ValueError(f"a tensor of {head.nbytes} bytes is said to be {head.dtype} {head.shape}")
        tensor = torch.frombuffer(data, dtype=dtype) if head.nbytes else torch.empty(0, dtype=dtype)
        found.append(tensor.view(head.shape).to(device))
    return found
