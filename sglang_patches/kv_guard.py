"""Which of SGLang's memory pools an engine may have: those whose memory is in the device's account. All others are
refused with words, before they allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from prism.core.errors import PrismError
from sglang_patches.hooks import Hook, HookKind

MANAGED: Final = frozenset(
    {"MHATokenToKVPool", "PageMajorMHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"}
)
"""Names of the pool classes that Prism lays out. A class derived from one of them is another class: it allocates by
itself."""

ALLOCATORS: Final = frozenset({"ElasticTokenAllocator", "ElasticPagedAllocator", "SWATokenToKVPoolAllocator"})

GUESSERS: Final = (None, "NGRAM", "EAGLE", "EAGLE3")
"""SGLang's algorithms of speculative decoding whose memory is in the account."""

GUESSING: Final = frozenset({"MHATokenToKVPool"})
"""Pools in which accepted tokens' rows can be moved to the others (:mod:`sglang_patches.spec_memory`)."""

WORDS: Final = {
    "MHATokenToKVPoolFP4": "4-bit KV",
    "MHATokenToKVPoolMXFP8": "MXFP8 KV",
    "MLATokenToKVPoolFP4": "4-bit latent KV",
    "MHATokenToKOnlyPool": "sparse attention (MiniMax)",
    "MiniMaxSparseKVPool": "sparse attention (MiniMax)",
    "DSATokenToKVPool": "sparse latent attention (DSA)",
    "HiSparseDSATokenToKVPool": "sparse latent attention kept on the host (HiSparse)",
    "LayerSplitDSATokenToKVPool": "sparse latent attention split by layers",
    "DeepSeekV4TokenToKVPool": "compressed attention (DeepSeek-V4)",
    "DeepSeekV4SingleKVPool": "compressed attention (DeepSeek-V4)",
    "NoOpMHATokenToKVPool": "no KV at all (prefill_only_disable_kv_cache)",
    "PureSWATokenToKVPoolAllocator": "attention that sees windows only",
}
"""What the commonest of the others are for."""


class UnsupportedModel(PrismError):
    """The model's attention state has a layout that Prism's memory does not manage."""


_OTHER_MODEL: Final = "a model with plain, latent or windowed attention (docs/models.md)"
_OTHER_FORMAT: Final = "kv_cache_dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2"
INSTEAD: Final = {
    "MHATokenToKVPoolFP4": _OTHER_FORMAT,
    "MHATokenToKVPoolMXFP8": _OTHER_FORMAT,
    "MLATokenToKVPoolFP4": _OTHER_FORMAT,
    "NoOpMHATokenToKVPool": "the model without prefill_only_disable_kv_cache",
}
"""What would be served in place of a pool that is refused, where that is not another model."""


def refuse(what: str, instead: str = "") -> UnsupportedModel:
    """The error for a layout, in words or as SGLang's class. ``instead``: what would be served in its
    place."""
    known = f"{WORDS[what]} ({what})" if what in WORDS else what
    return UnsupportedModel(
        f"the engine does not manage the memory of {known}; managed are {', '.join(sorted(MANAGED))}; "
        f"what would be served: {instead or INSTEAD.get(what, _OTHER_MODEL)}"
    )


def check_pool(pool: Any, *_: Any, **__: Any) -> None:
    """Before ``KVCache.__init__``, which every pool calls before it allocates, but for those that are made of
    others."""
    if (name := type(pool).__name__) not in MANAGED:
        raise refuse(name)


def check_settings(server_args: Any) -> None:
    """What would allocate before any pool is made, or make pools that are not KV."""
    kinds = {
        "a memory pool of its own (enable_unified_memory)": server_args.enable_unified_memory,
        f"speculative decoding by {server_args.speculative_algorithm} (docs/models.md)": (
            server_args.speculative_algorithm not in GUESSERS
        ),
        "KV on the host (enable_hierarchical_cache)": server_args.enable_hierarchical_cache,
        "8-bit copies of states (enable_int8_mamba_checkpoint)": server_args.enable_int8_mamba_checkpoint,
    }
    for kind, present in kinds.items():
        if present:
            raise refuse(kind, "the model without it")


def check_pools(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """Around the making of all pools: settings before it, and the pools themselves after it."""
    check_settings(configurator.server_args)
    pools = original(configurator, **kwargs)
    for part, allowed in ((pools.token_to_kv_pool, MANAGED), (pools.token_to_kv_pool_allocator, ALLOCATORS)):
        if (name := type(part).__name__) not in allowed:
            raise refuse(name)
    if configurator.server_args.speculative_algorithm is not None and name_of(pools) not in GUESSING:
        raise refuse(f"guessed tokens in {name_of(pools)}")
    return pools


def name_of(pools: Any) -> str:
    return type(pools.token_to_kv_pool).__name__


def refuse_buffers(pool: Any) -> None:
    """Replaces what allocates buffers of other layouts in a pool class that is managed."""
    raise refuse(f"{type(pool).__name__} with buffers of another layout ({pool.kv_cache_layout})")


_MHA = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.KVCache.__init__",
        HookKind.BEFORE,
        check_pool,
        (
            "self",
            "size",
            "page_size",
            "dtype",
            "layer_num",
            "device",
            "enable_memory_saver",
            "start_layer",
            "end_layer",
        ),
        "only pools in the account may be made",
    ),
    Hook(
        f"{_MHA}._create_quantized_buffers",
        HookKind.REPLACE,
        refuse_buffers,
        ("self",),
        "4-bit KV has buffers outside the account",
    ),
    Hook(
        f"{_MHA}._alloc_post_capture_buffers",
        HookKind.REPLACE,
        refuse_buffers,
        ("self",),
        "SGLang's own virtual memory is outside the account",
    ),
)
