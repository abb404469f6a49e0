"""What the kernels of SGLang's Triton back end compute, in torch, for devices without a GPU.

Models with latent rows, or with windows beside full attention, have no other back end on a CPU. Triton's interpreter
runs the same kernels there, operation by operation in Python: a hundred times as long (docs/results/engine.md).

``T`` tokens of ``B`` requests, ``H`` heads of queries and ``G`` of keys and values, ``D`` and ``V`` their widths, ``N``
slots of the KV cache. ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`` are the slots of request ``i``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

ROWS: Final = 256
"""Of a prompt are computed at a time: scores take memory for each of them, head by head and token by token."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: Tensor | float,
    logit_cap: float = 0.0,
    temperature: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one request's queries [T, H, D] to the tokens ``k`` [L, G, D] and ``v`` [L, G, V]; [T, H, V] in
    float32. ``seen`` [T, L]: what each query sees; None: everything. ``scale``: of the scores, for all or by token [L].
    ``temperature`` [T]: of the scores, after their cap. ``sinks`` [H]: scores of a token without value."""
    groups = k.shape[1]
    rows = q.float().unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    scores = rows @ k.float().permute(1, 2, 0).unsqueeze(1) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if temperature is not None:
        scores = scores * temperature[:, None]
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float().transpose(0, 1).unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)


def temperature_of(positions: Tensor, length: int) -> Tensor | None:
    """Grok's: of queries further than ``length``; None: there is none."""
    if length <= 0:
        return None
    return torch.where(positions > length, positions.float().log2() / math.log2(length), 1.0)


def seen_by_mask(mask: Tensor, before: int, new: int, offset: int) -> Tensor:
    """[new, before + new] of a speculation's mask, whose rows have ``offset`` tokens more that left the window."""
    rows: Tensor = mask[: new * (offset + before + new)].view(new, -1).bool()
    return rows[:, offset:]


def after(cached: Tensor, new: Tensor) -> Tensor:
    """Both, one after the other. With nothing cached those that are new may have another shape than the cache: heads
    instead of latent rows."""
    return torch.cat([cached, new]) if len(cached) else new


def extend(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: Tensor | None = None,
    window_kv_offsets: Tensor | None = None,
    xai_temperature_len: int = -1,
) -> None:
    """``extend_attention_fwd``: queries [T, H, D] of prompts' new tokens, whose K and V come beside, to these and to
    what is cached ([N, G, D] and [N, G, V]); into ``o_extend`` [T, H, V]. With a window W a token sees W before it."""
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    starts, slots = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(starts) - 1):
        rows, where = slice(starts[i], starts[i + 1]), kv_indices[slots[i] : slots[i + 1]].long()
        new, before = rows.stop - rows.start, len(where)
        if not new:
            continue
        queries, tokens = torch.arange(before, before + new)[:, None], torch.arange(before + new)
        if custom_mask is not None:
            assert mask_indptr is not None
            offset = int(window_kv_offsets[i]) if window_kv_offsets is not None and sliding_window_size > 0 else 0
            seen = seen_by_mask(custom_mask[int(mask_indptr[i]) :], before, new, offset)
            if skip_prefix_custom_mask:
                seen = seen | (tokens < before)
        else:
            seen = (tokens <= queries) if is_causal else torch.ones(new, before + new, dtype=torch.bool)
        if sliding_window_size > 0:
            seen = seen & (queries <= tokens + sliding_window_size)
        k = after(k_buffer[where].float(), k_extend[rows].float())
        v = after(v_buffer[where].float() * v_scale, v_extend[rows].float())
        scales = scale if k_scale == 1.0 else torch.where(tokens < before, scale * k_scale, scale)
        for first in range(0, new, ROWS):
            part = slice(first, min(first + ROWS, new))
            temperature = temperature_of(queries[part, 0], xai_temperature_len)
            found = attend(q_extend[rows][part], k, v, seen[part], scales, logit_cap, temperature, sinks)
            o_extend[rows][part] = found.to(o_extend.dtype)


def decode(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    has_mla: bool = False,
    use_pdl: bool = False,
) -> None:
    """``decode_attention_fwd``: one query of each request [B, H, D] to its tokens in the cache ([N, G, D] and
    [N, G, V]); into ``o`` [B, H, V]. ``attn_logits`` to ``max_kv_splits`` are the kernels' scratch memory."""
    slots = kv_indptr.tolist()
    for i in range(len(q)):
        where = kv_indices[slots[i] : slots[i + 1]].long()
        at = torch.tensor([len(where) - 1])
        found = attend(
            q[i : i + 1],
            k_buffer[where],
            v_buffer[where],
            None,
            sm_scale * k_scale,
            logit_cap,
            temperature_of(at, xai_temperature_len),
            sinks,
        )
        o[i] = (found[0] * v_scale).to(o.dtype)


ONLY_KERNELS: Final[dict[str, Any]] = {
    "lse_extend": None,
    "skip_prefix": False,
    "skip_extend": False,
    "score_mod": None,
    "aux_tensors": None,
}
"""What is asked of the kernels with another value than this is asked of nobody else."""


def instead_of(kernel: Callable[..., None], here: Callable[..., None], cache_at: int) -> Callable[..., None]:
    """``here`` where nothing is asked that only the kernel has: sums for ranks that share a context, terms that a model
    adds to scores, a cache whose pages are a dimension of their own. ``cache_at``: which argument is the cache."""

    @wraps(kernel)
    def run(*args: Any, page_size: int = 1, **kwargs: Any) -> None:
        special = any(kwargs.get(name, usual) is not usual for name, usual in ONLY_KERNELS.items())
        if special or args[cache_at].ndim == 4:
            kernel(*args, page_size=page_size, **kwargs)
        else:
            here(*args, **{name: value for name, value in kwargs.items() if name not in ONLY_KERNELS})

    return run


_KERNELS: Final = "sglang.kernels.ops.attention"


def prepare() -> None:
    """Once per process of engines on virtual devices, before the back end imports its kernels."""
    for name, here, cache_at in (("extend_attention", extend, 4), ("decode_attention", decode, 1)):
        found: Any = importlib.import_module(f"{_KERNELS}.{name}")
        setattr(found, f"{name}_fwd", instead_of(getattr(found, f"{name}_fwd"), here, cache_at))
