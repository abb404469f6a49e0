"""Latent attention (MLA: DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Lite, MiniCPM3): one latent row per token and layer,
and the two matrices by which the engine works on latents, which SGLang derives from a weight after loading.

SGLang keeps those matrices (``w_kc``, ``w_vc``) as plain attributes. Here each is a view of a buffer of its module,
so that it lies in the weight region and in the engine image like every other weight: 2 GB for DeepSeek-V3, which are
otherwise outside the account, and nothing is derived when an image is filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from prism import memory
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_pool import place

_ABSORBED: Final = ("w_kc", "w_vc")


def create_latent_buffers(pool: Any) -> None:
    """Replaces ``MLATokenToKVPool._create_buffers``."""
    layout = memory.KvLayout(
        layers=pool.layer_num,
        kv_heads=1,
        head_dim=pool.kv_cache_dim,
        v_head_dim=0,
        dtype_bytes=pool.store_dtype.itemsize,
        tokens_per_slot=pool.page_size,
    )
    place(pool, layout)
    pool.kv_buffer, _ = memory.torch_views(pool.prism_group.pool, pool.store_dtype)


def latent_modules(model: Any) -> Iterator[Any]:
    """Attention modules that work on latents, of models whose weights are plain numbers: what SGLang derives from
    quantized ones is loaded by SGLang."""
    if getattr(model, "quant_config", None) is None:
        yield from (module for module in model.modules() if hasattr(module, "w_kc") and hasattr(module, "w_vc"))


def keep_absorbed(model: Any) -> None:
    """After SGLang's loader: the matrices become buffers. Follow with :func:`show_absorbed` once these have their
    place."""
    for module in latent_modules(model):
        for name in _ABSORBED:
            module.register_buffer(_kept(name), getattr(module, name).transpose(1, 2).contiguous())
            setattr(module, name, None)


def expect_absorbed(model: Any) -> None:
    """Before an image is filled: the buffers that it has, without memory, and no more of the weight than the loader
    leaves (models without ``post_load_weights`` drop it)."""
    for module in latent_modules(model):
        weight = module.kv_b_proj.weight
        for name in _ABSORBED:
            module.register_buffer(_kept(name), torch.empty(0, dtype=weight.dtype, device=weight.device))
        if not hasattr(model, "post_load_weights"):
            del module.kv_b_proj


def show_absorbed(model: Any) -> None:
    """SGLang's names for the buffers, now that they lie where they stay."""
    for module in latent_modules(model):
        module.w_kc = getattr(module, _kept("w_kc")).transpose(1, 2)
        module.w_vc = getattr(module, _kept("w_vc")).transpose(1, 2)


def _kept(name: str) -> str:
    return f"prism_{name}"


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
        HookKind.REPLACE,
        create_latent_buffers,
        ("self",),
        "latent rows are views over reserved addresses",
    ),
)
