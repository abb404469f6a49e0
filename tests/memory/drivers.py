"""How the tests reach a device's memory byte for byte, and the fake CUDA driver's controls."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from prism import memory

HOST, FAKE, CUDA = "host", "fake-cuda", "cuda"
PAGES = 64
HOST_PAGE_BYTES = 65536
CUDA_PAGE_BYTES = 2 << 20


def build_fake(directory: Path) -> Path:
    """Compile the fake libcuda; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the fake libcuda with")
    out = directory / "libfakecuda.so"
    source = Path(__file__).with_name("fake_libcuda.c")
    command = [compiler, "-std=c11", "-O1", "-shared", "-fPIC", "-o", str(out), str(source), "-lpthread"]
    subprocess.run(command, check=True)
    return out


class FakeCuda:
    """Controls of ``fake_libcuda.c``; see there."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self._lib = ctypes.CDLL(str(library))
        self._lib.fake_physical_bytes.restype = ctypes.c_long
        self._lib.fake_calls.restype = ctypes.c_long
        self._lib.fake_last_broken_rule.restype = ctypes.c_char_p
        self._lib.fake_set_foreign.argtypes = [ctypes.c_size_t]
        self._lib.fake_reset.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._lib.fake_inject.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]

    def reset(self, granularity_bytes: int = HOST_PAGE_BYTES, total_bytes: int = 1 << 30) -> None:
        self._lib.fake_reset(granularity_bytes, total_bytes)

    def inject(self, call: str, nth: int, result: int, forever: bool = False) -> None:
        """The ``nth`` call of ``call`` ("" any) from now on gives ``result``."""
        self._lib.fake_inject(call.encode(), nth, result, int(forever))

    def reset_injection(self) -> None:
        self._lib.fake_inject(b"", -1, 0, 0)

    def pending(self) -> bool:
        """Whether an injected error has not happened yet."""
        return bool(self._lib.fake_pending_injection())

    def set_foreign(self, nbytes: int) -> None:
        """So much of the device is held by programs that are no owners."""
        self._lib.fake_set_foreign(nbytes)

    def set_devices(self, count: int, linked: bool) -> None:
        """So many GPUs; whether they may map each other's memory."""
        self._lib.fake_set_devices(count, int(linked))

    def set_capturing(self, on: bool) -> None:
        """While some thread captures a graph, calls of threads that have not relaxed their mode are errors."""
        self._lib.fake_set_capturing(int(on))

    def calls(self) -> int:
        return int(self._lib.fake_calls())

    def violations(self) -> int:
        return int(self._lib.fake_violations())

    def last_broken_rule(self) -> str:
        return bytes(self._lib.fake_last_broken_rule()).decode()

    def physical_bytes(self) -> int:
        return int(self._lib.fake_physical_bytes())

    def mappings(self) -> int:
        return int(self._lib.fake_mappings())

    def ranges(self) -> int:
        return int(self._lib.fake_ranges())

    def events(self) -> int:
        return int(self._lib.fake_events())

    def hold_streams(self, on: bool) -> None:
        """While held, what streams were given is in flight."""
        self._lib.fake_hold_streams(int(on))

    def set_noop(self, on: bool) -> None:
        self._lib.fake_set_noop(int(on))


@dataclass
class Bed:
    """A device under test and the means to read and write its memory."""

    kind: str
    device: memory.Device
    page_bytes: int

    @classmethod
    def open(cls, kind: str, directory: Path, library: Path | None) -> Bed:
        page = CUDA_PAGE_BYTES if kind == CUDA else HOST_PAGE_BYTES
        device = memory.open_device(
            "host:0" if kind == HOST else "cuda:0",
            PAGES * page,
            account_dir=directory,
            page_bytes=page,
            cuda_library=None if library is None else str(library),
        )
        return cls(kind, device, page)

    def layout(
        self, tokens_per_page: int = 16, order: memory.layout.Order = "token", layers: int = 2
    ) -> memory.KvLayout:
        """A layout of which so many tokens fill a page (token-major), whatever the page."""
        cell = self.page_bytes // tokens_per_page
        return memory.KvLayout(
            layers=layers, kv_heads=2, head_dim=cell // layers // 2 // 2 // 2, dtype_bytes=2, order=order
        )

    def write(self, address: int, data: bytes) -> None:
        """Put bytes into device memory."""
        if self.kind == CUDA:
            _check(_cuda().cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))
        else:
            ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Get bytes from device memory."""
        if self.kind != CUDA:
            return ctypes.string_at(address, nbytes)
        out = ctypes.create_string_buffer(nbytes)
        _check(_cuda().cuMemcpyDtoH_v2(out, ctypes.c_uint64(address), ctypes.c_size_t(nbytes)))
        return out.raw


@functools.cache
def why_no_gpu() -> str | None:
    """Why the tests of the real driver cannot run here; None if they can."""
    try:
        cuda = _cuda()
    except OSError as error:
        return f"no GPU: {error}"
    count = ctypes.c_int()
    result = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if result or not count.value:
        return f"no GPU: the CUDA driver says {result} and finds {count.value} devices"
    return None


def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    assert result == 0, f"CUDA driver result {result}"
