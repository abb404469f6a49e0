"""PyPI's kvcached beside ours: the child process that benchmarks.memory.slots starts in the rival's own environment.

It is never imported by this project and needs nothing of it. The rival is made ready once, outside of the repository
(0.1.6 is built against torch and CUDA's headers; where there is no driver, rival_cuda.c stands in for it):

    python3 -m venv RIVAL && RIVAL/bin/pip install torch==2.13.0 setuptools wheel ninja numpy
    mkdir STUB && cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o STUB/libcuda.so benchmarks/memory/rival_cuda.c
    CUDA_HOME=/usr/local/cuda CPATH=/usr/local/cuda/include LIBRARY_PATH=STUB \
      RIVAL/bin/pip install kvcached==0.1.6 --no-build-isolation

Its tensors are of its `cpu` device, for which mapping a page makes no driver call: what is measured is its own code.
Arguments: bytes of a slot, and how many slots are in use from the start. Then, for each line `COUNT REPEAT` on the
standard input, a line with the mean microseconds of an alloc and free of COUNT slots.
"""

from __future__ import annotations

import sys
import time

PAGE_BYTES = 2 << 20
POOL_BYTES = 4 << 30


def make_manager(slot_bytes: int):  # type: ignore[no-untyped-def]
    from kvcached import vmm_ops
    from kvcached.kv_cache_manager import KVCacheManager

    vmm_ops.init_kvcached("cpu", PAGE_BYTES, True)
    tensors = vmm_ops.create_kv_tensors(POOL_BYTES, 2, "cpu", 1, 1, 0, False)
    manager = KVCacheManager(
        num_blocks=POOL_BYTES // slot_bytes,
        block_size=1,
        cell_size=slot_bytes,
        num_layers=1,
        num_kv_buffers=1,
        reserve_null_block=True,
    )
    manager.available_size()
    time.sleep(0.5)  # its thread reserves pages
    return manager, tensors


def main() -> None:
    manager, tensors = make_manager(int(sys.argv[1]))
    held = manager.alloc(int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        count, repeat = map(int, line.split())
        start = time.perf_counter()
        for _ in range(repeat):
            manager.free(manager.alloc(count))
        print((time.perf_counter() - start) / repeat * 1e6, flush=True)
    del held, tensors


if __name__ == "__main__":
    main()
