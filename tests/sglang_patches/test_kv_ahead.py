"""What the simulator says an engine has mapped is what a real lease maps, step by step: pages of next steps and of
whole answers, which stay until the engine rests."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from prism import memory
from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.sim.account import Account
from prism.sim.engine import Engine as SimEngine
from prism.sim.engine import Phase
from prism.sim.gpus import gpu
from prism.sim.intake import RATIO_LEAST, RATIO_START, RATIO_STEP, EngineLimits
from prism.sim.job import Job
from prism.sim.kv import KvMemory
from prism.sim.queue import EventQueue
from prism.sim.roofline import step_cost
from prism.sim.sharing import Pool
from tests.sglang_patches.test_kv_lease import BLOCK, PAGE, PAGES, Engine, request
from tests.sim.helpers import tiny_spec

LIMITS = EngineLimits(chunk_tokens=512, max_running=32, fast=False)


class Live(Engine):
    """Steps as SGLang does: whoever waits is let in, else all make a token; answers have their whole length."""

    def step(self) -> None:
        ratio = self.new_token_ratio_tracker
        if not self.waiting_queue and not self.running_batch.reqs:
            self.lease.rest(self)
            ratio.current = RATIO_START
            return
        self.lease.before_step(self)
        entering, self.waiting_queue = self.waiting_queue, []
        self.slots += [self.pool.alloc(len(req.origin_input_ids)) for req in entering]
        self.running_batch.reqs += entering
        if not entering:
            ratio.current = max(RATIO_LEAST, ratio.current - RATIO_STEP)
            self.slots = [np.append(slots, self.pool.alloc(1)) for slots in self.slots]
        for req in entering or self.running_batch.reqs:
            req.output_ids.append(0)

    def leave(self) -> None:
        """Who has its whole answer gives its slots back."""
        for i in reversed(range(len(self.slots))):
            req = self.running_batch.reqs[i]
            if len(req.output_ids) == req.sampling_params.max_new_tokens:
                self.pool.free(self.slots.pop(i))
                self.running_batch.reqs.pop(i)

    def mapped_pages(self) -> int:
        self.pool.quiesce()
        return int(self.pool.stats()["mapped_bytes"]) // PAGE


class Nobody:
    def first_token(self, engine: SimEngine, job: Job) -> None:
        pass

    finished = first_token

    def stepped(self, engine: SimEngine) -> None:
        pass


def simulated() -> tuple[SimEngine, EventQueue]:
    queue, kind = EventQueue(), gpu("H100")
    kv = KvMemory([Account(queue, PAGES * PAGE, PAGE)], PAGE // BLOCK, 16)
    cost = step_cost(tiny_spec("m"), kind)
    key = InstanceKey(ModelName("m"), 0)
    return SimEngine(queue, key, cost, kv, (Pool(1.0),), LIMITS, Nobody(), lambda: PAGES * BLOCK), queue


@pytest.mark.parametrize("seed", range(6))
def test_the_simulator_maps_what_a_real_lease_maps(seed: int, tmp_path: Path) -> None:
    device = memory.open_device("host:0", PAGES * PAGE, account_dir=tmp_path, page_bytes=PAGE)
    live, rng = Live(device, "live"), random.Random(seed)
    live.new_token_ratio_tracker.current = RATIO_START
    sim, queue = simulated()
    seen, apart = set(), 0
    for step in range(300):
        idle = sim.phase is Phase.IDLE
        if rng.random() < 0.06 and len(live.running_batch.reqs) < 3:
            prompt, answer = rng.randint(1, 2 * BLOCK), rng.randint(2, BLOCK)
            live.waiting_queue.append(request(prompt, answer))
            sim.submit(Job(step, tiny_spec("m"), 0.0, prompt, answer))
        if not idle:
            queue.run_until(queue.next_s() or 0.0)
        live.leave()
        live.step()
        pages = live.mapped_pages()
        off = abs(sim.kv.mapped_bytes() // PAGE - pages)
        assert off <= 1, f"step {step}"
        apart += off
        seen.add(pages)
    assert apart <= 1, "only where rounding the sum of the answers differs from the sum of the rounded ones"
    assert len(seen) > 3
