"""A multicast as operators see it: who sends to whom, and why so."""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.ids import ModelName
from prism.core.reasons import Number, Reason, ReasonCode, because
from prism.core.views import PlannedDecision
from prism.policy.multicast.planner import Plan


@dataclass(frozen=True, slots=True)
class SentWeights:
    """One multicast, for operators."""

    model: ModelName
    session: str
    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    reason: Reason
    """Who sends to whom, and what the planner expected of this and of the other ways."""

    def as_decision(self) -> PlannedDecision:
        """The line of ``prism plan``."""
        return PlannedDecision(self.model, "send", self.sources, self.receivers, self.reason)


def sent_weights(model: ModelName, session: str, chosen: Plan) -> SentWeights:
    """What ``chosen`` does for the model."""
    schedule = chosen.schedule
    numbers: dict[str, Number] = {
        "way": schedule.algorithm,
        "path": chosen.words(),
        "blocks": schedule.blocks,
        "expected_s": chosen.expected_s,
    }
    if chosen.left_out:
        numbers["sending"] = "+".join(chosen.left_out)
    for name, seconds in chosen.considered.items():
        if name != schedule.algorithm and seconds < float("inf"):
            numbers[f"{name}_s"] = seconds
    nodes = chosen.nodes
    reason = because(ReasonCode.MULTICAST, **numbers)
    return SentWeights(model, session, nodes[: schedule.sources], nodes[schedule.sources :], reason)
