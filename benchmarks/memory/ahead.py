"""Does mapping ahead pay in an engine whose lease grows, and what does an idle one hold?

    python -m benchmarks.memory.ahead

An engine's own lease and placement of slots (sglang_patches/kv_lease.py, kv_placement.py) under a pretended scheduler,
on host memory in pages of 2 MiB (16 tokens of Llama-8B). From rest, a request of 96 tokens arrives every 8 steps until
16 run; all decode 160 tokens, so that nearly every step needs new pages. The model's computation is 20 ms of sleep
(a GPU, or another core) or of work on one core, beside which the helper thread maps.

Shown, with and without mapping ahead: the part of a step that memory takes (the lease and all slots), for steps that
decode and for those that begin a prompt; whole steps; CPU time of a run; and what is mapped and leased once the engine
rests. Ways take turns; figures are medians over rounds.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.memory.bench import GIB, LLAMA_8B, MIB, report, temporary_device
from prism import memory
from sglang_patches.kv_group_lease import GroupLease
from sglang_patches.kv_lease import KvLease
from sglang_patches.kv_placement import SlotPlacement

ROUNDS = 5
REQUESTS, EVERY_STEPS = 16, 8
PROMPT, ANSWER = 96, 160
COMPUTE_S = 0.02
MAX_TOKENS = 8192


class OnDemandLease(KvLease):
    """The engine's lease as it was: pages are mapped by the step that needs them."""

    def _map_ahead(self, tokens: Sequence[int]) -> None:
        pass


class Engine:
    """As much of SGLang's scheduler as the lease looks at; every waiting request begins with the next step."""

    def __init__(self, owner: memory.Owner, lease: type[KvLease]) -> None:
        self.pool = owner.arena(8 * GIB).divide(LLAMA_8B, MAX_TOKENS, lease_bytes=0)
        seat: Any = SimpleNamespace(owner=owner, world=1)
        group = memory.KvGroup(memory.GroupKind.TOKENS, self.pool, MAX_TOKENS)
        self.lease, self.placement = lease([GroupLease(group)], seat), SlotPlacement(self.pool)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.max_running_requests, self.chunked_prefill_size = REQUESTS, 2048
        self.new_token_ratio_tracker = SimpleNamespace(current=0.7)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.waiting_queue: list[Any] = []
        self.slots: dict[int, list[np.ndarray]] = {}

    def arrive(self, row: int) -> None:
        self.waiting_queue.append(
            SimpleNamespace(
                rid=str(row),
                row=row,
                origin_input_ids=[0] * PROMPT,
                output_ids=[],
                prefix_indices=[],
                sampling_params=SimpleNamespace(max_new_tokens=ANSWER),
                finished=lambda: False,
            )
        )

    def step(self) -> bool:
        """Memory's part of one step; whether it began a prompt."""
        self.lease.before_step(self)
        if self.waiting_queue:
            request = self.waiting_queue.pop(0)
            with self.placement.prompts([PROMPT]):
                self.slots[request.row] = [self.placement.take(PROMPT)]
            self.placement.remember(np.array([request.row]), REQUESTS)
            self.running_batch.reqs.append(request)
            return True
        requests = self.running_batch.reqs
        with self.placement.steps(np.array([r.row for r in requests])):
            taken = self.placement.take(len(requests))
        for request, slot in zip(requests, taken, strict=True):
            request.output_ids.append(0)
            self.slots[request.row].append(slot[None])
        return False

    def end_finished(self) -> None:
        for request in [r for r in self.running_batch.reqs if len(r.output_ids) >= ANSWER]:
            self.running_batch.reqs.remove(request)
            self.pool.free(np.concatenate(self.slots.pop(request.row)))


def busy() -> None:
    end_s = time.perf_counter() + COMPUTE_S
    matrix = np.ones((64, 64), dtype=np.float32)
    while time.perf_counter() < end_s:
        matrix @ matrix


COMPUTE: dict[str, Callable[[], None]] = {"elsewhere": lambda: time.sleep(COMPUTE_S), "on a core": busy}


def run(lease: type[KvLease], compute: Callable[[], None]) -> dict[str, float]:
    """One engine's life, in the units of the names."""
    decode_us: list[float] = []
    prompt_us: list[float] = []
    step_ms: list[float] = []
    held_mib: list[float] = []
    with temporary_device(4 * GIB) as device, device.register("bench") as owner:
        engine = Engine(owner, lease)
        cpu_s, arrived, steps = time.process_time(), 0, 0
        while arrived < REQUESTS or engine.running_batch.reqs:
            if arrived < REQUESTS and steps % EVERY_STEPS == 0:
                engine.arrive(arrived)
                arrived += 1
            start_s = time.perf_counter()
            prompt = engine.step()
            memory_s = time.perf_counter()
            compute()
            (prompt_us if prompt else decode_us).append((memory_s - start_s) * 1e6)
            step_ms.append((time.perf_counter() - start_s) * 1e3)
            held_mib.append(engine.pool.stats()["mapped_bytes"] / MIB)
            engine.end_finished()
            steps += 1
        cpu_s = time.process_time() - cpu_s
        engine.lease.rest(engine)
        engine.pool.quiesce()
        idle = engine.pool.stats()
        assert owner.spare_bytes == 0
    return {
        "decode step, memory p50 us": float(np.percentile(decode_us, 50)),
        "decode step, memory p99 us": float(np.percentile(decode_us, 99)),
        "decode step, memory max us": max(decode_us),
        "step with a prompt, memory p50 us": float(np.percentile(prompt_us, 50)),
        "whole step, mean ms": float(np.mean(step_ms)),
        "whole step, p99 ms": float(np.percentile(step_ms, 99)),
        "CPU time of the run s": cpu_s,
        "mapped at most MiB": max(held_mib),
        "idle: mapped MiB": idle["mapped_bytes"] / MIB,
        "idle: leased MiB": idle["lease_bytes"] / MIB,
    }


def main() -> None:
    ways: dict[str, type[KvLease]] = {"on demand": OnDemandLease, "ahead": KvLease}
    for where, compute in COMPUTE.items():
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS):
            for way, lease in ways.items():
                for what, value in run(lease, compute).items():
                    found[what, way].append(value)
        print(f"the model computes {where}")
        for (what, way), values in found.items():
            what, unit = what.rsplit(" ", 1)
            report(f"  {what}: {way}", float(np.median(values)), unit)


if __name__ == "__main__":
    main()
