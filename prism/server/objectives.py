"""What a submission says of its model's objectives."""

from __future__ import annotations

from dataclasses import dataclass

from prism.config.sections.model import AdapterConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; ``late`` is ``serve`` or ``reject``."""

    slo_ttft_s: float
    slo_tpot_s: float
    max_wait_s: float
    late: str

    @classmethod
    def of(cls, model: ModelConfig | AdapterConfig) -> Objectives:
        return cls(float(model.slo.ttft_s), float(model.slo.tpot_s), float(model.max_wait_s), model.late.value)
