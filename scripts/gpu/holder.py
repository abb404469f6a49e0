"""A process that holds a CUDA context and nothing else until its input ends: ``python -m scripts.gpu.holder LIBRARY
[--torch]``. With ``--torch`` it has run one matrix product, as every engine has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from scripts.gpu.driver import Driver


@contextmanager
def held(library: str, count: int, *, torch: bool = False) -> Iterator[None]:
    """``count`` holders stand while the block runs."""
    command = [sys.executable, "-m", "scripts.gpu.holder", library, *(["--torch"] if torch else [])]
    with ExitStack() as stack:
        holders = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(count)
        ]
        for holder in holders:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise RuntimeError(f"a process with a context ended with status {holder.wait()}")
        try:
            yield
        finally:
            for holder in holders:
                assert holder.stdin is not None
                holder.stdin.close()


def main() -> None:
    Driver(sys.argv[1])
    if "--torch" in sys.argv:
        import torch

        ones = torch.ones(512, 512, dtype=torch.bfloat16, device="cuda")
        (ones @ ones).sum().item()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
