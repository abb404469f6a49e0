"""What an engine worker has to do to SGLang's state of its process, before, after and at the end of one model."""

from __future__ import annotations

import os
from typing import Any

import torch

from prism import memory
from prism.engine.commands import ActivateModel


def prepare_ranks(command: ActivateModel) -> None:
    """What SGLang reads from the environment when an engine spans several processes of this machine."""
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = command.rendezvous
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(command.world))


def seat_pool(scheduler: Any) -> memory.Pool:
    """The KV pool under ``scheduler``."""
    pool: memory.Pool = scheduler.token_to_kv_pool_allocator.lease.pool
    return pool


def suspects_of(scheduler: Any) -> list[str]:
    """Requests of the batch that was being run when the loop failed."""
    batch = scheduler.cur_batch_for_debug
    return [] if batch is None else [req.rid for req in batch.reqs]


def release_scheduler(scheduler: Any) -> None:
    """End the threads and helpers a scheduler leaves behind when its loop is over, and its wish for memory."""
    scheduler.token_to_kv_pool_allocator.lease.withdraw_wish()
    scheduler.metrics_reporter._shutdown_fpm()
    backend = scheduler.grammar_manager.grammar_backend
    if backend is not None:
        backend.executor.shutdown(wait=False, cancel_futures=True)
    scheduler.release_host_resources()


def forget_globals() -> None:
    """Drop what SGLang keeps per process that belongs to one model. Rotary tables are cached by shape, and their
    tensors lie in the weight region that is about to go; inputs and outputs of graphs are kept for the next one."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_executor import input_buffers
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.runtime_context import Resources, get_context

    factory._ROPE_DICT.clear()
    input_buffers._forward_input_buffer_pool.clear()
    GraphSharedOutput._process_shared = None
    get_context().resources = Resources()


def finish_kernels(kind: str) -> None:
    """Wait for everything this process gave its GPU: memory that a kernel reads must not be unmapped."""
    if kind == "cuda":
        torch.cuda.synchronize()


def empty_torch_cache(kind: str) -> None:
    """Give back the device memory that torch keeps for later allocations of this process."""
    if kind == "cuda":
        torch.cuda.empty_cache()
