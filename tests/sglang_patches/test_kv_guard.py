"""Attention state that Prism's memory does not manage is refused before it takes memory: pools are allowed by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engine import boot, cuda_stub
from sglang_patches import kv_guard
from sglang_patches.kv_guard import UnsupportedModel, check_pool, check_pools, refuse_buffers


def make(name: str) -> Any:
    """An object of a class of this name."""
    return type(name, (), {})()


def configurator(**changes: Any) -> Any:
    settings = {
        "enable_unified_memory": False,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "enable_int8_mamba_checkpoint": False,
    }
    return SimpleNamespace(server_args=SimpleNamespace(**(settings | changes)))


def builds(pool: str, allocator: str) -> Callable[..., Any]:
    return lambda _, **__: SimpleNamespace(token_to_kv_pool=make(pool), token_to_kv_pool_allocator=make(allocator))


@pytest.mark.parametrize("name", sorted(kv_guard.MANAGED))
def test_managed_pools_pass(name: str) -> None:
    check_pool(make(name), 1, 1)
    check_pools(builds(name, "ElasticTokenAllocator"), configurator())


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("DSATokenToKVPool", "a model with plain, latent or windowed attention"),
        ("MHATokenToKVPoolFP4", "kv_cache_dtype auto, bfloat16, fp8_e4m3"),
        ("NoOpMHATokenToKVPool", "the model without prefill_only_disable_kv_cache"),
    ],
)
def test_a_refusal_says_what_would_be_served(what: str, instead: str) -> None:
    assert f"{kv_guard.WORDS[what]} ({what})" in str(kv_guard.refuse(what))
    assert f"what would be served: {instead}" in str(kv_guard.refuse(what))
    assert set(kv_guard.INSTEAD) <= set(kv_guard.WORDS)


@pytest.mark.parametrize("name", ["MiniMaxSparseKVPool", "MHATokenToKVPoolFP4", "UnifiedMHATokenToKVPool", "Unheard"])
def test_every_other_pool_is_named(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}.*managed are .*MLATokenToKVPool"):
        check_pool(make(name), 1, 1)
    with pytest.raises(UnsupportedModel, match=name):
        check_pools(builds(name, "ElasticTokenAllocator"), configurator())


def test_a_pool_derived_from_a_managed_one_is_another() -> None:
    class MLATokenToKVPool:
        pass

    class MyTokenToKVPool(MLATokenToKVPool):
        pass

    check_pool(MLATokenToKVPool())
    with pytest.raises(UnsupportedModel, match="MyTokenToKVPool"):
        check_pool(MyTokenToKVPool())


def test_allocators_are_allowed_by_name_too() -> None:
    with pytest.raises(UnsupportedModel, match="PureSWATokenToKVPoolAllocator"):
        check_pools(builds("SWAKVPool", "PureSWATokenToKVPoolAllocator"), configurator())


def test_tokens_are_guessed_where_rows_can_be_moved() -> None:
    for algorithm in ("NGRAM", "EAGLE", "EAGLE3"):
        guessing = configurator(speculative_algorithm=algorithm)
        check_pools(builds("MHATokenToKVPool", "ElasticTokenAllocator"), guessing)
    for pool in sorted(kv_guard.MANAGED - {"MHATokenToKVPool"}):
        with pytest.raises(UnsupportedModel, match=f"guessed tokens in {pool}"):
            check_pools(builds(pool, "ElasticTokenAllocator"), guessing)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "speculative decoding by STANDALONE"),
        ({"enable_unified_memory": True}, "enable_unified_memory"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache"),
    ],
)
def test_what_allocates_before_any_pool_is_refused_before(changes: dict[str, Any], named: str) -> None:
    def original(*_: Any, **__: Any) -> Any:
        raise AssertionError("it allocated")

    with pytest.raises(UnsupportedModel, match=named):
        check_pools(original, configurator(**changes))


def test_other_buffers_in_a_managed_pool_are_refused() -> None:
    pool = make("MHATokenToKVPool")
    pool.kv_cache_layout = "hnd"
    with pytest.raises(UnsupportedModel, match="hnd"):
        refuse_buffers(pool)


@pytest.mark.engine
def test_every_pool_class_of_sglang_is_managed_or_calls_the_check_or_is_found_at_the_end() -> None:
    """A class that a new version of SGLang brings is refused without being known here; those named here exist."""
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
        from sglang.srt.mem_cache.allocator import swa
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool
        from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
    here = {**vars(memory_pool), **vars(kv_cache_configurator), **vars(swa)}
    here |= {c.__name__: c for c in (DeepSeekV4SingleKVPool, LayerSplitDSATokenToKVPool)}
    assert {name for name in (*kv_guard.MANAGED, *kv_guard.WORDS) if name not in here} == set()


@pytest.mark.engine
def test_nothing_pickled_passes() -> None:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.io_struct import PickleWrapper

        from sglang_patches.channels import drop_time_stats, refuse_pickle
    with pytest.raises(TypeError, match="pickled"):
        refuse_pickle(PickleWrapper(data=b""))
    assert refuse_pickle(5) == 5
    with pytest.raises(TypeError, match="pickled"):
        drop_time_stats({"custom": object()})
    assert drop_time_stats(None) is None
