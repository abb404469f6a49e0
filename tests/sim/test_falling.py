"""benchmarks/sim/falling.py: rates at a target, bounds included."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "sim" / "falling.py"
SPEC = importlib.util.spec_from_file_location("falling", PATH)
assert SPEC is not None and SPEC.loader is not None
falling = importlib.util.module_from_spec(SPEC)
sys.modules["falling"] = falling
SPEC.loader.exec_module(falling)
Rate, falls_at, middle, spread = falling.Rate, falling.falls_at, falling.middle, falling.spread


def test_between_two_points_the_share_falls_with_the_logarithm() -> None:
    assert falls_at([(8.0, 1.0), (32.0, 0.98)], 0.99).value == pytest.approx(16.0)
    assert falls_at([(8.0, 1.0), (16.0, 0.99), (32.0, 0.5), (64.0, 1.0)], 0.99) == Rate(16.0)


def test_outside_of_the_rates_tried_there_is_a_bound() -> None:
    assert falls_at([(8.0, 0.9), (16.0, 1.0)], 0.99) == Rate(8.0, -1)
    assert falls_at([(8.0, 1.0), (16.0, 1.0)], 0.99) == Rate(16.0, 1)
    assert str(Rate(8.0, -1)) == "<8" and str(Rate(16.0, 1)) == ">16" and str(Rate(12.345)) == "12.3"


def test_ratios_of_bounds_stay_bounds_or_are_not_known() -> None:
    assert Rate(16.0).over(Rate(8.0)) == Rate(2.0)
    assert Rate(16.0, 1).over(Rate(8.0)) == Rate(2.0, 1)
    assert Rate(16.0).over(Rate(8.0, -1)) == Rate(2.0, 1)
    assert Rate(16.0, -1).over(Rate(8.0, 1)) == Rate(2.0, -1)
    assert math.isnan(Rate(16.0, 1).over(Rate(8.0, 1)).value)


def test_the_median_leaves_out_what_is_not_known() -> None:
    values = [Rate(3.0), Rate(math.nan), Rate(1.0), Rate(2.0, 1)]
    assert middle(values) == Rate(2.0, 1)
    assert spread(values) == ">2 (1 to 3)"
    assert spread([Rate(math.nan)]) == "not known"
