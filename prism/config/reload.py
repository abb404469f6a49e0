"""The difference between two catalogs, and what of it can be applied without a restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prism.config.catalog import Catalog
from prism.config.sections.model import AdapterConfig, ModelConfig

LIVE_SERVER_KEYS: Final = frozenset(
    {"images", "max_body_bytes", "request_timeout_s", "sse_keepalive_s", "write_timeout_s"}
)
"""Attributes of ``server`` that running processes take over; the others are part of how processes were started."""

RESTART_SECTIONS: Final = (
    "devices",
    "virtual",
    "gpu_memory_fraction",
    "engines",
    "weights",
    "kv",
    "live_scaling",
    "topology",
)

REACTIVATE_KEYS: Final = frozenset(
    {
        "path",
        "revision",
        "tp",
        "context_tokens",
        "engine_args",
        "kind",
        "lora",
        "scheduling",
        "lending",
        "speculative",
        "prefer",
    }
)
"""Attributes of a model that its engine is built from: a change takes effect at its next activation."""


Entry = ModelConfig | AdapterConfig


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One model or adapter before and after. ``reactivate``: it takes effect when an active copy has left and come
    back."""

    old: Entry
    new: Entry
    keys: tuple[str, ...]
    """Attributes that differ."""

    @property
    def reactivate(self) -> bool:
        return isinstance(self.new, ModelConfig) and bool(REACTIVATE_KEYS & set(self.keys))


@dataclass(frozen=True, slots=True)
class CatalogDiff:
    """What a reload changes. All is applied at once but ``needs_restart``, which is reported and left as it was."""

    added: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()
    changed: tuple[ModelChange, ...] = ()
    server: tuple[str, ...] = ()
    """Attributes of ``server`` that differ and can be applied, as ``server.max_body_bytes``."""
    keys_changed: bool = False
    needs_restart: tuple[str, ...] = ()
    """Dotted names of changed settings that only a restart applies."""

    @property
    def bases(self) -> frozenset[str]:
        """Models whose adapters differ: there may be other room for them from their next activation."""
        entries = [*self.added, *self.removed, *(e for change in self.changed for e in (change.old, change.new))]
        return frozenset(entry.base for entry in entries if isinstance(entry, AdapterConfig))

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
    before = {(type(entry), entry.name): entry for entry in old.entries}
    after = {(type(entry), entry.name): entry for entry in new.entries}
    server = _differing(old.server, new.server)
    restart = [f"server.{key}" for key in server if key not in LIVE_SERVER_KEYS]
    restart += [
        f"{part}.{key}" for part in ("policy", "log") for key in _differing(getattr(old, part), getattr(new, part))
    ]
    restart += [name for name in RESTART_SECTIONS if getattr(old, name) != getattr(new, name)]
    return CatalogDiff(
        added=tuple(entry for key, entry in after.items() if key not in before),
        removed=tuple(entry for key, entry in before.items() if key not in after),
        changed=tuple(_change(before[k], e) for k, e in after.items() if k in before and before[k] != e),
        server=tuple(f"server.{key}" for key in server if key in LIVE_SERVER_KEYS),
        keys_changed=old.keys != new.keys,
        needs_restart=tuple(restart),
    )


def _change(old: Entry, new: Entry) -> ModelChange:
    return ModelChange(old, new, _differing(old, new))


def _differing(old: object, new: object) -> tuple[str, ...]:
    names: tuple[str, ...] = old.__struct_fields__  # type: ignore[attr-defined]
    return tuple(name for name in names if getattr(old, name) != getattr(new, name))
