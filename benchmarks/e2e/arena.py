"""Question: does the Arena trace get all its answers from eight models on two devices that hold four of them?

    python -m benchmarks.e2e.arena [--trace FILE] [--seconds 600] [--out FOLDER]

A trace of eight models at its own times and output lengths, sent with ``prism replay`` through the public API to real
engines; prompts are cut where prompt and output would not fit the smallest demo model's context. ``--trace`` names the
recorded one (754 requests in ten minutes; ``traces/README.md`` says where it is), else its generated likeness in
``traces/`` is used. Prints one JSON line and fails unless every request ended with its full answer; results in
docs/results/e2e.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.demo_models import kept_models
from prism.trace.files import open_trace
from prism.trace.report import Report, read_report
from prism.trace.steps import count_models
from tests.e2e.server import DEMOS, REPO, catalog, start

LIKENESS = REPO / "traces" / "arena-like-8m-10min.parquet"
MEMORY_MIB = 40
"""Per device: two of the demo models with some KV."""
CONTEXT_TOKENS = 1000
"""A little under the smallest context of the demo models, which is 1,024."""


def fleet(trace: Path) -> dict[str, Any]:
    """The trace's models, which are the three demo models in turn, on two devices that hold four."""
    models = kept_models()
    names = sorted(count_models(open_trace(trace).rows()))
    config = catalog(models, memory=f"{MEMORY_MIB}MiB")
    config["models"] = [{"name": name, "path": str(models / demo)} for name, demo in zip(names, cycle(DEMOS))]
    config["policy"] = {"min_residency": "500ms", "min_kv_tokens": CONTEXT_TOKENS}
    return config


def replay(trace: Path, seconds: float, out: Path) -> tuple[Report, Counter[str]]:
    """The report, and the scheduler's decisions by kind."""
    server = start(out / "server", fleet(trace))
    try:
        key = (server.state / "admin.key").read_text().strip()
        command = [
            sys.executable, "-m", "prism.cli.main", "replay", str(trace), "--url", server.url, "--key", key,
            "--catalog", str(out / "server" / "catalog.yaml"), "--window", f"0:{seconds:g}",
            "--most-total", str(CONTEXT_TOKENS), "--out", str(out / "replay"), "--title", "The Arena trace",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr)
        decisions = Counter(json.loads(line)["do"] for line in (server.state / "logs/decisions.jsonl").open())
    finally:
        server.stop()
    return read_report(out / "replay" / "report.json"), decisions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=LIKENESS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="keep records, report and page here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prism-arena-") as folder:
        report, decisions = replay(options.trace.resolve(), options.seconds, options.out or Path(folder))
    every = report.all
    assert every.ttft_s is not None, "nothing was answered"
    result = {
        "trace": options.trace.name,
        "seconds": options.seconds,
        "requests": every.attainment.requests,
        "errors": every.errors,
        "output_tokens": every.output_tokens,
        "ttft_s": {f"p{p:g}": round(every.ttft_s.at(p), 3) for p in (50.0, 95.0, 99.0)},
        "ttft_p50_s": {m.name: round(m.ttft_s.at(50.0), 3) for m in report.models if m.ttft_s is not None},
        "attainment": {"ttft": every.attainment.ttft, "tpot": every.attainment.tpot},
        "decisions": dict(decisions),
    }
    print(json.dumps(result))
    sys.exit(bool(every.errors))


if __name__ == "__main__":
    main()
