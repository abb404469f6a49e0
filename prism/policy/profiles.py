"""What a profile of a model (``prism profile``) is used for: it stands where there would be a guess. Where there is
none, but the device's speed is declared, that does."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.pace import DevicePace
from prism.core.specs import DeviceKind, DeviceRates, ModelProfile, ModelSpec
from prism.policy.device_time import GUESSES


def profile_on(model: ModelSpec, kind: DeviceKind) -> ModelProfile | None:
    """Its profile, if that holds for devices of this kind."""
    found = model.profile
    return found if found is not None and found.kind is kind else None


def rates_on(model: ModelSpec, kind: DeviceKind) -> DeviceRates:
    """Where learning what the model's decode steps take begins."""
    found = model.profile
    return GUESSES[kind] if found is None or found.kind is not kind else found.rates


def step_rates(model: ModelSpec, kind: DeviceKind, pace: DevicePace | None) -> DeviceRates | None:
    """What is known beforehand of the model's decode steps on a device of this kind, which plays ``pace``: the profile,
    else what the pace makes of the model; None: nothing."""
    if (found := profile_on(model, kind)) is not None:
        return found.rates
    layers_s = 0.0 if pace is None else model.shape.layers * pace.layer_s
    return None if pace is None or layers_s <= 0.0 else _paced_rates(model, pace)


def _paced_rates(model: ModelSpec, pace: DevicePace) -> DeviceRates:
    """Engines of a paced device have it in turns for their layers' time, as they share a bandwidth: reading the weights
    takes that time."""
    guess, layers = GUESSES[DeviceKind.HOST], model.shape.layers / model.tp
    return DeviceRates(
        step_s=guess.step_s,
        sequence_s=guess.sequence_s + layers * pace.decode_sequence_s,
        bytes_per_s=model.shard_weight_bytes / (layers * pace.layer_s),
    )


def prefill_on(model: ModelSpec, kind: DeviceKind, guess_tokens_per_s: float) -> float:
    """Where learning how fast its prompts are prefilled begins, tokens/s."""
    found = profile_on(model, kind)
    return guess_tokens_per_s if found is None else found.prefill_tokens_per_s


def kept_for_bursts(models: Iterable[ModelSpec], kind: DeviceKind) -> int:
    """Bytes of one device that the bursts of those on it take, and which it does not lend therefore: a burst then finds
    them at once, and nothing has to be moved before."""
    return sum(found.burst_bytes for model in models if (found := profile_on(model, kind)) is not None)
