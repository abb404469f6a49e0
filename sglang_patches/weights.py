"""Weights live in the device's account: parameters are created in a region of it, and a stored image can fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_mla import expect_absorbed, keep_absorbed, show_absorbed
from sglang_patches.kv_pool import current_seat, restore_kv_scales
from sglang_patches.seat import TensorMemory
from sglang_patches.spec_draft import give_up_shared

SMALLEST_BYTES = 1024
"""Smaller tensors are not worth a place of their own in the region at creation; they are adopted after loading."""

_CREATORS = (torch.empty, torch.zeros, torch.ones)


class AllocateInRegion(TorchFunctionMode):  # type: ignore[misc]
    """While a model is constructed, tensors it creates get their memory from ``region``, in creation order."""

    def __init__(self, region: TensorMemory, device: torch.device) -> None:
        super().__init__()
        self._region, self._device = region, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CREATORS:
            return func(*args, **kwargs)
        meta = func(*args, **{**kwargs, "device": "meta"})
        wanted = kwargs.get("device")
        nbytes = math.prod(meta.shape) * meta.dtype.itemsize
        if nbytes < SMALLEST_BYTES or (wanted is not None and torch.device(wanted).type != self._device.type):
            return func(*args, **kwargs)
        flat = self._region.allocate(nbytes)
        tensor = flat.view(meta.dtype).view(meta.shape)
        if func is not torch.empty:
            tensor.fill_(0 if func is torch.zeros else 1)
        return tensor


def construct(original: Callable[..., Any], model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
    """Around ``loader._initialize_model``: the model's tensors are created in the weight region."""
    seat = current_seat()
    seat.loading = seat.weights
    if model_config.is_draft_model and seat.weights.draft is not None:
        seat.loading = seat.weights.draft
    device = torch.get_default_device()
    with AllocateInRegion(seat.loading, device):
        return original(model_config, load_config, quant_config)


def load(original: Callable[..., Any], model: Any, weights: Any, target_device: Any) -> None:
    """Around ``DefaultModelLoader.load_weights_and_postprocess``: from the stored image when there is one, else from
    the pack of the model's files if they were packed."""
    seat = current_seat()
    place = seat.loading
    if place.from_image:
        expect_absorbed(model)
    if place.fill(model):
        show_absorbed(model)
        restore_kv_scales(model)
        return
    place.loading(model)
    original(model, place.tensors() or weights, target_device)
    keep_absorbed(model)
    if place is not seat.weights:
        give_up_shared(model)
    place.loaded(model)
    show_absorbed(model)


def load_bitsandbytes(original: Callable[..., Any], loader: Any, model_config: Any, model: Any) -> None:
    """Around ``BitsAndBytesModelLoader._load_weights``, which reads its files its own way."""
    weights = current_seat().loading
    if weights.fill(model):
        return
    weights.loading(model)
    original(loader, model_config, model)
    weights.loaded(model)


@contextmanager
def process(original: Callable[..., Any], module: Any, target_device: Any) -> Iterator[Any]:
    """Around ``loader.device_loading_context``, in which a module's weights are processed: one module after the other,
    so that only one is in memory twice."""
    with original(module, target_device) as given:
        yield given
    current_seat().loading.processed(module)


_LOADER = "sglang.srt.model_loader.loader"
HOOKS = (
    Hook(
        f"{_LOADER}._initialize_model",
        HookKind.AROUND,
        construct,
        ("model_config", "load_config", "quant_config"),
        "parameters live in the device's account",
    ),
    Hook(
        f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess",
        HookKind.AROUND,
        load,
        ("model", "weights", "target_device"),
        "a stored image or a pack replaces reading safetensors",
    ),
    Hook(
        f"{_LOADER}.BitsAndBytesModelLoader._load_weights",
        HookKind.AROUND,
        load_bitsandbytes,
        ("self", "model_config", "model"),
        "a stored image replaces what bitsandbytes' loader makes",
    ),
    Hook(
        f"{_LOADER}.device_loading_context",
        HookKind.AROUND,
        process,
        ("module", "target_device"),
        "what quantisation makes takes the place of what it read",
    ),
)
