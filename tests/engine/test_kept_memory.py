"""What a step frees is there for the next one, without asking the kernel again."""

from __future__ import annotations

import subprocess
import sys

PIECE_BYTES = 16 << 20  # three of them: more than glibc keeps by itself, less than we have it keep
PAGES = 3 * PIECE_BYTES // 4096

FAULTS = f"""
import resource
from prism.engine.boot import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [b"x" * {PIECE_BYTES} for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
given_back = step()
keep_freed_memory()
step()
print(given_back, step())
"""


def test_activations_of_the_next_step_fault_no_page() -> None:
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, ran.stdout.split())
    assert given_back > PAGES // 4, "glibc keeps it by itself: nothing is tested"
    assert kept < PAGES // 100
