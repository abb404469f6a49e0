"""A model that guesses tokens for another (EAGLE): its KV and its weights beside those of the model that answers.

SGLang gives both one table of slots and one allocator, and a pool each. Here the guesses' K and V lie in the same slot,
behind those of the model that answers; a token's page, lease, wish and account are one::

    slot s: | k0 v0 k1 v1 ... (the model that answers) | k0 v0 ... (the model that guesses) |

Its weights are those of a second :class:`~sglang_patches.seat.WeightSeat`, without the embedding and the head that
SGLang takes from the model that answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from prism import memory
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import refuse

_MOST_UNIT: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelRows:
    """K and V of one token in all layers of a model."""

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return int(self.layers * self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize)

    def views(self, pool: memory.Pool, start_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of every layer ``[rows, heads, dim]``, the first at ``start_bytes`` of each slot of ``pool``."""
        item = self.dtype.itemsize
        flat = torch.from_dlpack(pool.memory()).view(self.dtype)
        first_bytes, row_bytes, _ = pool.regions[0]
        first, k, v = (first_bytes + start_bytes) // item, self.heads * self.k_dim, self.heads * self.v_dim

        def view(start: int, dim: int) -> torch.Tensor:
            return flat.as_strided((pool.rows, self.heads, dim), (row_bytes // item, dim, 1), start)

        starts = [first + layer * (k + v) for layer in range(self.layers)]
        return [view(at, self.k_dim) for at in starts], [view(at + k, self.v_dim) for at in starts]


def rows_of_pool(pool: Any) -> ModelRows:
    """Of SGLang's ``MHATokenToKVPool``."""
    return ModelRows(pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim, pool.store_dtype)


def rows_of_runner(runner: Any) -> ModelRows:
    """What the pool of a model that is loaded will have."""
    from sglang.srt.runtime_context import get_parallel

    if runner.use_mla_backend or runner.is_hybrid_swa:
        raise refuse("a model that guesses with latent or windowed attention", "a draft with plain attention")
    config = runner.model_config
    heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
    return ModelRows(
        runner.layer_info.num_effective_layers, heads, config.head_dim, config.v_head_dim, runner.kv_cache_dtype
    )


def joint_layout(first: ModelRows, second: ModelRows) -> memory.KvLayout:
    """Slots with the rows of both."""
    if first.dtype != second.dtype:
        raise refuse(f"KV in {first.dtype} beside guesses in {second.dtype}", "both in one type")
    cell = first.token_bytes + second.token_bytes
    unit = min(cell & -cell, _MOST_UNIT)
    return memory.KvLayout(layers=1, kv_heads=cell // unit, head_dim=unit, v_head_dim=0, dtype_bytes=1)


def note_draft(scheduler: Any) -> None:
    """Before ``Scheduler.init_memory_pools``: all models are loaded, and no pool is made yet."""
    guesser = getattr(scheduler.draft_worker, "draft_worker", None)  # what looks up n-grams has none
    scheduler.server_args.prism_seat.draft_rows = None if guesser is None else rows_of_runner(guesser.draft_runner)


def count_draft(result: None, configurator: Any, kvc: Any) -> None:
    """After ``DefaultPoolConfigurator.__init__``, which takes a layer that guesses to be as wide as the others."""
    rows = getattr(kvc.server_args.prism_seat, "draft_rows", None)
    if rows is not None and not kvc.is_draft_worker:
        own = configurator._compute_cell_size(kvc, kvc.layer_info.num_effective_layers)
        configurator._cell_size = own + rows.token_bytes


def stay_within_target(original: Callable[..., Any], config: Any, context_length: int | None) -> None:
    """Around ``ModelConfig._derive_context_length``: guesses behind the longest sequence that the guesser was made for
    are worse, and change no answer. SGLang wants an environment variable to be told so."""
    if not config.is_draft_model:
        original(config, context_length)
        return
    from sglang.srt.environ import envs

    with envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True):
        original(config, context_length)


def widen_table(original: Callable[..., int], server_args: Any) -> int:
    """Around ``get_req_to_token_extra_context_len``: a step takes slots for guesses of this one and the next, and
    SGLang's table has no place for all of them behind the longest sequence."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    extra = int(original(server_args))
    if server_args.speculative_algorithm is None:
        return extra
    return max(extra, int(get_alloc_reserve_per_decode(server_args) + server_args.page_size))


def give_up_shared(model: Any) -> None:
    """Take from a guesser what SGLang will put the other model's tensors in the place of (``init_lm_head``)."""
    from sglang.srt.runtime_context import get_server_args

    nothing = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    if get_server_args().speculative_algorithm == "EAGLE3" and not getattr(model, "load_lm_head_from_target", False):
        model.set_embed(nothing)
    else:
        model.set_embed_and_head(nothing, nothing)
    for module in model.modules():
        if module._parameters.get("weight") is nothing:
            del module.weight


def expect_shared(draft: Any) -> None:
    """Before ``EagleDraftWorker.init_lm_head``, which deletes what it replaces."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in draft.draft_runner.model.modules():
        if isinstance(module, VocabParallelEmbedding) and "weight" not in module._parameters:
            module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_memory_pools",
        HookKind.BEFORE,
        note_draft,
        ("self",),
        "slots have room for the guesser's KV",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__",
        HookKind.AFTER,
        count_draft,
        ("self", "kvc"),
        "a token's bytes with those of the guesser",
    ),
    Hook(
        "sglang.srt.configs.model_config.ModelConfig._derive_context_length",
        HookKind.AROUND,
        stay_within_target,
        ("self", "context_length"),
        "a guesser may be made for shorter sequences",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        HookKind.AROUND,
        widen_table,
        ("server_args",),
        "slots of guesses behind the longest sequence have a place in the table",
    ),
    Hook(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
        HookKind.BEFORE,
        expect_shared,
        ("self",),
        "what both models share is in no image of the guesser",
    ),
)
