"""What a decode step costs on a device, given all that is busy there: a roofline whose constants are learned online.

A step of one engine reads its weights and the keys and values of everything it runs, and takes some time of the host
beside that. Engines on one device share its bandwidth, so that each is as many times slower as their shares add up to
more than the device has::

    alone    = step + sequence * batch + (weights + KV) / bandwidth
    share    = (weights + KV) / bandwidth / alone             of the device's bandwidth, while it steps
    together = alone * max(1, sum of the shares of all that step)

The constants begin as the model's profile has them (:mod:`prism.policy.profiles`), else as a guess for the kind of
device. What is seen of a model on a device over what is said corrects
both, so that a model that is slower than its bytes say, or a device that is, is known after a few answers.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from prism.core.specs import DeviceKind, DeviceRates

GUESSES: Final[dict[DeviceKind, DeviceRates]] = {
    DeviceKind.CUDA: DeviceRates(2.5e-3, 1e-5, 2.2e12),
    DeviceKind.HOST: DeviceRates(2e-3, 3e-4, 1.2e10),
}
"""Where learning begins. CUDA: between an A100 and an H100 (their data sheets' bandwidth, four fifths of it)."""


class Batch(NamedTuple):
    """What one engine's decode steps work on, on one of its devices."""

    weight_bytes: int
    kv_bytes: int
    """Of its running requests."""
    sequences: int


def alone_s(rates: DeviceRates, batch: Batch) -> float:
    """Seconds of one decode step that has the device to itself."""
    reading_s = (batch.weight_bytes + batch.kv_bytes) / rates.bytes_per_s
    return rates.step_s + rates.sequence_s * batch.sequences + reading_s


def bandwidth_share(rates: DeviceRates, batch: Batch) -> float:
    """Share (0..1) of the device's bandwidth that the engine takes while it steps alone."""
    reading_s = (batch.weight_bytes + batch.kv_bytes) / rates.bytes_per_s
    return reading_s / (rates.step_s + rates.sequence_s * batch.sequences + reading_s)


def step_of(rates: DeviceRates, nbytes: float, sequences: int) -> tuple[float, float]:
    """:func:`alone_s` and :func:`bandwidth_share` of an engine whose steps read ``nbytes``, for those who ask both."""
    reading_s = nbytes / rates.bytes_per_s
    step_s = rates.step_s + rates.sequence_s * sequences + reading_s
    return step_s, reading_s / step_s


def slowdown(shares: float) -> float:
    """How many times longer than alone steps take where the shares of all that step add up to ``shares``."""
    return max(1.0, shares)


def room_within(rates: DeviceRates, weight_bytes: int, kv_bytes_per_request: float, token_s: float) -> float:
    """How many such requests an engine can run, alone on its device, with steps of ``token_s`` at most; 0 when not even
    an empty step is so short."""
    left_s = token_s - rates.step_s - weight_bytes / rates.bytes_per_s
    each_s = rates.sequence_s + kv_bytes_per_request / rates.bytes_per_s
    return max(0.0, left_s / each_s)


_LEARN_MODEL, _LEARN_DEVICE = 0.2, 0.05
"""Part of an observation's logarithmic error that its model's, and its device's, correction takes over."""
_MOST: Final = math.log(16.0)
"""Corrections stay within this factor either way."""
_ERROR_MEMORY = 0.05


class TimeCorrections:
    """What was seen over what :func:`alone_s` and :func:`slowdown` say, as a factor per model and per device."""

    __slots__ = ("_devices", "_errors", "_models")

    def __init__(self) -> None:
        self._models: dict[str, float] = {}
        self._devices: dict[str, float] = {}
        self._errors: dict[str, float] = {}

    def factor(self, device: str, model: str) -> float:
        """What times of ``model`` on ``device`` are to be multiplied by; 1 where nothing was seen."""
        return math.exp(self._models.get(model, 0.0) + self._devices.get(device, 0.0))

    def observe(self, device: str, model: str, said_s: float, seen_s: float) -> None:
        """A token took ``seen_s`` where, corrections included, ``said_s`` was said; both > 0."""
        error = math.log(seen_s / said_s)
        self._models[model] = _bounded(self._models.get(model, 0.0) + _LEARN_MODEL * error)
        self._devices[device] = _bounded(self._devices.get(device, 0.0) + _LEARN_DEVICE * error)
        known = self._errors.get(device, abs(error))
        self._errors[device] = known + _ERROR_MEMORY * (abs(error) - known)

    def error_of(self, device: str) -> float | None:
        """By what share what was said of the device was off lately, on average; None before the first observation."""
        error = self._errors.get(device)
        return None if error is None else math.expm1(error)


def _bounded(correction: float) -> float:
    return min(_MOST, max(-_MOST, correction))
