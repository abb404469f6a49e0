"""What a trace asks of its models, as a planner with foresight would know it: rates and lengths in the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from prism.core.settings import PolicySettings
from prism.trace.row import TraceRow


@dataclass(frozen=True)
class Expected:
    """By model; one that is not there is asked nothing."""

    rates: dict[str, float] = field(default_factory=dict)
    """Requests/s over the trace's span."""
    prompt_tokens: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, float] = field(default_factory=dict)


def expect(rows: Iterable[TraceRow], default_tokens: tuple[int, int] = (512, 128)) -> Expected:
    """The means of ``rows``. ``default_tokens``: prompt and answer of rows that do not say."""
    counts: dict[str, int] = {}
    prompts: dict[str, int] = {}
    outputs: dict[str, int] = {}
    last_s = 0.0
    for row in rows:
        name = row.model
        counts[name] = counts.get(name, 0) + 1
        prompts[name] = prompts.get(name, 0) + (row.prompt_tokens or default_tokens[0])
        outputs[name] = outputs.get(name, 0) + (row.output_tokens or default_tokens[1])
        last_s = row.arrival_s
    span_s = max(last_s, 1.0)
    return Expected(
        {name: count / span_s for name, count in counts.items()},
        {name: prompts[name] / count for name, count in counts.items()},
        {name: outputs[name] / count for name, count in counts.items()},
    )


def foresighted(settings: PolicySettings, expected: Callable[[], Expected]) -> PolicySettings:
    """``settings`` with the loads that fixed maps are made for, unless the catalog says what it expects."""
    if not settings.cluster.policy.has_fixed_map or settings.cluster.expected_rates:
        return settings
    return expecting(settings, expected())


def expecting(settings: PolicySettings, expected: Expected) -> PolicySettings:
    """``settings`` that expect this."""
    cluster = replace(
        settings.cluster,
        expected_rates=tuple(sorted(expected.rates.items())),
        expected_prompt_tokens=tuple(sorted(expected.prompt_tokens.items())),
        expected_output_tokens=tuple(sorted(expected.output_tokens.items())),
    )
    return replace(settings, cluster=cluster)
