"""Refusals and failures of device memory, each with its numbers. csrc/kvcached raises these by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prism.core.errors import PrismError


class DeviceMemoryError(PrismError):
    """Base of everything ``prism.memory`` raises. ``numbers`` holds what the message is about, units in the names."""

    def __init__(self, message: str, numbers: Mapping[str, int] | None = None) -> None:
        self.numbers = dict(numbers or {})
        facts = ", ".join(f"{name}={value}" for name, value in self.numbers.items())
        super().__init__(f"{message} ({facts})" if facts else message)


class OutOfMemory(DeviceMemoryError):
    """Not enough bytes in the account, or at the driver if others use memory outside of it, or slots in the pool."""


class LimitExceeded(OutOfMemory):
    """The owner's own limit refuses the reservation; waiting for others does not help."""


class FloorUnavailable(DeviceMemoryError):
    """A floor cannot be guaranteed because others hold the memory."""


class OverRelease(DeviceMemoryError):
    """More was given back than was held."""


class DoubleFree(DeviceMemoryError):
    """A slot was freed that is not in use; nothing was freed."""


class ForeignSlot(DeviceMemoryError):
    """A slot was freed that this pool never hands out; nothing was freed."""


class BadLayout(DeviceMemoryError):
    """A KV layout with impossible sizes, or one that does not fit its arena."""


class BadRequest(DeviceMemoryError):
    """Any other argument out of range."""


class UnknownOwner(DeviceMemoryError):
    """The owner has left, was reaped, or never was."""


class TooManyOwners(DeviceMemoryError):
    """The account's table of owners is full."""


class AccountMismatch(DeviceMemoryError):
    """The account file is of another capacity or version, or not an account."""


class DriverUnavailable(DeviceMemoryError):
    """This machine has no usable driver for the device."""


class DriverFailed(DeviceMemoryError):
    """A driver call failed; the state before it was restored."""


class DeadDriver(DeviceMemoryError):
    """The driver is beyond recovery; this process must be replaced. Its memory returns to the account when it ends."""


class ClosedHandle(DeviceMemoryError):
    """Used after it was closed, after its arena was divided again, or in a child forked later."""


class SystemFailed(DeviceMemoryError):
    """The operating system refused; ``numbers["errno"]`` says why."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room: by our account, by the driver, or by torch."""
    return any(
        isinstance(one, OutOfMemory)
        or type(one).__name__ == "OutOfMemoryError"
        or "CUDA error: out of memory" in str(one)
        or "CUBLAS_STATUS_ALLOC_FAILED" in str(one)
        for one in causes(error)
    )
