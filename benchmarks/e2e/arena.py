"""Question: does the Arena trace get all its answers from eight models on two devices that hold four of them, and what
does it gain from KV that outlives its engine?

    python -m benchmarks.e2e.arena [--trace FILE] [--seconds 600] [--keep on|off|both] [--out FOLDER]

A trace of eight models at its own times and output lengths, sent with ``prism replay`` through the public API to real
engines; prompts are cut where prompt and output would not fit the smallest demo model's context. ``--trace`` names the
recorded one (754 requests in ten minutes; ``traces/README.md`` says where it is), else its generated likeness in
``traces/`` is used. With ``--keep both`` the same is sent twice, without ``kv.keep`` and with it. Prints one JSON line
for each way and fails unless every request ended with its full answer and no device ever had more physical memory than
its cap, by the kernel's count. *Recomputed* are the tokens that engines prefilled beyond the prompts' own: of requests
that lost their KV. Results in docs/results/e2e.md and aqua.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from benchmarks.demo_models import kept_models
from benchmarks.e2e.soak import settled_bytes
from prism.trace.files import open_trace
from prism.trace.report import Report, read_report
from prism.trace.steps import count_models
from tests.e2e.server import DEMOS, REPO, Server, catalog, start

LIKENESS = REPO / "traces" / "arena-like-8m-10min.parquet"
MEMORY_MIB = 40
"""Per device: two of the demo models with some KV."""
CONTEXT_TOKENS = 1000
"""A little under the smallest context of the demo models, which is 1,024."""


@dataclass(frozen=True)
class ArenaRun:
    """What came of one replay."""

    report: Report
    decisions: Counter[str]
    """The scheduler's, by kind."""
    counted: dict[str, int]
    """Counters of all processes at the end, summed over models and devices."""
    peak_bytes: dict[str, int]
    """By device: the most physical memory that was seen at a moment."""


COUNTERS = ("prompt_tokens", "cached_tokens", "computed_tokens", "kv_brought_tokens", "retractions", "requests_resumed")


def fleet(trace: Path, keep: bool) -> dict[str, Any]:
    """The trace's models, which are the three demo models in turn, on two devices that hold four."""
    models = kept_models()
    names = sorted(count_models(open_trace(trace).rows()))
    config = catalog(models, memory=f"{MEMORY_MIB}MiB")
    config["models"] = [{"name": name, "path": str(models / demo)} for name, demo in zip(names, cycle(DEMOS))]
    config["policy"] = {"min_residency": "500ms", "min_kv_tokens": CONTEXT_TOKENS}
    config["kv"] = {"keep": keep}
    return config


def replay(trace: Path, seconds: float, out: Path, keep: bool) -> ArenaRun:
    server = start(out / "server", fleet(trace, keep))
    try:
        key = (server.state / "admin.key").read_text().strip()
        command = [
            sys.executable, "-m", "prism.cli.main", "replay", str(trace), "--url", server.url, "--key", key,
            "--catalog", str(out / "server" / "catalog.yaml"), "--window", f"0:{seconds:g}",
            "--most-total", str(CONTEXT_TOKENS), "--out", str(out / "replay"), "--title", "The Arena trace",
        ]  # fmt: skip
        with watched_memory(server) as peak_bytes:
            subprocess.run(command, check=True, stdout=sys.stderr)
        decisions = Counter(json.loads(line)["do"] for line in (server.state / "logs/decisions.jsonl").open())
        counted = counters(server)
    finally:
        server.stop()
    return ArenaRun(read_report(out / "replay" / "report.json"), decisions, counted, dict(peak_bytes))


@contextmanager
def watched_memory(server: Server) -> Iterator[Counter[str]]:
    """The highest count of each device's physical memory while it is open, looked at twice a second."""
    peak: Counter[str] = Counter()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            for device, size in settled_bytes(server).items():
                peak[device] = max(peak[device], size)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def counters(server: Server) -> dict[str, int]:
    text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    return {
        name: round(sum(map(float, re.findall(rf"^prism_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))))
        for name in COUNTERS
    }


def summary(run: ArenaRun, keep: bool) -> dict[str, Any]:
    every, counted = run.report.all, run.counted
    assert every.ttft_s is not None, "nothing was answered"
    own = counted["prompt_tokens"] - counted["cached_tokens"]
    return {
        "keep": keep,
        "requests": every.attainment.requests,
        "errors": every.errors,
        "output_tokens": every.output_tokens,
        "ttft_s": {f"p{p:g}": round(every.ttft_s.at(p), 3) for p in (50.0, 95.0, 99.0)},
        "ttft_p50_s": {m.name: round(m.ttft_s.at(50.0), 3) for m in run.report.models if m.ttft_s is not None},
        "attainment": {"ttft": every.attainment.ttft, "tpot": every.attainment.tpot, "both": every.attainment.both},
        "recomputed_tokens": max(0, counted["computed_tokens"] - own),
        **counted,
        "peak_physical_mib": {device: size >> 20 for device, size in sorted(run.peak_bytes.items())},
        "cap_mib": MEMORY_MIB,
        "decisions": dict(run.decisions),
    }


WAYS = {"on": (True,), "off": (False,), "both": (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=LIKENESS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--keep", choices=tuple(WAYS), default="on", help="keep KV outside of engines")
    parser.add_argument("--out", type=Path, help="keep records, report and page here")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="prism-arena-") as folder:
        for keep in WAYS[options.keep]:
            out = (options.out or Path(folder)) / ("keep" if keep else "plain")
            run = replay(options.trace.resolve(), options.seconds, out, keep)
            shown = {"trace": options.trace.name, "seconds": options.seconds, **summary(run, keep)}
            print(json.dumps(shown), flush=True)
            over = [device for device, size in run.peak_bytes.items() if size > MEMORY_MIB << 20]
            failed = failed or bool(run.report.all.errors or over)
    sys.exit(failed)


if __name__ == "__main__":
    main()
