"""How many streaming requests per second does one core send on time, and how wrong is the TTFT it measures?

    python -m benchmarks.trace.sender_rate [--rates 1000,2000,3000,4000] [--seconds 10] [--tokens 16]

The real sender process on one core replays Poisson arrivals to the null server on the other. Sent late is measured at
the sender; its TTFT is compared request by request with what the server saw (request read to first token written).
Needed: 2,000 requests/s with a send-time error P99 under 10 ms.

Result: see docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.trace.null import null_server, pinned
from prism.trace.files import write_trace
from prism.trace.replay.output import read_records
from prism.trace.replay.plan import PromptSource, SendPlan
from prism.trace.report import Distribution
from prism.trace.report_build import distribution
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

MODELS = [f"m{i}" for i in range(8)]


def arrivals(rate: float, seconds: float, prompt: int, tokens: int) -> Iterator[TraceRow]:
    rng, at_s = random.Random(0), 0.0
    while at_s < seconds:
        yield TraceRow(at_s, rng.choice(MODELS), prompt, tokens)
        at_s += rng.expovariate(rate)


def measure(rate: float, options: argparse.Namespace, folder: Path) -> str:
    """One line of the table."""
    trace, log, out = folder / "t.parquet", folder / "server.log", folder / "out.jsonl"
    sent = write_trace(trace, arrivals(rate, options.seconds, options.prompt, options.tokens), TraceInfo())
    out.unlink(missing_ok=True)
    with null_server(options.ttft_ms, options.tpot_ms, log) as url:
        plan = SendPlan(
            trace=str(trace), trace_sha256="", steps=[], block_tokens=512, url=url, endpoint="completions",
            models={m: m for m in MODELS}, prompts={m: PromptSource() for m in MODELS}, objectives={}, timeout_s=60.0,
        )  # fmt: skip
        cpu_s = _send(plan, folder, out)
        time.sleep(0.7)  # the server writes its log twice a second
    records = list(read_records(out))
    seen = {int(name.rpartition("-")[2]): float(first) - float(got) for name, got, first, _ in _lines(log)}
    wrong = [r.ttft_s - seen[r.row] for r in records if r.ttft_s is not None and r.row in seen]
    failed = sum(bool(r.error) for r in records)
    rest = " | ".join((_ms(distribution([r.lag_s for r in records])), _ms(distribution(wrong))))
    return f"| {rate:,.0f} | {sent:,} | {failed} | {1e6 * cpu_s / sent:.0f} us | {rest} |"


def _send(plan: SendPlan, folder: Path, out: Path) -> float:
    """Run the sender on the first core; returns the CPU seconds it took, its start included."""

    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    command = [*pinned(0), sys.executable, "-m", "prism.trace.replay.sender", str(folder / "plan.json"), str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        for _ in process.stdout:
            pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _lines(log: Path) -> Iterator[list[str]]:
    return (line.split() for line in log.read_text().splitlines())


def _ms(values: Distribution | None) -> str:
    return "-" if values is None else " / ".join(f"{1000 * values.at(p):.2f}" for p in (50.0, 99.0, 99.9, 100.0))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Send-time error and TTFT error of the replayer.")
    parser.add_argument("--rates", default="1000,2000,3000,4000")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--tpot-ms", type=float, default=5.0)
    options = parser.parse_args()
    print(f"{options.tokens} tokens per answer, {options.tpot_ms:g} ms apart; prompts of {options.prompt} tokens\n")
    print(
        "| requests/s | sent | failed | sender CPU per request | late, ms: P50 / P99 / P99.9 / most | TTFT error, ms |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for rate in (float(part) for part in options.rates.split(",")):
            print(measure(rate, options, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
