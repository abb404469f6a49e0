"""Speculative decoding where SGLang's wheel for CPUs lacks something: operators, a mask, a header."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.spec_operators import define_missing


def prepare_worker(worker: Any, server_args: Any, *_: Any, **__: Any) -> None:
    """Before ``NGRAMWorker.__init__``."""
    if server_args.device == "cpu":
        define_missing()


def compile_corpus(original: Callable[..., Any], *names: str, **how: Any) -> Any:
    """Around ``load_jit`` as the corpus of n-grams calls it: one of its headers uses ``size_t`` and leaves it to chance
    whether another has declared it (with GCC 12 none has)."""
    return original(*names, **how, extra_cflags=["-include", "cstddef"])


def attend(
    original: Callable[..., torch.Tensor],
    back_end: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> torch.Tensor:
    """Around ``TorchNativeAttnBackend.forward_extend``, which knows no trees: each node of a request's tree sees the
    sequence and its ancestors. ``q`` [requests * nodes, heads * dim]."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(back_end, q, k, v, layer, forward_batch, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, info = back_end.token_to_kv_pool, forward_batch.spec_info
    pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, back_end.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    nodes = info.draft_token_num
    queries = q.view(-1, nodes, layer.tp_q_head_num, layer.qk_head_dim)
    trees, positions = info.custom_mask.view(-1, nodes, nodes).bool(), info.positions.view(-1, nodes)
    table, rows = back_end.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist()
    answers = []
    for at, (row, length) in enumerate(zip(rows, forward_batch.seq_lens.tolist(), strict=True)):
        slots = table[row, : length + nodes]
        answer = scaled_dot_product_attention(
            queries[at].movedim(0, 1)[None],
            keys[slots].to(q.dtype).movedim(0, 1)[None],
            values[slots].to(q.dtype).movedim(0, 1)[None],
            attn_mask=tree_mask(trees[at], positions[at], length, layer.sliding_window_size),
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )
        answers.append(answer[0].movedim(1, 0))
    return torch.cat(answers).reshape(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)


def tree_mask(tree: torch.Tensor, positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """What each node sees [nodes, length + nodes]: of the sequence all, or the last ``window`` tokens before its own
    position, and of the nodes those that ``tree`` [nodes, nodes] says (the tree is no deeper than a window)."""
    before = torch.ones((len(tree), length), dtype=torch.bool)
    if window is not None and window > -1:
        before = torch.arange(length).view(1, -1) >= positions.view(-1, 1) - window
    return torch.cat((before, tree), dim=1)


HOOKS = (
    Hook(
        "sglang.srt.speculative.ngram_worker.NGRAMWorker.__init__",
        HookKind.BEFORE,
        prepare_worker,
        ("self", "server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
        "operators that the wheel for CPUs does not have",
    ),
    Hook(
        "sglang.jit_kernel.ngram_corpus.load_jit",
        HookKind.AROUND,
        compile_corpus,
        (
            "args",
            "cpp_files",
            "cuda_files",
            "cpp_wrappers",
            "cuda_wrappers",
            "extra_cflags",
            "extra_cuda_cflags",
            "extra_ldflags",
            "extra_include_paths",
            "extra_dependencies",
            "build_directory",
            "header_only",
        ),
        "the corpus of n-grams does not compile with every compiler",
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        HookKind.AROUND,
        attend,
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "attention on a CPU that sees trees",
    ),
)
