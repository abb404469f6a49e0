"""SGLang's attention back end for the steps of a request that is larger than its device.

Per layer: the step's own tokens and the tail are on the device; older units come through the window. What fills a
piece goes out, the rest is the new tail. Of layers that see the last tokens only, units out of sight go.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from prism.core.errors import PrismError
from prism.policy.long_prompts import LongShape, WindowPlan, bring_order, first_piece
from sglang_patches.long_attention import Looks, SoftmaxMerge, attend_own
from sglang_patches.long_window import Bringing, LongWindow, Storing
from sglang_patches.seat import UnitStore

log = logging.getLogger(__name__)

NAME: Final = "prism_long"
"""By which SGLang's latent attention asks how it is to compute (:func:`work_on_latents`)."""


class LongAttention(AttentionBackend):  # type: ignore[misc]
    """Of one request, from its first chunk to its end. A step is :meth:`begin`, the forward pass, :meth:`end`. Between
    two steps its window may go, behind :meth:`put_tails_away`, and another one come (:meth:`bring_tails`)."""

    prefill_attention_backend_str = decode_attention_backend_str = NAME

    def __init__(self, runner: Any, plan: WindowPlan, shape: LongShape, window: LongWindow, store: UnitStore) -> None:
        super().__init__()
        self.device = runner.device
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self._first_layer = int(runner.token_to_kv_pool.start_layer)
        self._plan, self._shape, self._window, self._store = plan, shape, window, store
        self._layers = shape.layers
        self._threads = ThreadPoolExecutor(plan.slots - 1, "long-in"), ThreadPoolExecutor(1, "long-out")
        self._bringing: Bringing | None = None
        self._storing = Storing(store, self._threads[1])
        self._pieces = self._tail_tokens = self._step_tokens = 0
        self.lost = ""
        """Why the step has no result: KV that it needs is gone, or finds no room."""

    def begin(self) -> None:
        """Before a step."""
        order = bring_order([self._first(layer) for layer in range(self._layers)], self._pieces)
        self._bringing = Bringing(self._store, self._window, order, self._threads[0])
        self._step_tokens = 0

    def end(self) -> None:
        """Behind a step, whatever came of it."""
        if self._bringing is not None:
            self._bringing.stop()
            self._bringing = None
        try:
            self._storing.finish()
        except (PrismError, OSError) as error:
            self.lost = self.lost or str(error)
        tokens = self._tail_tokens + self._step_tokens
        self._pieces += self._plan.pieces(tokens)
        self._tail_tokens = tokens % self._plan.piece_tokens

    def put_tails_away(self) -> bool:
        """Store every layer's tail as its next unit. False: there is no room outside, and the window has to stay."""
        try:
            for layer in range(self._layers if self._tail_tokens else 0):
                self._put((layer, self._pieces), *self._window.tail(layer))
            self._storing.finish()
        except (PrismError, OSError) as error:
            log.info("the window of a long prompt stays: %s", error)
            self._storing.forget()
            return False
        return True

    def bring_tails(self, window: LongWindow) -> None:
        """Go on in ``window``."""
        self._window = window
        try:
            for layer in range(self._layers if self._tail_tokens else 0):
                with self._store.read((layer, self._pieces)) as packed:
                    window.fill_tail(layer, packed)
        except (PrismError, OSError) as error:
            self.lost = str(error)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """There is none: one sequence, whose keys are where they are."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **more: Any) -> Any:
        return self._attend(q, k, v, layer, more.get("sinks"))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **more: Any) -> Any:
        return self._attend(q, k, v, layer, more.get("sinks"))

    def _first(self, layer: int, more: int = 0) -> int:
        """The first piece that a step sees, this one or the one behind ``more`` tokens."""
        tokens = self._pieces * self._plan.piece_tokens + self._tail_tokens + more
        return first_piece(self._shape.before(layer), tokens, self._plan.piece_tokens)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if not self.lost:
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            number = layer.layer_id - self._first_layer
            looks = Looks(layer.scaling, self._shape.before(number), layer.logit_cap, sinks)
            try:
                return self._attend_all(queries, keys, values, number, looks)
            except (PrismError, OSError) as error:
                log.warning("a step of a long prompt is lost: %s", error)
                self.lost = str(error) or type(error).__name__
        return q.new_zeros((len(queries), layer.tp_q_head_num * layer.v_head_dim))

    def _attend_all(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, looks: Looks
    ) -> torch.Tensor:
        assert self._bringing is not None, "a step that was not begun"
        before, piece = self._tail_tokens, self._plan.piece_tokens
        self._step_tokens = len(keys)
        tail_keys, tail_values = self._window.tail(layer)
        own_keys = torch.cat([tail_keys[:before], keys.to(tail_keys.dtype)])
        own_values = torch.cat([tail_values[:before], values.to(tail_values.dtype)])
        merge = SoftmaxMerge(queries, own_keys.shape[1], own_values.shape[2], looks)
        attend_own(merge, own_keys, own_values, before, piece)
        for number in range(self._first(layer), self._pieces):
            slot = self._bringing.next((layer, number))
            merge.take(*self._window.slot(slot), (self._pieces - number) * piece + before)
            self._bringing.read(slot)
        self._put_away(layer, own_keys, own_values)
        return merge.answer()

    def _put_away(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        piece = self._plan.piece_tokens
        full = self._plan.pieces(len(keys))
        first = self._first(layer, self._step_tokens)
        if gone := [(layer, number) for number in range(self._first(layer), first)]:
            self._storing.drop(gone)
        for i in range(max(0, first - self._pieces), full):
            part = slice(i * piece, (i + 1) * piece)
            self._put((layer, self._pieces + i), keys[part], values[part])
        rest = len(keys) - full * piece
        tail_keys, tail_values = self._window.tail(layer)
        tail_keys[:rest] = keys[full * piece :]
        tail_values[:rest] = values[full * piece :]

    def _put(self, unit: tuple[int, int], keys: torch.Tensor, values: torch.Tensor) -> None:
        self._storing.put(unit, self._window.rows.packed(keys, values))


def work_on_latents() -> None:
    """SGLang's latent attention (MLA) hands this back end rows as they are stored, in every step: for a prompt's first
    chunk it would otherwise compute the K and V of all heads, and store the rows by itself."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register(NAME, lambda attention, batch: handlers.AttnForwardMethod.MLA)
