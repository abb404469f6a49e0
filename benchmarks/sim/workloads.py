"""Catalogs and workloads that the questions in this folder share. Everything is made from a seed; nothing is read from
outside the repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prism.core.specs import ModelSpec
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.models import known_spec
from prism.trace.generate import GeneratorSpec, generate, preset
from prism.trace.row import TraceRow
from prism.trace.steps import apply_steps

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

# The eight models that Prism's public prototype replays its Chatbot Arena sample onto, most popular first: the three of
# 8B have nine requests in ten (its table of base objectives says which model each is).
PROTOTYPE_8 = (
    ("meta-llama/Llama-3.1-8B-Instruct", 3, 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 1, 1),
    ("meta-llama/Llama-3.2-1B-Instruct", 4, 1),
)

# Weights take four fifths of two H100s.
LARGE_8 = (
    ("mistralai/Mistral-7B-Instruct-v0.3", 2, 1),
    ("Qwen/Qwen2.5-7B-Instruct", 2, 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 4, 1),
)

Mix = tuple[tuple[str, int, int], ...]


def catalog(
    mix: Mix, slo_ttft_s: float = 1.0, slo_tpot_s: float = 0.05, copies: int = 1, in_order: bool = False
) -> tuple[ModelSpec, ...]:
    """One entry per fine-tune of ``mix``, interleaved so that popularity (by position) is not tied to size;
    ``in_order``: as ``mix`` has them."""
    total = sum(count for _, count, _ in mix)
    slots: list[tuple[float, str, int]] = []
    for path, count, tp in mix:
        slots += [((i + 0.5) / count, path, tp) for i in range(count)]
    if not in_order:
        slots.sort(key=lambda slot: (slot[0], slot[1]))
    specs = []
    for copy in range(copies):
        for index, (_, path, tp) in enumerate(slots):
            name = f"model-{copy * total + index:0{len(str(copies * total - 1))}}"
            specs.append(known_spec(name, path, slo_ttft_s, slo_tpot_s, tp))
    return tuple(specs)


def h100_cluster(gpus: int, rates: Mapping[str, float] | None = None, **sections: object) -> Cluster:
    """``gpus`` H100s, eight to a node (fewer when there are fewer), linked as in the paper's test bed; ``rates`` in
    place of the modelled GPU's."""
    per_node, kind = min(8, gpus), {"gpu": "H100", "rates": dict(rates or {})}
    groups = [{**kind, "nodes": gpus // per_node, "gpus_per_node": per_node}]
    if gpus % per_node:
        groups.append({**kind, "nodes": 1, "gpus_per_node": gpus % per_node})
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


@dataclass(frozen=True)
class Setup:
    """Eight models on two H100s, what they are asked, and the engines' limit."""

    name: str
    mix: Mix
    in_order: bool = False
    lengths: str = "arena"
    max_running: int = 256
    base_rps: float = 4.0
    """Of the base trace, from which the objectives come and which is scaled to every rate."""
    rates: tuple[float, ...] = (3.0, 6.0, 9.0, 12.0, 18.0, 24.0, 32.0, 48.0, 72.0, 108.0)

    def models(self) -> tuple[ModelSpec, ...]:
        return catalog(self.mix, in_order=self.in_order)

    def cluster(
        self, gpus: int, memory: str | None = None, rates: Mapping[str, float] | None = None, **sections: object
    ) -> Cluster:
        """``gpus`` H100s on one node with these engines; ``memory`` of each, and ``rates``, instead of its own."""
        group = {"gpu": "H100", "gpus_per_node": gpus, "rates": dict(rates or {})}
        group |= {} if memory is None else {"memory": memory}
        engine = {"max_running": self.max_running}
        return parse_cluster({"groups": [group], "engine": engine, **sections}, self.name)

    def base_rows(self, work: Workload, draw: int) -> list[TraceRow]:
        """The base trace: draw number ``draw`` of ``work`` with these models and lengths."""
        return requests(replace(work.spec, lengths=self.lengths), self.models(), draw)


SETUPS = {
    setup.name: setup
    for setup in (
        # 1B to 8B of several families; weights take half of the memory
        Setup("mixed", SMALL_8),
        # As many running requests as SGLang allows by itself, so that memory decides how many there are
        Setup("prototype", PROTOTYPE_8, in_order=True, max_running=2048),
        # Conversations with their history: 0.3 GB of KV a request
        Setup(
            "memory-bound",
            LARGE_8,
            lengths="sharegpt",
            max_running=2048,
            base_rps=1.0,
            rates=(0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0),
        ),
    )
}


def scaled(rows: list[TraceRow], factor: float, seed: int) -> list[TraceRow]:
    """``factor`` times the requests of ``rows`` with the same pattern over time and models (the ``rate`` step)."""
    return rows if factor == 1.0 else list(apply_steps(rows, [{"step": "rate", "factor": factor, "seed": seed}]))
