"""Where profiles are kept: one JSON file that a reader can look at, by model, kind of device and lengths."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prism.core.errors import InvalidValue
from prism.core.specs import ModelSpec
from prism.sim.profile import Profile


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

    def put(self, profile: Profile) -> None:
        """Keep ``profile`` in place of an older answer to the same question, in one step."""
        rest = [p for p in self._found if _question(p) != _question(profile)]
        self._found = sorted([*rest, profile], key=_question)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self._found)))
        fresh.replace(self.file)


def _question(profile: Profile) -> tuple[str, str, int, str, float, float, float]:
    p = profile
    return p.model, p.gpu, p.tp, p.lengths, p.target, p.ttft_s, p.tpot_s
