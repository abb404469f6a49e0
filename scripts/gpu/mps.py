"""Whether engines that share a GPU compute side by side: two processes of small kernels, without MPS and with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from scripts.gpu.run import Run

CONTROL = "nvidia-cuda-mps-control"
LOAD = """
import sys, time, torch
x = torch.randn(512, 512, dtype=torch.bfloat16, device="cuda")
def work(count):
    for _ in range(count):
        x @ x
    torch.cuda.synchronize()
work(1000)
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
work(40000)
print(time.perf_counter() - start, flush=True)
"""


def together_s(count: int, environ: Mapping[str, str]) -> float:
    """Seconds until ``count`` processes that start together have each done the same work."""
    command = [sys.executable, "-c", LOAD]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environ))
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"a process that computes ended with status {process.wait()}")
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in started)


def compare_with_mps(run: Run) -> None:
    """Readings: two processes against one, each way. Skips where there is no MPS."""
    run.remark(f"{CONTROL}: {shutil.which(CONTROL) or 'not on the path'}")
    run.needs_gpu()
    alone_s = together_s(1, os.environ)
    run.reading("two processes over one, in turns", together_s(2, os.environ) / alone_s, "x")
    if shutil.which(CONTROL) is None:
        run.skip(f"{CONTROL} is not installed here")
    with tempfile.TemporaryDirectory(prefix="prism-mps-") as folder:
        environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([CONTROL, "-d"], env=environ, check=True)
        try:
            alone_s = together_s(1, environ)
            run.reading("two processes over one, under MPS", together_s(2, environ) / alone_s, "x", goal=1.5)
        finally:
            subprocess.run([CONTROL], env=environ, input="quit\n", text=True, check=True)
