"""How a request names the LoRA adapter it is for, from the front door to the engine."""

from __future__ import annotations

import msgspec

from prism.core.errors import InvalidValue


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """Enough for any engine of the base to find the adapter. ``mark`` names the bytes of its files, so that prefixes
    computed with one version of an adapter are never used with another."""

    name: str
    folder: str
    mark: str

    @property
    def id(self) -> str:
        """As requests carry it (SGLang's ``lora_id``)."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, lora_id: str) -> AdapterRef:
        """Raises :class:`InvalidValue` for what is no such id."""
        try:
            return msgspec.json.decode(lora_id, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidValue("lora_id", lora_id, f"names no adapter: {error}") from error
