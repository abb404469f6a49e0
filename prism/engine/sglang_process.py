"""What an engine worker has to do to SGLang's state of its process, before, after and at the end of one model."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from prism.engine.commands import ActivateModel


def prepare_ranks(command: ActivateModel) -> None:
    """What SGLang reads from the environment when an engine spans several processes of this machine."""
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = command.rendezvous
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(command.world))


def open_gpu(index: int) -> None:
    """What this process allocates without naming a GPU lies on its own; and what costs seconds the first time is done
    while nobody waits: sampling with seeds is compiled, for one row and for several."""
    from sglang.srt.layers.sampler import multinomial_with_seed

    torch.cuda.set_device(index)
    for rows in (1, 2):
        seeds, positions = (torch.ones(rows, dtype=torch.int64, device="cuda") for _ in range(2))
        multinomial_with_seed(torch.zeros((rows, 4096), device="cuda"), seeds, positions)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def platform_of(kind: str, gpu_index: int) -> str:
    """What kernels, and with them the layout of quantised weights, are chosen by."""
    if kind != "cuda":
        return kind
    major, minor = torch.cuda.get_device_capability(gpu_index)
    return f"{kind} sm_{major}{minor}"


def suspects_of(scheduler: Any) -> list[str]:
    """Requests of the step that was being run when the loop failed. With overlap also those of the two started last: a
    GPU reports the fault of one while the next is under way."""
    batch = scheduler.cur_batch_for_debug
    found = {} if batch is None else {req.rid: None for req in batch.reqs}
    started = [entry for entry in getattr(scheduler, "batch_record_buf", ()) if entry is not None]
    for began, fields, *_ in started:
        # As they were then: the batch itself has lost and gained requests since.
        reqs = dict(zip((field.name for field in dataclasses.fields(began)), fields, strict=True))["reqs"]
        found |= {req.rid: None for req in reqs if not req.finished()}
    return list(found)


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


def torch_bytes(kind: str) -> int:
    """Device memory that torch holds in this process."""
    return int(torch.cuda.memory_reserved()) if kind == "cuda" else 0


def empty_torch_cache(kind: str) -> None:
    """Give back the device memory that torch keeps for later allocations of this process."""
    if kind == "cuda":
        torch.cuda.empty_cache()
