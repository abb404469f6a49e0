"""Attention state that Prism's memory does not manage is refused before it takes memory."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engine import boot, cuda_stub
from sglang_patches.kv_pool import UnsupportedModel, refuse_unsupported


def configurator(**changes: Any) -> SimpleNamespace:
    import torch

    plain = {
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "mambaish_config": None,
        "kv_cache_dtype": torch.float32,
        "server_args": SimpleNamespace(page_size=1, speculative_algorithm=None),
    }
    return SimpleNamespace(**(plain | changes))


def test_plain_attention_passes() -> None:
    refuse_unsupported(configurator())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"mambaish_config": object()}, "Mamba"),
        ({"server_args": SimpleNamespace(page_size=16, speculative_algorithm=None)}, "page size"),
        ({"server_args": SimpleNamespace(page_size=1, speculative_algorithm="EAGLE")}, "speculative"),
    ],
)
def test_other_layouts_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        refuse_unsupported(configurator(**changes))


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
