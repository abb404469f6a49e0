"""How loaded devices are: what a shard more would add to each, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.work import ShardDemand, loads_with

demands = st.builds(ShardDemand, st.floats(0.0, 1.0), st.floats(0.0, 300.0), st.integers(10, 300))


def load(demands: list[ShardDemand], capacity: int = 1000) -> float:
    left = capacity - sum(d.weight_bytes for d in demands)
    if left <= 0:
        return float("inf")
    return sum(d.work for d in demands) ** 2 + (sum(d.kv_bytes for d in demands) / left) ** 2


@given(demands, st.lists(st.lists(demands, max_size=3), min_size=1, max_size=5))
def test_the_vector_says_what_each_device_says(demand: ShardDemand, devices: list[list[ShardDemand]]) -> None:
    found = loads_with(
        demand,
        np.array([sum(d.work for d in there) for there in devices]),
        np.array([sum(d.kv_bytes for d in there) for there in devices]),
        np.array([1000.0 - sum(d.weight_bytes for d in there) for there in devices]),
    )
    for there, grown in zip(devices, found, strict=True):
        then = load([*there, demand])
        assert grown == (pytest.approx(then - load(there), abs=1e-9) if then < float("inf") else float("inf"))
