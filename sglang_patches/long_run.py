"""One long request on its way: its window, its units outside, and a batch of its own for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from prism.policy.long_prompts import WINDOW_SHARE, LongShape, WindowPlan, leaves_room, plan_window
from sglang_patches.kv_allocator import Unplaced
from sglang_patches.long_backend import LongAttention, work_on_latents
from sglang_patches.long_rows import TokenRows
from sglang_patches.long_window import LongWindow
from sglang_patches.seat import UnitStore

_READS_EIGHT_BITS: Final = "torch_native"
"""SGLang's attention that only widens what is stored in eight bits, without scales, as is done here: its kernels round
queries and the weights of values to eight bits as well."""


class PaddingSlots:
    """In place of an allocator: every token has the padding slot, since its KV lies elsewhere."""

    page_size = 1

    def __init__(self, device: str) -> None:
        self.device, self.placement = device, Unplaced()

    def alloc(self, need_size: int) -> torch.Tensor:
        return torch.zeros(need_size, dtype=torch.int64, device=self.device)


class NoTree:
    """In place of a prefix cache, for a batch: SGLang asks it where slots come from."""

    page_size = 1

    def __init__(self, slots: PaddingSlots) -> None:
        self.token_to_kv_pool_allocator = slots

    def is_chunk_cache(self) -> bool:
        return True

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False


class LongRun:
    """Owns ``window`` and ``store`` until :meth:`close`; between two steps the window may be given away."""

    def __init__(
        self,
        scheduler: Any,
        req: Any,
        plan: WindowPlan,
        shape: LongShape,
        window: LongWindow,
        store: UnitStore,
        most_chunk_tokens: int,
    ) -> None:
        self._scheduler, self.req, self.store = scheduler, req, store
        self.window: LongWindow | None = window
        """None: its memory was given to others."""
        self._runner = scheduler.tp_worker.model_runner
        self.backend = LongAttention(self._runner, plan, shape, window, store)
        self.aborted = False
        self._chunk_tokens = min(int(scheduler.chunked_prefill_size or scheduler.max_prefill_tokens), most_chunk_tokens)
        self._done = 0
        """Tokens that have KV, or will behind the step that runs."""
        self._batch: Any = None
        req._refresh_fill_ids()
        self._prompt = len(req.full_untruncated_fill_ids)
        req.last_node, req.cache_protected_len = scheduler.tree_cache.root_node, 0

    def give_window(self) -> None:
        """To others, behind :meth:`LongAttention.put_tails_away`."""
        assert self.window is not None, "it was given away already"
        self.window.close()
        self.window = None

    def take_window(self, window: LongWindow) -> None:
        """Go on; whether it can is said by its back end."""
        self.window = window
        self.backend.bring_tails(window)

    def next_batch(self) -> Any:
        """A chunk of the prompt, or the next token. The step before it must have been processed."""
        if self._done < self._prompt:
            self._batch = self._prefill(min(self._done + self._chunk_tokens, self._prompt))
        else:
            self._batch.prepare_for_decode()
        # SGLang frees the slots behind what its tree protects: there are none.
        self.req.cache_protected_len = self.req.kv_committed_len
        return self._batch

    def _prefill(self, end: int) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
        from sglang.srt.observability.metrics_collector import QueueCount
        from sglang.srt.observability.req_time_stats import set_time_batch

        scheduler, req, first = self._scheduler, self.req, self._done
        slots = PaddingSlots(scheduler.device)
        middle = end < self._prompt
        req.inflight_middle_chunks += middle
        req.prefix_indices = torch.zeros(first, dtype=torch.int64, device=scheduler.device)
        req.set_extend_range(first, end)
        if first == 0:
            set_time_batch([req], "set_forward_entry_time")
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            slots,
            NoTree(slots),
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
            chunked_req=req if middle else None,
        )
        batch.contains_last_prefill_chunk = not middle
        batch.prepare_for_extend()
        batch.decoding_reqs = None
        batch.prefill_stats = PrefillStats(end - first, 0, 1.0, QueueCount.from_reqs([], False), int(first == 0))
        self._done = end
        return batch

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A step of this request runs: with its own back end, and none of the captured graphs."""
        runner = self._runner
        before = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self.backend, None
        self.backend.begin()
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = before
            self.backend.end()

    def release(self) -> None:
        """Its place in SGLang's tables is free again, if it has one."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if self.req.req_pool_idx is not None:
            release_kv_cache(self.req, self._scheduler.tree_cache, is_insert=False)

    def close(self) -> None:
        """Give all memory back, on the device and outside."""
        self.backend.close()
        self.store.close()
        if self.window is not None:
            self.window.close()


def layout_of(scheduler: Any, capacity_bytes: int, ahead: int) -> tuple[LongShape, WindowPlan] | str:
    """What a token's KV is on this rank and the window for it, ``ahead`` units on their way at once; or why there are
    none: a model whose attention cannot be computed in parts here, or whose device has no room for the smallest window.
    ``capacity_bytes``: of KV memory that every rank can ever have."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if why := _why_not_parts(scheduler, pool):
        return why
    rows = TokenRows.of(pool)
    layers = _layers(scheduler)
    if rows.latent:
        work_on_latents()
        layers = [m for m in layers if (m.tp_k_head_num, m.qk_head_dim, m.v_head_dim) == _latent_shape(rows)]
    if why := _why_not_layers(layers, int(pool.start_layer)):
        return why
    sees = [max(0, int(m.sliding_window_size)) for m in sorted(layers, key=lambda m: int(m.layer_id))]
    shape = LongShape(len(layers), rows.token_bytes, tuple(sees) if any(sees) else ())
    plan = plan_window(shape, capacity_bytes // WINDOW_SHARE, ahead)
    if plan is None or not leaves_room(plan, capacity_bytes, scheduler.server_args.prism_seat.owner.page_bytes):
        return "its device has no room for a window of their KV"
    return shape, plan


def _why_not_parts(scheduler: Any, pool: Any) -> str:
    """Empty when it is one of the engines whose steps may have another attention."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from sglang_patches.kv_move_trees import WINDOWS  # which imports trees of SGLang's

    seat, tree = scheduler.server_args.prism_seat, scheduler.tree_cache
    if not scheduler.is_generation:
        return "the model generates no text"
    if seat.first_pieces:
        return "the engine serves while its weights come"
    if not scheduler.spec_algorithm.is_none():
        return "the engine guesses tokens (speculative decoding)"
    windows = type(pool) is SWAKVPool
    if windows and TokenRows.of(pool) != TokenRows.of(pool.swa_kv_pool):
        return "its layers that see the last tokens only have other heads than those that see all"
    pool = pool.full_kv_pool if windows else pool
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        return "the model keeps states beside the KV of all tokens"
    if pool.dtype != pool.store_dtype and (by := scheduler.server_args.attention_backend) != _READS_EIGHT_BITS:
        return f"its KV is in eight bits, for which attention by {by} rounds queries and weights, too"
    known = type(tree) is RadixCache or (windows and tuple(getattr(tree, "tree_components", ())) == WINDOWS)
    if not known or tree.disable or tree.is_eagle or tree.page_size != 1:
        return "the engine's prefix cache is off, or of another kind"
    return ""


def _why_not_layers(layers: list[Any], first: int) -> str:
    """Empty when each layer is one attention over all tokens or the last ones, which partial softmaxes make up."""
    from sglang.srt.layers.radix_attention import AttentionType

    for m in layers:
        # Of one that looks both ways at images' tokens only prompts without images come here.
        decodes = m.attn_type in (AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL)
        plain = decodes and not m.is_cross_attention and not m.use_irope
        capped = m.logit_cap and m.logit_capping_method != "tanh"
        if not plain or capped or m.xai_temperature_len > 0:
            return "some of its layers attend in another way"
    if sorted(m.layer_id for m in layers) != list(range(first, first + len(layers))):
        return "some of its layers attend more than once"
    return ""


def _layers(scheduler: Any) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    return [m for m in scheduler.tp_worker.model_runner.model.modules() if isinstance(m, RadixAttention)]


def _latent_shape(rows: TokenRows) -> tuple[int, int, int]:
    """Of the module that attends on latents; beside it each layer has one that attends with the K and V of heads."""
    return rows.heads, rows.key_dim, rows.value_dim
