"""Does a long trace stream in constant memory, and how fast are reading, writing, generating and describing it?

    python -m benchmarks.trace.streaming [--rows 100000,1000000]

Each step in a process of its own; its peak memory should not depend on the number of rows. The limit of reading is the
making of a Python object per row (about 0.4 us for the object alone).

Result: see docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = {
    "write parquet": "write_trace(path + '.parquet', rows(), TraceInfo())",
    "read parquet": "deque(open_trace(path + '.parquet').rows(), maxlen=0)",
    "write JSONL": "write_trace(path + '.jsonl', rows(), TraceInfo())",
    "read JSONL": "deque(open_trace(path + '.jsonl').rows(), maxlen=0)",
    "describe (stats)": "trace_stats(open_trace(path + '.parquet').rows())",
    "double the rate": "deque(change_rate(open_trace(path + '.parquet').rows(), 2.0, 0), maxlen=0)",
    "generate": "deque(islice(generate(replace(preset('novita'), duration_s=count / 6), 0), count), maxlen=0)",
}
PROGRAM = """
import resource, sys, time
from collections import deque
from dataclasses import replace
from itertools import islice
from prism.trace.files import open_trace, write_trace
from prism.trace.generate import generate, preset
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from prism.trace.stats import trace_stats
from prism.trace.transform import change_rate
path, count = sys.argv[1], int(sys.argv[2])
def rows():
    return (TraceRow(i * 0.01, f"model-{i % 8}", 1 + i % 900, 1 + i % 400) for i in range(count))
began = time.perf_counter()
STEP
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Speed and peak memory of streaming traces.")
    parser.add_argument("--rows", default="100000,1000000")
    counts = [int(part) for part in parser.parse_args().rows.split(",")]
    heads = " | ".join(f"{count:,} rows: rows/s, peak MiB" for count in counts)
    print(f"| step | {heads} |\n|---{'|---' * len(counts)}|")
    with tempfile.TemporaryDirectory() as folder:
        for name, step in STEPS.items():
            cells = [_run(step, Path(folder) / str(count), count) for count in counts]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _run(step: str, path: Path, count: int) -> str:
    command = [sys.executable, "-c", PROGRAM.replace("STEP", step), str(path), str(count)]
    seconds, peak = (float(part) for part in subprocess.run(command, capture_output=True, check=True).stdout.split())
    return f"{count / seconds:,.0f}, {peak:.0f}"


if __name__ == "__main__":
    main()
