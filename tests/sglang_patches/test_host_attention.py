"""Attention in torch is what SGLang's Triton kernels compute, which Triton's interpreter runs here."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_patches import host_attention

# The interpreter's: it computes rows that are not stored, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SLOTS = 64


def kernel(name: str) -> Any:
    """As SGLang has it, whoever else prepared this process."""
    found = getattr(importlib.import_module(f"sglang.kernels.ops.attention.{name}"), f"{name}_fwd")
    return getattr(found, "__wrapped__", found)


def model(draw: random.Random) -> dict[str, Any]:
    """Heads, their widths, and what a model may ask of attention. Keys of latent rows are wider than values."""
    groups = draw.choice([1, 2])
    heads = groups * draw.choice([1, 4])
    return {"groups": groups, "heads": heads, "key": draw.choice([16, 32]), "value": 16} | {
        "more": {
            "logit_cap": draw.choice([0.0, 2.0]),
            "sinks": draw.choice([None, torch.randn(heads)]),
            "xai_temperature_len": draw.choice([-1, 4]),
        }
    }


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def cached(asked: dict[str, Any], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V of all slots, and which are whose, in no order."""
    k, v = (torch.randn(SLOTS, asked["groups"], asked[width]) for width in ("key", "value"))
    return k, v, starts(lengths), torch.randperm(SLOTS)[: sum(lengths)]


def drawn_masks(lengths: list[tuple[int, int]], offsets: list[int]) -> list[Tensor]:
    """What tokens of a speculation see; each sees itself."""
    masks = []
    for (before, new), offset in zip(lengths, offsets, strict=True):
        mask = torch.rand(new, offset + before + new) < 0.5
        mask[:, -new:] |= torch.eye(new, dtype=torch.bool)
        masks.append(mask.flatten())
    return masks


@pytest.mark.parametrize("sees", ["causal", "all", "mask"])
@pytest.mark.parametrize("seed", range(10))
def test_prompts(seed: int, sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "ROWS", 8)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    asked, window, skip = model(draw), draw.choice([-1, 3, 12]), draw.choice([False, True])
    lengths = [(draw.randint(0, 20), draw.randint(1, 20)) for _ in range(draw.choice([1, 2]))]
    news, offsets = [new for _, new in lengths], [2, 1][: len(lengths)]
    masks = drawn_masks(lengths, offsets if window > 0 else [0] * len(offsets))
    q, k, v = (
        torch.randn(sum(news), asked[heads], asked[width])
        for heads, width in (("heads", "key"), ("groups", "key"), ("groups", "value"))
    )
    k_buffer, v_buffer, kv_indptr, kv_indices = cached(asked, [before for before, _ in lengths])
    found = []
    for run in (kernel("extend_attention"), host_attention.extend):
        found.append(torch.zeros(sum(news), asked["heads"], asked["value"]))
        run(
            *(q, k, v, found[-1], k_buffer, v_buffer, starts(news), kv_indptr, kv_indices),
            *(torch.cat(masks) if sees == "mask" else None, sees == "causal", starts([len(m) for m in masks])),
            *(max(news), 1.0, 1.0),
            sliding_window_size=window,
            skip_prefix_custom_mask=skip,
            window_kv_offsets=torch.tensor(offsets, dtype=torch.int32),
            **asked["more"],
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_prompts_of_latent_rows_come_as_heads_when_nothing_is_cached() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(9, 4, width) for width in (32, 32, 16))
    latents = torch.randn(SLOTS, 1, 48)
    nothing = torch.zeros(2, dtype=torch.int32)
    found = []
    for run in (kernel("extend_attention"), host_attention.extend):
        found.append(torch.zeros(9, 4, 16))
        more = (starts([9]), nothing, torch.zeros(0, dtype=torch.int64), None, True, None, 9, 1.0, 1.0)
        run(q, k, v, found[-1], latents, latents[..., :40], *more)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_decoding(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    asked = model(draw)
    k_buffer, v_buffer, kv_indptr, kv_indices = cached(asked, [draw.randint(1, 20), draw.randint(1, 20)])
    q = torch.randn(2, asked["heads"], asked["key"])
    found = []
    for run in (kernel("decode_attention"), host_attention.decode):
        found.append(torch.zeros(2, asked["heads"], asked["value"]))
        scratch = torch.empty(2, asked["heads"], 2, asked["value"]), torch.empty(2, asked["heads"], 2)
        run(
            *(q, k_buffer, v_buffer, found[-1], kv_indptr, kv_indices, *scratch),
            *(torch.full((2,), 2, dtype=torch.int32), 2, 0.25, 1.0, 1.0),
            **asked["more"],
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cache", "more", "asked"),
    [
        (torch.zeros(8, 1, 4), {"page_size": 4, "score_mod": None}, "here"),
        (torch.zeros(2, 4, 1, 4), {"page_size": 4}, "kernel"),
        (torch.zeros(8, 1, 4), {"lse_extend": torch.zeros(1)}, "kernel"),
    ],
)
def test_what_only_the_kernel_has_is_asked_of_it(cache: Tensor, more: dict[str, Any], asked: str) -> None:
    calls: list[str] = []
    kernel, here = (lambda *_, name=name, **__: calls.append(name) for name in ("kernel", "here"))
    run = host_attention.instead_of(kernel, here, cache_at=1)
    run(torch.zeros(1, 1, 1, 1), cache, logit_cap=1.0, **more)
    assert calls == [asked]
