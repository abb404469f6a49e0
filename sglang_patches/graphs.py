"""CUDA graphs of decoding: a model serves without them at once, and they are captured when nobody waits.

Capturing takes seconds at every activation, a first token a fraction of one. Steps run eagerly until the engine has
nothing to do for a moment; one that never rests captures after some hundred steps, when the stall has been earned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from sglang_patches.hooks import Hook, HookKind

log = logging.getLogger(__name__)

EAGER_STEPS: Final = 500
"""Steps after which an engine that never rests captures. All ranks count alike."""


def put_off(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """Around ``capture_decode_graph`` as the construction calls it: on a GPU it is due later."""
    if model_runner.device != "cuda" or model_runner.is_draft_worker or model_runner.spec_algorithm.is_speculative():
        return original(model_runner=model_runner)
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import DecodeGraphCapture

    model_runner.prism_graphs_due = True
    return DecodeGraphCapture(runner=None, graph_mem_usage=0)


class Graphs:
    """The graphs of one model: a step that must go over :attr:`model.forward` runs without."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._put_away: tuple[Any, Any] | None = None

    def allow(self, allowed: bool) -> None:
        """Replay them from the next step on, or not."""
        runner = self._runner
        if allowed and self._put_away is not None:
            runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner = self._put_away
            self._put_away = None
        elif not allowed and self._put_away is None:
            self._put_away = runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner
            runner.decode_cuda_graph_runner = runner.prefill_cuda_graph_runner = None


def capture_due(scheduler: Any, idle: bool) -> None:
    """Capture what was put off, if now is the time: ``idle``, or after :data:`EAGER_STEPS`."""
    runner = scheduler.tp_worker.model_runner
    if not getattr(runner, "prism_graphs_due", False) or not (idle or scheduler.forward_ct >= EAGER_STEPS):
        return
    runner.prism_graphs_due = False
    torch.cuda.synchronize()  # what is captured shares its buffers with the steps before
    try:
        runner.init_decode_cuda_graph()
    except torch.OutOfMemoryError as error:
        if scheduler.ps.tp_size > 1:
            raise  # the other ranks wait in the capture
        runner.decode_cuda_graph_runner = None
        torch.cuda.empty_cache()
        log.warning("no memory for CUDA graphs, decoding goes on without: %s", error)


HOOKS = (
    Hook(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        HookKind.AROUND,
        put_off,
        ("model_runner",),
        "the first token does not wait for graphs",
    ),
)
