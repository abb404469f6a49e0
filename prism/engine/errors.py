"""Errors of the engine pool."""

from __future__ import annotations

from enum import StrEnum

from prism.core.errors import PrismError


class ActivationCause(StrEnum):
    """Why a model did not become ready. The caller decides by it whether trying again makes sense."""

    MISSING = "missing"
    """No such folder, or files of the model are absent. Not worth retrying."""
    CORRUPT = "corrupt_weights"
    """Configuration or weights cannot be read or do not fit each other. Not worth retrying."""
    UNSUPPORTED = "unsupported"
    """An architecture or option whose memory layout Prism does not manage. Not worth retrying."""
    TOO_LARGE = "too_large"
    """The weights alone exceed the device's whole memory. Not worth retrying on this device."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device has not enough free memory now. Worth retrying after an eviction."""
    TIMEOUT = "timeout"
    ENGINE_DIED = "engine_died"
    """The worker process ended during activation (its replacement is on its way)."""
    INTERNAL = "internal"


class CannotActivate(PrismError):
    """A model could not be made ready; nothing of it is left on the devices.

    ``cause`` says why; ``model``, ``devices`` and ``detail`` name it.
    """

    def __init__(self, model: str, devices: tuple[str, ...], cause: ActivationCause, detail: str) -> None:
        self.model, self.devices, self.cause, self.detail = model, devices, cause, detail
        super().__init__(f"cannot activate {model} on {', '.join(devices)}: {cause.value}: {detail}")


class EngineSetupError(PrismError):
    """This machine or installation cannot run engines: a wrong version, no C compiler, a hook whose target changed."""


class NoSeat(EngineSetupError):
    """The device has as many engines as it may. The scheduler counts them; it is told when its count was wrong."""


class EngineGone(PrismError):
    """The engine handle was used after its engine died or was deactivated."""


class OrderRefused(PrismError):
    """The engine did not do what it was told; the text says why. ``whole_only``: the model's layers cannot run in other
    engines at all, so that it refuses every such order."""

    def __init__(self, why: str, whole_only: bool = False) -> None:
        super().__init__(why)
        self.whole_only = whole_only
