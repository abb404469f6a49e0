"""The CUDA driver's virtual memory calls one by one, for timing them apart from Prism: ``libcuda.so.1`` or the tests'
stand-in of host memory (``tests/memory/fake_libcuda.c``)."""

from __future__ import annotations

import ctypes
from typing import Final

MIB: Final = 1 << 20
_PINNED, _DEVICE, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3


class DriverError(RuntimeError):
    """A call's result, by number."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """GPU 0's primary context, current in this thread from now on."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._lib = ctypes.CDLL(library)
        self.is_fake = hasattr(self._lib, "fake_reset")
        if self.is_fake:
            self._lib.fake_reset(ctypes.c_size_t(2 * MIB), ctypes.c_size_t(1 << 30))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def granularity_bytes(self) -> int:
        """The smallest page."""
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(False)), 0)
        return found.value

    def free_bytes(self) -> int:
        """What the driver calls free now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def reserve(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            _size(nbytes),
            _size(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        return address.value

    def free_address(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), _size(nbytes))

    def create(self, nbytes: int, *, export: bool = False) -> int:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), _size(nbytes), ctypes.byref(_properties(export)), ctypes.c_uint64(0)
        )
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        zero = _size(0)
        self._call(
            "cuMemMap", ctypes.c_uint64(address), _size(nbytes), zero, ctypes.c_uint64(handle), ctypes.c_uint64(0)
        )

    def allow(self, address: int, nbytes: int) -> None:
        """Read and write for GPU 0."""
        access = _Access(_Location(_DEVICE, 0), _READ_WRITE)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), _size(nbytes), ctypes.byref(access), _size(1))

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), _size(nbytes))

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Every byte becomes ``value``; done on return."""
        if self.is_fake:
            ctypes.memset(address, value, nbytes)
            return
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), _size(nbytes))
        self._call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        if self.is_fake:
            return ctypes.string_at(address, nbytes)
        out = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), _size(nbytes))
        return out.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._lib, name)(*arguments)
        if result:
            raise DriverError(f"{name} gave {result}")


def _size(nbytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(nbytes)


def _properties(export: bool) -> _Properties:
    return _Properties(_PINNED, _FILE_DESCRIPTOR if export else 0, _Location(_DEVICE, 0))
