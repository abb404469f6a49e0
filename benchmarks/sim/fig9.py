"""Figure 9: how long does it take to activate a model, and what does each optimisation give?

From link rates alone: weights in host memory of a node of eight H100s, nothing else running. Steps: a new engine
process and copies tensor by tensor from pageable memory (naive); a pooled engine; a pipelined copy through the GPU's
own PCIe link; all PCIe links of the node in parallel, gathered over NVLink. "Engine" times are those of the cluster
file's defaults (docs/sim.md says where they come from).

    python -m benchmarks.sim.fig9

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt

from benchmarks.sim.plots import save
from benchmarks.sim.workloads import h100_cluster
from prism.core.settings import PolicySettings
from prism.sim.models import known_spec
from prism.sim.run import SimSpec, simulate
from prism.trace.row import TraceRow

MODELS = (
    ("meta-llama/Llama-3.2-1B-Instruct", 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 1),
    ("Qwen/Qwen2.5-14B-Instruct", 1),
    ("meta-llama/Llama-3.3-70B-Instruct", 8),
)
STEPS = (
    ("naive", False, "naive"),
    ("+ engine pool", True, "naive"),
    ("+ pipelined copy", True, "single"),
    ("+ parallel over the node", True, "parallel"),
)
PAPER_S = {"1B": 0.7, "3B": 0.7, "8B": 0.7, "14B": 1.3, "70B": 1.5}
"""With everything on; the paper says "within 0.7 s" for 1B to 8B and 4.8 to 7.1 times faster than naive loading."""


def activation_s(path: str, tp: int, pool: bool, mode: str) -> float:
    """Seconds from the command to the first request it could take."""
    model = known_spec("m", path, 60.0, 1.0, tp)
    settings = PolicySettings.named("prism")
    settings = replace(settings, cluster=replace(settings.cluster, engine_pool=pool))
    rows = [TraceRow(0.0, "m", 32, 1)]
    result = simulate(SimSpec(h100_cluster(8, load={"mode": mode}), (model,), settings, lambda: rows))
    return result.stats.activation_s[0]


def main() -> None:
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    print(f"{'model':6s}" + "".join(f"{name:>27s}" for name, _, _ in STEPS) + f"{'paper':>8s}")
    for index, (path, tp) in enumerate(MODELS):
        size = path.split("-")[-2 if "Instruct" in path else -1]
        times = [activation_s(path, tp, pool, mode) for _, pool, mode in STEPS]
        axis.bar(
            [index + 0.2 * k for k in range(len(times))],
            times,
            width=0.18,
            color=["#999", "#2980b9", "#27ae60", "#c0392b"],
        )
        axis.text(index + 0.6, times[-1] * 1.1, f"{times[-1]:.2f}", ha="center", fontsize=8)
        print(f"{size:6s}" + "".join(f"{t:27.2f}" for t in times) + f"{PAPER_S[size]:8.1f}")
    axis.set(yscale="log", ylabel="seconds", title="activation (left to right: naive, pool, pipelined, parallel)")
    axis.set_xticks(
        [i + 0.3 for i in range(len(MODELS))], [p.split("/")[1] + (f" TP{t}" if t > 1 else "") for p, t in MODELS]
    )
    axis.tick_params(axis="x", labelsize=7)
    print(save(figure, "fig9"))


if __name__ == "__main__":
    main()
