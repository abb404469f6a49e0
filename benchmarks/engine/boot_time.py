"""What processor time does a machine's start take to import SGLang?

    python -m benchmarks.engine.boot_time [--rounds 3]

Each import runs in a process of its own, ways in turns: as it is; with the garbage collector at work meanwhile; with
the kernels for GPUs that virtual devices leave out; with both, as it was before. Medians of the processor's seconds.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PREPARED = {
    "as it is": "",
    "with the garbage collector": "boot.uncollected = contextlib.nullcontext",
    "with kernels for GPUs": "boot.GPU_MODULES = ()",
    "with both": "boot.uncollected = contextlib.nullcontext; boot.GPU_MODULES = ()",
}
CODE = """
import contextlib, resource
from prism.engine import boot
{prepared}
boot.boot("host")
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def imported_s(prepared: str) -> float:
    """Processor seconds of one import."""
    command = [sys.executable, "-c", CODE.format(prepared=prepared)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of importing SGLang.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {way: [] for way in PREPARED}
    for number in range(rounds):
        for way, prepared in PREPARED.items():
            found[way].append(imported_s(prepared))
            print(f"round {number + 1}: {way}: {found[way][-1]:.1f} s", file=sys.stderr)
    print("| import | processor time |\n|---|---|")
    for way, seconds in found.items():
        print(f"| {way} | {statistics.median(seconds):.1f} s |")


if __name__ == "__main__":
    main()
