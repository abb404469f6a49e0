"""How long engines stood still for their neighbours in live runs (``policy: longest_pause``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import httpx
import msgspec

from benchmarks.slo.spec import RunSpec
from prism.obs.names import HELD_SECONDS

FILE = "held.json"


def held_s(url: str) -> float:
    """Engine seconds since the server began."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    return sum(float(value) for value in re.findall(rf"^{HELD_SECONDS.name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def note(folder: Path, seconds: float) -> None:
    """Engines stood still for so long in the run of ``folder``."""
    (folder / FILE).write_bytes(msgspec.json.encode(seconds))


def pauses(specs: Iterable[RunSpec], runs: Path) -> str:
    """A table over policies and rates of the runs under ``runs``; empty if nobody ever stood still."""
    found: dict[tuple[str, str], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for spec in specs:
        path = runs / spec.folder / FILE
        if spec.experiment == "rate" and path.exists():
            found[spec.trace, spec.label][spec.rate] += msgspec.json.decode(path.read_bytes(), type=float)
    found = {key: by_rate for key, by_rate in found.items() if any(by_rate.values())}
    if not found:
        return ""
    rates = sorted({rate for by_rate in found.values() for rate in by_rate})
    lines = ["| trace | policy | " + " | ".join(f"x{rate:g}" for rate in rates) + " |", "|---" * (2 + len(rates)) + "|"]
    for (trace, label), by_rate in sorted(found.items()):
        cells = [f"{by_rate[rate]:.1f}" if rate in by_rate else "-" for rate in rates]
        lines.append(f"| {trace} | {label} | " + " | ".join(cells) + " |")
    text = "Seconds for which engines stood still for their neighbours, all engines and repeats together."
    return "### Pauses\n\n" + "\n".join(lines) + f"\n\n{text}\n"
