"""State machines of pools over every driver; see pool_machine.py."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from prism import memory
from tests.memory.drivers import Bed
from tests.memory.pool_machine import PoolMachine

SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def run(bed: Bed, *shapes: memory.KvLayout) -> None:
    machine = type("Machine", (PoolMachine,), {"bed": bed, "shapes": shapes})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_token_major(bed: Bed) -> None:
    run(bed, bed.layout())


def test_layer_major_blocks_of_several_pages(bed: Bed) -> None:
    run(bed, bed.layout(order="layer", tokens_per_page=64))


def test_gaps_paged_slots_and_latent_rows(bed: Bed) -> None:
    odd = replace(bed.layout(), head_dim=bed.page_bytes // 16 // 8 - 4)
    latent = memory.KvLayout(layers=3, kv_heads=1, head_dim=bed.page_bytes // 192 - 2, v_head_dim=0)
    run(bed, odd, latent, replace(bed.layout(128), tokens_per_slot=4))


def test_models_follow_each_other_in_one_arena(bed: Bed) -> None:
    run(bed, bed.layout(), bed.layout(8), bed.layout(64, order="layer"), replace(bed.layout(), page_multiple=2))
