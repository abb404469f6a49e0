"""The difference between two catalogs, and what of it can be applied without a restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prism.config.catalog import Catalog
from prism.config.sections import ModelConfig

LIVE_SERVER_KEYS: Final = frozenset(
    {"images", "max_body_bytes", "request_timeout_s", "sse_keepalive_s", "write_timeout_s"}
)
"""Attributes of ``server`` that running processes take over; the others are part of how processes were started."""

RESTART_SECTIONS: Final = ("devices", "virtual", "gpu_memory_fraction", "engines", "weights", "kv")

REACTIVATE_KEYS: Final = frozenset({"path", "revision", "tp", "context_tokens", "engine_args", "kind"})
"""Attributes of a model that its engine is built from: a change takes effect at its next activation."""


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One model before and after. ``reactivate``: it takes effect when an active copy has left and come back."""

    old: ModelConfig
    new: ModelConfig
    keys: tuple[str, ...]
    """Attributes that differ."""

    @property
    def reactivate(self) -> bool:
        return bool(REACTIVATE_KEYS & set(self.keys))


@dataclass(frozen=True, slots=True)
class CatalogDiff:
    """What a reload changes. All is applied at once but ``needs_restart``, which is reported and left as it was."""

    added: tuple[ModelConfig, ...] = ()
    removed: tuple[ModelConfig, ...] = ()
    changed: tuple[ModelChange, ...] = ()
    server: tuple[str, ...] = ()
    """Attributes of ``server`` that differ and can be applied, as ``server.max_body_bytes``."""
    keys_changed: bool = False
    needs_restart: tuple[str, ...] = ()
    """Dotted names of changed settings that only a restart applies."""

    @property
    def empty(self) -> bool:
        return self == CatalogDiff()

    def summary(self) -> str:
        """One line for the log and the CLI."""
        parts = [f"+{model.name}" for model in self.added] + [f"-{model.name}" for model in self.removed]
        parts += [f"~{change.new.name}({', '.join(change.keys)})" for change in self.changed]
        parts += [*self.server, *(["keys"] if self.keys_changed else [])]
        text = ", ".join(parts) or "nothing to apply"
        return text + (f"; needs a restart: {', '.join(self.needs_restart)}" if self.needs_restart else "")


def diff(old: Catalog, new: Catalog) -> CatalogDiff:
    """What must happen to a server that runs ``old`` so that it runs ``new``. Models are matched by name."""
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    server = _differing(old.server, new.server)
    restart = [f"server.{key}" for key in server if key not in LIVE_SERVER_KEYS]
    restart += [
        f"{part}.{key}" for part in ("policy", "log") for key in _differing(getattr(old, part), getattr(new, part))
    ]
    restart += [name for name in RESTART_SECTIONS if getattr(old, name) != getattr(new, name)]
    return CatalogDiff(
        added=tuple(model for model in new.models if model.name not in before),
        removed=tuple(model for model in old.models if model.name not in after),
        changed=tuple(_change(before[m.name], m) for m in new.models if m.name in before and before[m.name] != m),
        server=tuple(f"server.{key}" for key in server if key in LIVE_SERVER_KEYS),
        keys_changed=old.keys != new.keys,
        needs_restart=tuple(restart),
    )


def _change(old: ModelConfig, new: ModelConfig) -> ModelChange:
    return ModelChange(old, new, _differing(old, new))


def _differing(old: object, new: object) -> tuple[str, ...]:
    names: tuple[str, ...] = old.__struct_fields__  # type: ignore[attr-defined]
    return tuple(name for name in names if getattr(old, name) != getattr(new, name))
