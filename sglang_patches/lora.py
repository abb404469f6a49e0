"""LoRA: the slots for adapters live in the device's account, and SGLang's kernels for hosts run without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_pool import current_seat
from sglang_patches.weights import AllocateInRegion


class WithoutPinning(TorchFunctionMode):  # type: ignore[misc]
    """Memory is pinned for copies to a GPU; torch refuses to pin any where there is none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def init_state(original: Callable[..., Any], manager: Any, **kwargs: Any) -> None:
    """Around ``LoRAManager.init_state``."""
    if manager.device.type != "cpu":
        original(manager, **kwargs)
        return
    with WithoutPinning():
        original(manager, **kwargs)


def init_buffers(original: Callable[..., Any], pool: Any, base_model: Any) -> None:
    """Around ``LoRAMemoryPool.init_buffers``: the slots are part of the weights' memory, beside the base's region."""
    device = next(base_model.parameters()).device
    with AllocateInRegion(current_seat().weights.beside, device):
        original(pool, base_model)


def prepare_on_host(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``TorchNativeLoRABackend.prepare_lora_batch``."""
    with WithoutPinning():
        original(backend, *args, **kwargs)


_LORA = "sglang.srt.lora"
HOOKS = (
    Hook(
        f"{_LORA}.lora_manager.LoRAManager.init_state",
        HookKind.AROUND,
        init_state,
        ("self", "max_lora_rank", "target_modules", "lora_paths"),
        "layers with adapters pin small tensors",
    ),
    Hook(
        f"{_LORA}.mem_pool.LoRAMemoryPool.init_buffers",
        HookKind.AROUND,
        init_buffers,
        ("self", "base_model"),
        "slots for adapters are counted in the account",
    ),
    Hook(
        f"{_LORA}.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
        HookKind.AROUND,
        prepare_on_host,
        ("self", "forward_batch", "weight_indices", "lora_ranks", "scalings", "use_cuda_graph"),
        "every step pins small tensors",
    ),
)
