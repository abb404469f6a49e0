"""What the modelled GPU takes and holds, and that every assumption is a setting."""

from __future__ import annotations

import pytest

from prism.config.errors import CatalogError
from prism.core.ids import DeviceId
from prism.sim.cluster_file import parse_cluster
from prism.sim.gpus import RATES, gpu, with_rates
from prism.sim.models import known_spec
from prism.sim.roofline import head_flops, layer_flops_per_token, step_cost
from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, run

ONE_B, EIGHT_B, SEVENTY_B = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
)
GB = 10**9


def test_a_prompt_pays_the_head_once() -> None:
    """For its last token; a fifth of a 1B model's work would be charged for nothing else."""
    spec = known_spec("m", ONE_B, 1.0, 1.0)
    cost = step_cost(spec, gpu("H100"))
    one, two = (cost.prefill(tokens, 0.0, 0, 1)[0] for tokens in (4000, 8000))
    assert (two - one) / 4000 == pytest.approx(layer_flops_per_token(spec.shape) / (989.4e12 * 0.55))
    assert head_flops(spec.shape) > 0.2 * layer_flops_per_token(spec.shape)
    more = cost.prefill(4000, 0.0, 0, 2)[0] - one
    assert more == pytest.approx(cost.sequence_s + cost.head_s)


def test_keys_and_values_are_read_more_slowly_than_weights() -> None:
    kind, spec = gpu("H100"), known_spec("m", EIGHT_B, 1.0, 1.0)
    cost = step_cost(spec, kind)
    reached = spec.shape.kv_bytes_per_token / cost.kv_token_s / kind.memory_bytes_per_s
    assert reached == pytest.approx(kind.kv_efficiency)
    assert reached < spec.weight_bytes / cost.weights_s / kind.memory_bytes_per_s


@pytest.mark.parametrize(
    ("path", "tp", "low_ms", "high_ms"),
    # docs/sim.md has the figures: one H100 with 8B in 16 bits, and 35 GB of weights on each of several.
    [(EIGHT_B, 1, 6.5, 9.5), (SEVENTY_B, 4, 18.0, 22.0)],
)
def test_a_lone_token_takes_what_is_published(path: str, tp: int, low_ms: float, high_ms: float) -> None:
    step_s = step_cost(known_spec("m", path, 1.0, 1.0, tp), gpu("H100")).decode(1, 500)[0].first_s
    assert low_ms < 1e3 * step_s < high_ms


def test_prefill_of_8b_on_an_h100_is_between_what_is_published() -> None:
    assert 25_000 < step_cost(known_spec("m", EIGHT_B, 1.0, 1.0), gpu("H100")).prefill_tokens_per_s(2048) < 37_000


def test_an_engine_takes_memory_beside_weights_and_kv() -> None:
    """18 models of 1B and 3B do not fit where their weights alone would, and the scheduler knows."""
    specs = tuple(known_spec(f"m{i}", ONE_B, 60.0, 1.0) for i in range(4))
    rows = [TraceRow(float(i), f"m{i}", 10, 5) for i in range(4)]
    room = "12GiB"  # four times 2.5 GB of weights, not four engines
    for process_bytes, loaded in ((0.0, 4), (1.2e9, 3)):
        group = {"gpu": "H100", "gpus_per_node": 1, "memory": room, "rates": {"process_bytes": process_bytes}}
        result, log = run(parse_cluster({"groups": [group]}, "test"), specs, rows, preload_share=1.0)
        early = [line for line in log if line["do"] == "Activate" and float(str(line["at_s"])) < 30.0]
        assert len(early) == loaded
        device = result.world.devices[DeviceId("node0/cuda:0")]
        books = result.world.control.scheduler.books.fleet
        held = sum(shard.weight_bytes for shard in device.shards.values())
        assert books.board.capacity[0] - books.board.shared[0] == held
        assert held >= len(device.shards) * (2.4 * GB + process_bytes)


def test_parked_engines_take_memory_where_models_are_loaded_on_demand() -> None:
    sizes = {}
    for policy in ("prism", "qlm", "muxserve"):
        spec = known_spec("m", ONE_B, 60.0, 1.0)
        result, _ = run(h100s(1), (spec,), [TraceRow(0.0, "m", 10, 5)], policy)
        sizes[policy] = next(iter(result.world.devices.values())).spec.memory_bytes
    assert sizes["prism"] == sizes["qlm"] == sizes["muxserve"] - int(gpu("H100").parked_bytes)


def test_every_rate_is_a_setting_of_the_cluster() -> None:
    assert {"compute_efficiency", "kv_efficiency", "allreduce_s", "process_bytes", "step_overhead_s"} <= set(RATES)
    slow = {"compute_efficiency": 0.275}
    assert with_rates(gpu("H100"), slow).compute_efficiency == 0.275
    spec, rows = known_spec("m", EIGHT_B, 60.0, 1.0), [TraceRow(0.0, "m", 8000, 1)]
    times = []
    for rates in ({}, slow):
        cluster = parse_cluster({"groups": [{"gpu": "H100", "gpus_per_node": 1, "rates": rates}]}, "test")
        result, _ = run(cluster, (spec,), rows, preload_share=1.0)
        times.append(result.world.recorder.records[0].ttft_s or 0.0)
    assert times[1] > 1.8 * times[0]
    with pytest.raises(CatalogError, match=r"speed.*is no rate of a GPU.*compute_efficiency"):
        parse_cluster({"groups": [{"gpu": "H100", "rates": {"speed": 2.0}}]}, "test")
