"""Who is compared: Prism, its ablations and its rivals, each with the settings its paper has."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from prism.core.settings import (
    EvictionOrder,
    KvprMode,
    LiveMode,
    MigrationTest,
    Overload,
    Placement,
    PolicyName,
    PolicySettings,
)
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.expected import expect, expecting
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.row import TraceRow

PRISM: Final = "prism"
ALONE: Final = "prism, one instance"
"""Prism as its paper has it in this: no model has more than one instance."""
UNTOLD: Final = "prism, told nothing"
"""Prism that is not told the trace's mean rates and lengths, as it and the fixed maps are otherwise."""
MOST: Final = "prism, most served"
"""Prism with ``overload: most_served``."""
EVERYBODY: Final = "prism, everybody"
"""Prism with ``overload: everybody``: no model is turned away."""
NO_PAUSES: Final = "prism, no pauses"
"""Prism with ``longest_pause: 0s``: no engine stands still for its neighbours."""
OVERLOAD: Final = {EVERYBODY: Overload.EVERYBODY, MOST: Overload.MOST_SERVED}
LIVE: Final = {f"prism, {mode.value}": mode for mode in LiveMode}
"""Prism with ``live_scaling.mode`` so, whatever its default is."""
RIVALS: Final = ("muxserve", "static", "serverlessllm", "qlm")
POLICIES: Final = (PRISM, UNTOLD, *RIVALS)
HELP: Final = (
    f"separated by +; of {', '.join(map(repr, (PRISM, UNTOLD, ALONE, EVERYBODY, MOST, NO_PAUSES, *LIVE, *RIVALS)))}"
)
"""Of an option that names some of them."""
PAPER: Final[dict[str, dict[str, object]]] = {
    "paper's KVPR": {"placement": Placement.KVPR, "kvpr": KvprMode.PAPER},
    "paper's migration": {"migration": MigrationTest.PAPER},
    "paper's eviction": {"eviction": EvictionOrder.PAPER},
    "paper's three": {
        "placement": Placement.KVPR,
        "kvpr": KvprMode.PAPER,
        "migration": MigrationTest.PAPER,
        "eviction": EvictionOrder.PAPER,
    },
}
"""Prism with the paper's rules in place of ours."""


def settings(who: str, rows: list[TraceRow]) -> PolicySettings:
    """The settings of one of the names in this module, or of a policy. Everybody knows the trace's means who has a use
    for them."""
    found = _settings(who)
    return expecting(found, expect(rows)) if found.cluster.policy is PolicyName.PRISM and who != UNTOLD else found


def _settings(who: str) -> PolicySettings:
    if who in PAPER:
        return _changed(PolicySettings.named(PRISM), PAPER[who])
    if who == ALONE:
        return _changed(PolicySettings.named(PRISM), {"max_replicas": 1})
    if who in OVERLOAD:
        return _changed(PolicySettings.named(PRISM), {"overload": OVERLOAD[who]})
    if who == NO_PAUSES:
        prism = PolicySettings.named(PRISM)
        return replace(prism, gpu=replace(prism.gpu, longest_pause_s=0.0))
    if who in LIVE:
        return _changed(PolicySettings.named(PRISM), {"live": LIVE[who]})
    return PolicySettings.named(PRISM if who == UNTOLD else who)


def _changed(base: PolicySettings, changes: dict[str, object]) -> PolicySettings:
    return replace(base, cluster=replace(base.cluster, **changes))  # type: ignore[arg-type]


def run(
    who: str, cluster: Cluster, models: tuple[ModelSpec, ...], rows: list[TraceRow], *, cold: bool = False
) -> SimResult:
    """One simulation; all start alike, with what fits loaded or (``cold``) with nothing."""
    spec = SimSpec(cluster, models, settings(who, rows), lambda: rows, preload_share=1.0, cold=cold)
    return simulate(spec)
