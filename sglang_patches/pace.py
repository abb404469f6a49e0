"""Layers take the declared time of the virtual device that runs them.

Around the stack of decoder layers of a model, by torch's own hooks: whoever runs some of them, the engine for itself, a
leader its stop of a route or a part of a prefill, a peer for a leader, calls this stack, where others stand for layers
that do not run now (:mod:`sglang_patches.remote_pieces`), and leaves it by an exception if the last does not.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from prism.core.pace import LayerWork
from sglang_patches.kv_guard import UnsupportedModel


class StepPace(Protocol):
    """A device's (:class:`prism.engine.device_clock.DeviceClock`)."""

    def begin(self, work: LayerWork, shards: int = 1) -> float: ...
    def end(self, done_s: float) -> None: ...


class _PacedStack:
    """The hooks of one stack."""

    def __init__(self, stack: Any, pace: StepPace, shards: int) -> None:
        self._stack, self._pace, self._shards = stack, pace, shards
        self._done_s = 0.0

    def before(self, stack: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        batch = next(found for found in (*args, *named.values()) if hasattr(found, "forward_mode"))
        self._done_s = self._pace.begin(layer_work(batch, _layers_run(stack)), self._shards)

    def after(self, *_: Any) -> None:
        self._pace.end(self._done_s)


def _layers_run(stack: Any) -> int:
    return sum(getattr(layer, "prism_runs", True) for layer in stack.layers)


def layer_work(batch: Any, layers: int) -> LayerWork:
    """What SGLang's ``batch`` is to so many layers. One that prefills and decodes at once is a prefill; of batches that
    share a pass (:mod:`sglang_patches.remote_passes`) each is what it is, and their weights are read once."""
    parts = [part for part in getattr(batch, "prism_parts", (batch,)) if not part.forward_mode.is_idle()]
    decoding = [part for part in parts if part.forward_mode.is_decode()]
    return LayerWork(
        layers=layers if parts else 0,
        prefill_tokens=sum(len(part.input_ids) for part in parts if not part.forward_mode.is_decode()),
        sequences=sum(int(part.batch_size) for part in decoding),
        kv_tokens=sum(int(part.seq_lens.sum()) for part in decoding),
    )


def pace_layers(scheduler: Any, pace: StepPace, shards: int) -> None:
    """From now on the layers of the scheduler's model take their time; once is enough for its life. Raises
    :class:`UnsupportedModel` for one whose layers are not found, or that another model guesses for."""
    if scheduler.draft_worker is not None:
        raise UnsupportedModel("a model that guesses for another has no declared time: no speculation on paced devices")
    model = scheduler.tp_worker.model_runner.model
    stacks = [m for m in model.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList)]
    stacks = [stack for stack in stacks if _attends(stack)]
    if len(stacks) != 1:
        raise UnsupportedModel(f"layers of {type(model).__name__} are in {len(stacks)} stacks: no paced device runs it")
    (stack,) = stacks
    if "prism_paced" not in stack.__dict__:
        hooks = _PacedStack(stack, pace, shards)
        stack.register_forward_pre_hook(hooks.before, with_kwargs=True)
        stack.register_forward_hook(hooks.after, always_call=True)
        stack.__dict__["prism_paced"] = hooks


def _attends(stack: Any) -> bool:
    """Whether these are decoder layers, and not those of a vision tower."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return any(isinstance(module, RadixAttention) for module in stack.layers.modules())
