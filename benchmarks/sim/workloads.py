"""Catalogs and workloads that the questions in this folder share. Everything is made from a seed; nothing is read from
outside the repository."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prism.core.specs import ModelSpec
from prism.sim.cluster_file import Cluster, parse_cluster
from prism.sim.models import known_spec
from prism.trace.generate import GeneratorSpec, generate, preset
from prism.trace.row import TraceRow

# The paper's Table 4 (its 58 models) is not in the copy at hand. This mix stands in for it: 1B to 70B, most of them
# small, as catalogs of providers are; the same base model appears several times as different fine-tunes do.
MIX_58 = (
    ("meta-llama/Llama-3.2-1B-Instruct", 8, 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 8, 1),
    ("Qwen/Qwen2.5-1.5B-Instruct", 4, 1),
    ("Qwen/Qwen2.5-3B-Instruct", 4, 1),
    ("Qwen/Qwen3-4B", 4, 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", 5, 1),
    ("Qwen/Qwen2.5-7B-Instruct", 5, 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 10, 1),
    ("google/gemma-2-9b-it", 2, 1),
    ("Qwen/Qwen2.5-14B-Instruct", 4, 1),
    ("Qwen/Qwen2.5-32B-Instruct", 2, 2),
    ("meta-llama/Llama-3.3-70B-Instruct", 2, 4),
)

SMALL_8 = (
    ("meta-llama/Llama-3.2-1B-Instruct", 2, 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 2, 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", 1, 1),
    ("Qwen/Qwen2.5-7B-Instruct", 1, 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 2, 1),
)

SMALL_18 = (
    ("meta-llama/Llama-3.2-1B-Instruct", 4, 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 4, 1),
    ("Qwen/Qwen2.5-3B-Instruct", 2, 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", 2, 1),
    ("Qwen/Qwen2.5-7B-Instruct", 2, 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 4, 1),
)

Mix = tuple[tuple[str, int, int], ...]


def catalog(mix: Mix, slo_ttft_s: float = 1.0, slo_tpot_s: float = 0.05, copies: int = 1) -> tuple[ModelSpec, ...]:
    """One entry per fine-tune of ``mix``, interleaved so that popularity (by position) is not tied to size."""
    total = sum(count for _, count, _ in mix)
    slots: list[tuple[float, str, int]] = []
    for path, count, tp in mix:
        slots += [((i + 0.5) / count, path, tp) for i in range(count)]
    slots.sort(key=lambda slot: (slot[0], slot[1]))
    specs = []
    for copy in range(copies):
        for index, (_, path, tp) in enumerate(slots):
            name = f"model-{copy * total + index:0{len(str(copies * total - 1))}}"
            specs.append(known_spec(name, path, slo_ttft_s, slo_tpot_s, tp))
    return tuple(specs)


def h100_cluster(gpus: int, **sections: object) -> Cluster:
    """``gpus`` H100s, eight to a node (fewer when there are fewer), linked as in the paper's test bed."""
    per_node = min(8, gpus)
    groups = [{"gpu": "H100", "nodes": gpus // per_node, "gpus_per_node": per_node}]
    if gpus % per_node:
        groups.append({"gpu": "H100", "nodes": 1, "gpus_per_node": gpus % per_node})
    return parse_cluster({"groups": groups, "network": {"nic_gbit": 100}, **sections}, "h100_cluster")


def requests(spec: GeneratorSpec, models: tuple[ModelSpec, ...], seed: int = 1) -> list[TraceRow]:
    """A generated trace over ``models`` in their order of popularity."""
    named = replace(spec, models=len(models), names=tuple(str(m.name) for m in models))
    return list(generate(named, seed))


@dataclass(frozen=True)
class Workload:
    """A named generator setting for a catalog."""

    name: str
    spec: GeneratorSpec


def hyperbolic(rate_rps: float, duration_s: float = 600.0) -> Workload:
    """Like the paper's Hyperbolic trace: one model dominates, bursts, frequent idle periods."""
    return Workload(
        "Hyperbolic-like", replace(preset("hyperbolic"), rate_rps=rate_rps, duration_s=duration_s, zipf=1.2)
    )


def arena(rate_rps: float, duration_s: float = 600.0) -> Workload:
    """Like the paper's Arena-Chat trace: less skewed, longer idle periods."""
    return Workload("Arena-like", replace(preset("arena"), rate_rps=rate_rps, duration_s=duration_s))


def preload(policy: str) -> float:
    """Prism starts as a system that has run for a while; fixed maps load at the start anyway, qlm holds one model."""
    return 0.75 if policy == "prism" else 0.0
