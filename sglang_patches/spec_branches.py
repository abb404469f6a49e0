"""A model that guesses, on a CPU: torch's attention over the branches of its guesses (SGLang has it for GPUs and AMX).

A step guesses one token behind each branch of every request. K and V of what was guessed lie in the slots behind the
request's own tokens, branch by branch::

    | committed ... | b0: t0 t1 t2 | b1: t0 t1 t2 | ...        step 1 of b1 sees: committed, b1's t0 and t1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.spec_operators import define_missing


class BranchAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Of one step of guessing."""

    def __init__(self, runner: Any, step: int, branches: int, steps: int) -> None:
        super().__init__(runner)
        self._step, self._branches, self._steps = step, branches, steps

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """``q`` [requests * branches, heads * dim]; returns the same of values."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, 1, layer.qk_head_dim)
        answers = [
            scaled_dot_product_attention(
                query[None],
                keys[slots].to(q.dtype).movedim(0, 1)[None],
                values[slots].to(q.dtype).movedim(0, 1)[None],
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                scale=layer.scaling,
            ).reshape(1, -1)
            for query, slots in zip(queries, self._seen(forward_batch), strict=True)
        ]
        return torch.cat(answers)

    def _seen(self, forward_batch: Any) -> list[torch.Tensor]:
        """The slots that each branch of each request sees."""
        table, found = self.req_to_token_pool.req_to_token, []
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for row, length in rows:
            for branch in range(self._branches):
                first = length + branch * self._steps
                found.append(torch.cat((table[row, :length], table[row, first : first + self._step + 1])))
        return found


class BranchSteps:
    """In place of SGLang's backends for several steps of guessing: one for each but the last, which only draws."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, branches: int, steps: int) -> None:
        self.attn_backends = [BranchAttention(runner, step, branches, steps) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing is planned ahead."""


def make_steps(original: Callable[..., Any], factory: Any) -> Any:
    """Around ``DraftBackendFactory.create_decode_backend``; None: guesses are one token long."""
    if factory.server_args.device != "cpu" or factory.speculative_num_steps <= 1:
        return original(factory)
    return BranchSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def make_extend(original: Callable[..., Any], factory: Any) -> Any:
    """Around ``DraftBackendFactory.create_draft_extend_backend``."""
    if factory.server_args.device != "cpu":
        return original(factory)
    return TorchNativeAttnBackend(factory.draft_model_runner)


def select_eagerly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``_select_top_k_tokens_later``, which SGLang compiles: a handful of small operations, and a request that
    waits half a minute for the compiler."""
    return inspect.unwrap(original)(*args, **kwargs)


def prepare_worker(worker: Any, server_args: Any, *_: Any, **__: Any) -> None:
    """Before ``EAGLEWorkerV2.__init__``."""
    if server_args.device == "cpu":
        define_missing()


_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
HOOKS = (
    Hook(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.__init__",
        HookKind.BEFORE,
        prepare_worker,
        ("self", "server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
        "operators that the wheel for CPUs does not have",
    ),
    Hook(f"{_FACTORY}.create_decode_backend", HookKind.AROUND, make_steps, ("self",), "guessing on a CPU"),
    Hook(f"{_FACTORY}.create_draft_extend_backend", HookKind.AROUND, make_extend, ("self",), "guessing on a CPU"),
    Hook(
        "sglang.srt.speculative.spec_utils._select_top_k_tokens_later",
        HookKind.AROUND,
        select_eagerly,
        ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk"),
        "nothing is compiled while a request waits",
    ),
)
