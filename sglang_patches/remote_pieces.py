"""Some pieces of a model: 0 the embedding, 1..L its decoder layers, L+1 the last norm and the head.

The model's own ``forward`` runs them: its pipeline-parallel paths are taken for the length of one call, as if this
process were the stage that has these pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prism.remote.pieces import piece_of
from sglang_patches.kv_guard import refuse

State = tuple[Any, Any]
"""Hidden states and residual, ``[tokens, hidden]``; the residual is None before the first layer."""


class _Stage:
    """What a model asks its pipeline group for, while some of its pieces run."""

    def __init__(self, group: Any, first: bool, last: bool) -> None:
        self._group, self.is_first_rank, self.is_last_rank = group, first, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class ModelPieces:
    """The pieces of ``model``. Raises :class:`PatchError` for a model that SGLang cannot run in stages."""

    def __init__(self, model: Any) -> None:
        self._staged = [m for m in model.modules() if "pp_group" in m.__dict__]
        inner = [m for m in model.modules() if "start_layer" in m.__dict__ and hasattr(m, "layers")]
        if not self._staged or len(inner) != 1:
            raise refuse(
                f"layers of {type(model).__name__} in other engines: SGLang runs it as a whole only", "it as a whole"
            )
        self.model, self._inner = model, inner[0]
        self._group = self._staged[0].pp_group
        self._forward = model.forward
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around each run."""
        self.layers = len(self._inner.layers)
        self.count = self.layers + 2

    def run(self, first: int, end: int, state: State | None, ids: Any, positions: Any, batch: Any) -> Any:
        """Run pieces [first, end), at least one. ``state`` goes in unless ``first`` is 0; a state comes out, or
        SGLang's ``LogitsProcessorOutput`` when the head is among the pieces."""
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        proxy = None if state is None else PPProxyTensors({"hidden_states": state[0], "residual": state[1]})
        stage = _Stage(self._group, first == 0, end == self.count)
        before = self._inner.start_layer, self._inner.end_layer
        for module in self._staged:
            module.__dict__["pp_group"] = stage
        self._inner.start_layer, self._inner.end_layer = max(first - 1, 0), min(end - 1, self.layers)
        try:
            with self.computing():
                out = self._forward(ids, positions, batch, pp_proxy_tensors=proxy)
        finally:
            self._inner.start_layer, self._inner.end_layer = before
            for module in self._staged:
                module.__dict__["pp_group"] = self._group
        return (out["hidden_states"], out["residual"]) if isinstance(out, PPProxyTensors) else out

    def piece_of(self, name: str) -> int:
        """The piece that the parameter ``name`` belongs to."""
        return piece_of(name, self.layers)
