"""Small fleets and traces for the simulator's tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from prism.core.ids import ModelName
from prism.core.settings import PolicySettings
from prism.core.specs import ModelShape, ModelSpec
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.models import known_spec
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.row import TraceRow

TINY = ModelShape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=1024, vocab=8000)


def tiny_spec(name: str, weight_mb: int = 200, slo_ttft_s: float = 0.5, **more: object) -> ModelSpec:
    return ModelSpec(ModelName(name), "tiny", slo_ttft_s, 0.05, weight_mb << 20, TINY, 8192, **more)  # type: ignore[arg-type]


def h100s(gpus: int = 2, nodes: int = 1, **sections: object) -> Cluster:
    """With ``memory``: so much for weights and KV, engines' processes take none of it."""
    memory = sections.pop("memory", None)
    group: dict[str, object] = {"gpu": "H100", "nodes": nodes, "gpus_per_node": gpus}
    if memory:
        group |= {"memory": memory, "rates": {"process_bytes": 0.0, "parked_bytes": 0.0}}
    return parse_cluster({"groups": [group], **sections}, "test")


def llamas(count: int) -> tuple[ModelSpec, ...]:
    paths = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    return tuple(known_spec(f"m{i}", paths[i % 3], 0.5, 0.05) for i in range(count))


def random_rows(
    models: Iterable[str], seed: int, count: int, span_s: float, prompt: int = 2000, output: int = 200, blocks: int = 0
) -> list[TraceRow]:
    """Poisson-like arrivals over ``models``; with ``blocks`` every prompt begins with some of so many shared blocks."""
    rng, names = random.Random(seed), list(models)
    rows = []
    for at_s in sorted(rng.uniform(0, span_s) for _ in range(count)):
        tokens = rng.randint(1, prompt)
        family = rng.randrange(3)
        hashes = tuple(family * 1000 + i for i in range(rng.randint(0, blocks))) if blocks else ()
        rows.append(TraceRow(at_s, names[rng.randrange(len(names))], tokens, rng.randint(1, output), None, hashes))
    return rows


def run(
    cluster: Cluster, models: tuple[ModelSpec, ...], rows: list[TraceRow], policy: str = "prism", **more: object
) -> tuple[SimResult, list[dict[str, object]]]:
    """The result and the decision log as parsed JSON."""
    lines: list[str] = []
    spec = SimSpec(cluster, models, PolicySettings.named(policy), lambda: rows, **more)  # type: ignore[arg-type]
    return simulate(spec, lines.append), [json.loads(line) for line in lines]
