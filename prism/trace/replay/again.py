"""Plans of earlier runs: to go on with one that was interrupted, or to repeat one from its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from prism.core.errors import InvalidValue
from prism.trace.convert import sha256_of
from prism.trace.replay.plan import SendPlan
from prism.trace.report import read_report

_MAY_DIFFER: Final = frozenset(("trace", "url", "timeout_s", "most_connections", "prompts"))
"""Fields in which a plan that is gone on with may differ from the one that is asked for. Prompts are kept: asked again,
a server may count differently."""


def kept_plan(folder: Path) -> SendPlan:
    """The plan of the replay in ``folder``. Raises :class:`InvalidValue` when there is none."""
    path = folder / "plan.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=SendPlan)
    except (OSError, msgspec.DecodeError) as exc:
        raise InvalidValue("resume", str(path), f"is no plan to go on with: {exc}") from exc


def reported_plan(path: Path) -> SendPlan:
    """The plan of the run whose ``report.json`` is ``path``. Raises :class:`InvalidValue` when it has none."""
    try:
        return msgspec.convert(read_report(path).settings.get("plan"), SendPlan)
    except (OSError, msgspec.ValidationError) as exc:
        raise InvalidValue("repeat", str(path), f"is no report of a replay: {exc}") from exc


def with_trace(plan: SendPlan, trace: Path) -> SendPlan:
    """``plan`` with its trace in the file ``trace``. Raises :class:`InvalidValue` when that is another trace."""
    found = sha256_of(trace) if trace.is_file() else "no file"
    if found != plan.trace_sha256:
        raise InvalidValue(
            "trace", str(trace), f"is not the trace of that run ({plan.trace_sha256[:12]}...): {found[:12]}"
        )
    return msgspec.structs.replace(plan, trace=str(trace.resolve()))


def differences(old: SendPlan, new: SendPlan) -> list[str]:
    """In which of the settings that decide what is sent, when, and how it is judged the two differ."""
    a, b = _compared(old), _compared(new)
    return sorted(name for name in a if a[name] != b[name])


def _compared(plan: SendPlan) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(plan)
    return {name: value for name, value in found.items() if name not in _MAY_DIFFER}
