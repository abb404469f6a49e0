"""The catalog: what is served, on what, and how. Frozen; a reload builds a new one (:mod:`prism.config.reload`)."""

from __future__ import annotations

import difflib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from prism.config.document import CatalogFile
from prism.config.errors import CatalogError
from prism.config.load import examine_file, load_file
from prism.config.model_files import ModelFacts, local_folder, model_facts
from prism.config.policy import PolicyConfig
from prism.config.sections import (
    DeviceConfig,
    EngineConfig,
    KeyConfig,
    KvConfig,
    LogConfig,
    ModelConfig,
    ServerConfig,
    VirtualDevices,
    WeightConfig,
)
from prism.config.units import written
from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.core.specs import ModelSpec

__all__ = ["Catalog", "examine_catalog", "load_catalog"]


@dataclass(frozen=True)
class Catalog:
    """A checked catalog with defaults filled in. Looking anything up reads no file, except :meth:`spec`."""

    file: Path
    devices: Literal["auto"] | tuple[DeviceConfig, ...]
    virtual: VirtualDevices
    gpu_memory_fraction: float
    models: tuple[ModelConfig, ...]
    policy: PolicyConfig
    engines: EngineConfig
    weights: WeightConfig
    kv: KvConfig
    server: ServerConfig
    log: LogConfig
    keys: tuple[KeyConfig, ...]

    @property
    def base(self) -> Path:
        """Folder that relative model paths start from."""
        return self.file.parent

    @cached_property
    def by_name(self) -> Mapping[str, ModelConfig]:
        """Every name and alias -> its model."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}

    def resolve(self, name: str) -> ModelName | None:
        """The model's own name for a name or alias; None when the catalog has no such model."""
        model = self.by_name.get(name)
        return None if model is None else ModelName(model.name)

    def near(self, name: str) -> tuple[str, ...]:
        """Up to three names that resemble ``name``, most similar first."""
        return tuple(difflib.get_close_matches(name, list(self.by_name), n=3, cutoff=0.5))

    def model(self, name: str) -> ModelConfig:
        """The model called ``name`` (or so aliased). Raises :class:`InvalidValue` with similar names."""
        if name not in self.by_name:
            raise InvalidValue("model", name, "is not in the catalog", self.near(name))
        return self.by_name[name]

    def spec(self, name: str) -> ModelSpec:
        """The model as the scheduler and the engines see it. The first call reads the headers of its files, later ones
        a cache. Raises :class:`InvalidValue` (unknown name) or :class:`~prism.config.errors.ModelFilesError`."""
        return model_spec(self.model(name), self.base)

    def describe(self, name: str) -> dict[str, Any]:
        """The model called ``name`` as a catalog would have it, with every option. Raises :class:`InvalidValue`."""
        found: dict[str, Any] = msgspec.to_builtins(self.model(name), str_keys=True, enc_hook=written)
        return found

    def key_for(self, secret: str) -> KeyConfig | None:
        """The key whose secret this is, compared in constant time."""
        given = secret.encode()
        found = [key for key in self.keys if hmac.compare_digest(key.key.encode(), given)]
        return found[0] if found else None

    def may_use(self, key: KeyConfig | None, name: str) -> bool:
        """Whether ``key`` (None: no keys are configured) may use the model called ``name``."""
        if key is None or key.models is None:
            return True
        model = self.model(name)
        return any(fnmatchcase(known, pattern) for known in (model.name, *model.aliases) for pattern in key.models)


def load_catalog(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Catalog:
    """The catalog in the YAML file at ``path``. Raises :class:`prism.config.errors.CatalogError` with everything
    that is wrong, each with file, line, key, value and choices. Reads no model files and no devices."""
    file = Path(path).expanduser().absolute()
    return _catalog(file, load_file(file, env))


def examine_catalog(
    path: str | os.PathLike[str], env: Mapping[str, str] = os.environ
) -> tuple[Catalog | None, tuple[InvalidValue, ...]]:
    """Like :func:`load_catalog` for somebody who wants to hear everything: the catalog as far as it can be looked at
    (None: not at all) and all problems, such as variables that are not set here."""
    file = Path(path).expanduser().absolute()
    try:
        document, problems = examine_file(file, env)
    except CatalogError as error:
        return None, error.problems
    return None if document is None else _catalog(file, document), tuple(problems)


def _catalog(file: Path, document: CatalogFile) -> Catalog:
    devices = document.devices
    return Catalog(
        file=file,
        devices=devices
        if isinstance(devices, str)
        else tuple(d if isinstance(d, DeviceConfig) else DeviceConfig(id=d) for d in devices),
        virtual=document.virtual,
        gpu_memory_fraction=document.gpu_memory_fraction,
        models=document.models,
        policy=document.policy,
        engines=document.engines,
        weights=document.weights,
        kv=document.kv,
        server=document.server,
        log=document.log,
        keys=document.keys,
    )


def model_spec(model: ModelConfig, base: Path) -> ModelSpec:
    """``model`` with its sizes, read from its files (relative to ``base``). Raises ``ModelFilesError``."""
    facts = model_facts(model.path, base, model.revision, wanted_dtype(model))
    folder = local_folder(model.path, base)
    return spec_with(model, facts, model.path if folder is None else str(folder))


def wanted_dtype(model: ModelConfig) -> str:
    """What the catalog has the engine compute ``model`` in; ``auto``: as it was saved."""
    return str(model.engine_args.get("dtype", "auto"))


def spec_with(model: ModelConfig, facts: ModelFacts, path: str) -> ModelSpec:
    """``model`` with the sizes in ``facts``, however they are known."""
    return ModelSpec(
        name=ModelName(model.name),
        path=path,
        slo_ttft_s=float(model.slo.ttft_s),
        slo_tpot_s=float(model.slo.tpot_s),
        weight_bytes=facts.weight_bytes,
        shape=facts.shape,
        context_tokens=model.context_tokens or facts.context_tokens,
        tp=model.tp,
        aliases=model.aliases,
        pinned=model.pinned,
        keep_alive_s=None if model.keep_alive_s is None else float(model.keep_alive_s),
        min_kv_bytes=int(model.min_kv_bytes),
        late=model.late,
        max_wait_s=float(model.max_wait_s),
        engine_args=tuple((name, _frozen(value)) for name, value in sorted(model.engine_args.items())),
        kind=model.kind or facts.kind,
    )


def _frozen(value: object) -> object:
    """Lists as tuples, so that specs stay values."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
