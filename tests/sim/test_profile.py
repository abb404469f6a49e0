"""Profiles of one model: rate, memory that is left, swap space of bursts; where they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prism.config.profiles import Profile, ProfileStore
from prism.core.errors import InvalidValue
from prism.core.specs import DeviceKind
from prism.policy.device_time import Batch, alone_s
from prism.sim.gpus import gpu
from prism.sim.models import known_spec
from prism.sim.profile import BURSTS, STEP_RPS, ProfileSpec, profile
from prism.sim.roofline import step_cost

LLAMA_1B = known_spec("small", "meta-llama/Llama-3.2-1B-Instruct", 1.0, 0.1)
QUESTION = ProfileSpec(LLAMA_1B, gpu="A100-40G", seconds=20.0, most_rps=8.0)


@pytest.fixture(scope="module")
def small() -> Profile:
    return profile(QUESTION)


def test_a_small_model_carries_the_most_that_is_tried_and_leaves_memory(small: Profile) -> None:
    assert small.rate_rps == 8.0
    assert 20 << 30 < small.free_bytes < (40 << 30) - LLAMA_1B.weight_bytes
    assert set(small.swap_bytes) == set(BURSTS)
    assert small.need(1, 3, 10 << 30).spare_bytes == small.free_bytes


def test_tighter_objectives_carry_less_and_are_asked_anew(small: Profile) -> None:
    hopeless = profile(replace(QUESTION, model=replace(LLAMA_1B, slo_tpot_s=1e-6)))
    assert hopeless.rate_rps == 0.0
    tight = profile(replace(QUESTION, gpu="cpu", model=replace(LLAMA_1B, weight_bytes=64 << 20), most_rps=2 * STEP_RPS))
    assert tight.rate_rps < small.rate_rps


def test_a_large_model_borrows_for_bursts() -> None:
    tight = known_spec("large", "Qwen/Qwen2.5-14B-Instruct", 5.0, 0.3)
    found = profile(ProfileSpec(tight, gpu="A100-40G", seconds=30.0, most_rps=4.0))
    assert found.swap_bytes[2] <= found.swap_bytes[3] <= found.swap_bytes[5]
    assert found.swap_bytes[5] > 0
    assert found.need(1, 5, 10 << 30).spare_bytes == -found.swap_bytes[5]


def test_a_model_that_fits_on_no_device_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a shard of big has"):
        profile(ProfileSpec(known_spec("big", "meta-llama/Llama-3.3-70B-Instruct", 1.0, 0.1)))


def test_the_store_answers_the_same_question_only(small: Profile, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles.json")
    store.put(small)
    again = ProfileStore(tmp_path / "profiles.json")
    assert again.find(LLAMA_1B, "A100-40G", "sharegpt", 0.99) == small
    assert again.find(replace(LLAMA_1B, slo_ttft_s=2.0), "A100-40G", "sharegpt", 0.99) is None
    assert again.find(LLAMA_1B, "H100", "sharegpt", 0.99) is None
    again.put(small.of("other"))
    assert ProfileStore(tmp_path / "profiles.json").find(LLAMA_1B, "A100-40G", "sharegpt", 0.99) == small


def test_schedulers_start_from_the_profile_made_last(small: Profile, tmp_path: Path) -> None:
    found = small.for_schedulers()
    assert found is not None and found.kind is DeviceKind.CUDA and found.burst_bytes == small.burst_bytes[2] > 0
    cost = step_cost(LLAMA_1B, gpu("A100-40G"))
    for running in (8, 16):
        batch = Batch(LLAMA_1B.weight_bytes, running * 500 * LLAMA_1B.shape.kv_bytes_per_token, running)
        assert alone_s(found.rates, batch) == pytest.approx(cost.decode(running, running * 500)[0].first_s, rel=0.1)
    store = ProfileStore(tmp_path / "profiles.json")
    assert store.profiled(LLAMA_1B) == LLAMA_1B
    slower = msgspec.structs.replace(small, gpu="A100", bytes_per_s=1e9)
    for made in (small, slower):
        store.put(made)
    store = ProfileStore(store.file)
    assert store.profiled(LLAMA_1B) == replace(LLAMA_1B, profile=slower.for_schedulers())
    assert store.profiled(LLAMA_1B, {"A100-40G", "H100"}) == replace(LLAMA_1B, profile=found)
    assert store.profiled(LLAMA_1B, {"H100"}) == LLAMA_1B
    assert store.profiled(replace(LLAMA_1B, slo_tpot_s=9.0)).profile is None
    store.put(small)
    assert store.profiled(LLAMA_1B).profile == found, "made again"
    store.put(msgspec.structs.replace(small, bytes_per_s=0.0))
    assert store.profiled(LLAMA_1B).profile is None, "of a version that wrote no times"


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "profiles.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"profiles\.json"):
        ProfileStore(tmp_path / "profiles.json")
