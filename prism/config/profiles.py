"""What models can carry on devices of their own (``prism profile``), and where that is kept: one JSON file that a
reader can look at, in the order in which profiles were made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.core.specs import DeviceKind, DeviceRates, ModelProfile, ModelSpec
from prism.policy.lending_map import MemoryNeed

LENT_BURST: Final = 2
"""Multiple of the stable rate for whose requests a device keeps memory back."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one model on ``tp`` devices of a kind. Bytes are per device."""

    model: str
    gpu: str
    tp: int
    lengths: str
    target: float
    ttft_s: float
    tpot_s: float
    rate_rps: float
    """The largest rate that was found to meet the objectives; 0: not even the smallest tried does."""
    free_bytes: int
    """What is free at that rate at the worst moment."""
    swap_bytes: dict[int, int]
    """By burst: what the requests of such a burst hold beyond the device's memory."""
    burst_bytes: dict[int, int] = {}
    """By burst: what they hold beyond what requests at the stable rate do, at the worst moments."""
    kind: DeviceKind = DeviceKind.CUDA
    step_s: float = 0.0
    """This and the next two: :class:`~prism.core.specs.DeviceRates` at that rate."""
    sequence_s: float = 0.0
    bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def of(self, model: str) -> Profile:
        """The same for another model of equal weights, shape and objectives."""
        return msgspec.structs.replace(self, model=model)

    def need(self, shards: int, burst: int, lend_from_bytes: int) -> MemoryNeed:
        """A lender when at least ``lend_from_bytes`` are free at its stable rate, else a borrower of what bursts of
        ``burst`` times lack (0: neither)."""
        if self.free_bytes >= lend_from_bytes:
            return MemoryNeed(ModelName(self.model), shards, self.free_bytes)
        return MemoryNeed(ModelName(self.model), shards, -self.swap_bytes[burst])

    def for_schedulers(self) -> ModelProfile | None:
        """What schedulers and agents start from; None for one that was made before times were part of it."""
        if self.bytes_per_s <= 0.0:
            return None
        rates = DeviceRates(self.step_s, self.sequence_s, self.bytes_per_s)
        return ModelProfile(self.kind, rates, self.prefill_tokens_per_s, self.burst_bytes.get(LENT_BURST, 0))


class ProfileStore:
    """The profiles in one file. A profile answers for its question only: other objectives or lengths ask anew."""

    def __init__(self, file: Path) -> None:
        """Raises :class:`InvalidValue` for a file that holds something else."""
        self.file = file
        self._found: list[Profile] = []
        if file.exists():
            try:
                self._found = msgspec.json.decode(file.read_bytes(), type=list[Profile])
            except msgspec.DecodeError as error:
                raise InvalidValue("profiles", str(file), f"is not a file of profiles: {error}") from error

    def find(self, model: ModelSpec, gpu: str, lengths: str, target: float) -> Profile | None:
        """The profile of exactly this question, if it was ever made."""
        wanted = (str(model.name), gpu, model.tp, lengths, target, model.slo_ttft_s, model.slo_tpot_s)
        return next((p for p in self._found if _question(p) == wanted), None)

    def profiled(self, model: ModelSpec, gpus: Collection[str] = ()) -> ModelSpec:
        """``model`` with the profile that was made last for it with its objectives, on one of ``gpus`` (none: any)."""
        wanted = (str(model.name), model.tp, model.slo_ttft_s, model.slo_tpot_s)
        for found in reversed(self._found):
            if (found.model, found.tp, found.ttft_s, found.tpot_s) == wanted and (not gpus or found.gpu in gpus):
                return replace(model, profile=found.for_schedulers())
        return model

    def put(self, profile: Profile) -> None:
        """Keep ``profile`` in place of an older answer to the same question, in one step."""
        self._found = [*(p for p in self._found if _question(p) != _question(profile)), profile]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self._found)))
        fresh.replace(self.file)


def _question(profile: Profile) -> tuple[str, str, int, str, float, float, float]:
    p = profile
    return p.model, p.gpu, p.tp, p.lengths, p.target, p.ttft_s, p.tpot_s
