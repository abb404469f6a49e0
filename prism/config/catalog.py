"""The catalog: what is served, on what, and how. Frozen; a reload builds a new one (:mod:`prism.config.reload`)."""

from __future__ import annotations

import difflib
import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from prism.config.adapters import lora_room, pool_bytes
from prism.config.document import CatalogFile
from prism.config.drafts import with_draft
from prism.config.errors import CatalogError
from prism.config.load import examine_file, load_file
from prism.config.model_files import ModelFacts, local_folder, model_facts
from prism.config.model_kinds import image_arguments, reads_both_ways
from prism.config.sections.live import LiveScalingConfig
from prism.config.sections.machine import DeviceConfig, EngineConfig, KvConfig, VirtualDevices, WeightConfig
from prism.config.sections.model import AdapterConfig, ModelConfig
from prism.config.sections.policy import PolicyConfig
from prism.config.sections.server import KeyConfig, LogConfig, ServerConfig
from prism.config.sections.topology import TopologyConfig
from prism.config.units import written
from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.core.specs import ModelKind, ModelSpec, Speculation

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
    live_scaling: LiveScalingConfig = field(default_factory=LiveScalingConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters over some of the models."""

    @property
    def base(self) -> Path:
        """Folder that relative model paths start from."""
        return self.file.parent

    @property
    def entries(self) -> tuple[ModelConfig | AdapterConfig, ...]:
        """All that requests may name."""
        return (*self.models, *self.adapters)

    @cached_property
    def by_name(self) -> Mapping[str, ModelConfig]:
        """Every name and alias of a model -> the model."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}

    @cached_property
    def adapters_by_name(self) -> Mapping[str, AdapterConfig]:
        """Every name and alias of an adapter -> the adapter."""
        return {name: adapter for adapter in self.adapters for name in (adapter.name, *adapter.aliases)}

    @cached_property
    def _adapters_of(self) -> Mapping[str, Sequence[AdapterConfig]]:
        found: dict[str, list[AdapterConfig]] = {}
        for adapter in self.adapters:
            found.setdefault(adapter.base, []).append(adapter)
        return found

    def adapters_of(self, model: ModelConfig) -> Sequence[AdapterConfig]:
        """The adapters over ``model``, in the catalog's order."""
        return self._adapters_of.get(model.name, ())

    def resolve(self, name: str) -> ModelName | None:
        """The model's or adapter's own name for a name or alias; None when the catalog has no such."""
        found = self.by_name.get(name) or self.adapters_by_name.get(name)
        return None if found is None else ModelName(found.name)

    def served_by(self, name: str) -> ModelName:
        """The model whose engines serve what is called ``name``: itself, or the base of an adapter. Raises
        :class:`InvalidValue`."""
        adapter = self.adapters_by_name.get(name)
        return ModelName(self.model(name).name if adapter is None else adapter.base)

    def near(self, name: str) -> tuple[str, ...]:
        """Up to three names that resemble ``name``, most similar first."""
        return tuple(difflib.get_close_matches(name, [*self.by_name, *self.adapters_by_name], n=3, cutoff=0.5))

    def model(self, name: str) -> ModelConfig:
        """The model called ``name`` (or so aliased). Raises :class:`InvalidValue` with similar names."""
        if name not in self.by_name:
            raise InvalidValue("model", name, "is not in the catalog", self.near(name))
        return self.by_name[name]

    def spec(self, name: str) -> ModelSpec:
        """The model as the scheduler and the engines see it, with room for its adapters. The first call reads the
        headers of its files, later ones a cache. Raises :class:`InvalidValue` (unknown name) or
        :class:`~prism.config.errors.ModelFilesError`."""
        model = self.model(name)
        found = model_spec(model, self.base, self.adapters_of(model))
        added = image_arguments((model_facts_of(model, self.base).architecture,), self.takes_images)
        known = dict(found.engine_args)
        return replace(found, engine_args=tuple(sorted((added | known).items()))) if added.keys() - known else found

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images (``server.images.max_count``)."""
        return self.server.images.max_count > 0

    def describe(self, name: str) -> dict[str, Any]:
        """The model or adapter called ``name`` as a catalog would have it, with every option. Raises
        :class:`InvalidValue`."""
        entry = self.adapters_by_name.get(name) or self.model(name)
        found: dict[str, Any] = msgspec.to_builtins(entry, str_keys=True, enc_hook=written)
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
        entry = self.adapters_by_name.get(name) or self.model(name)
        return any(fnmatchcase(known, pattern) for known in (entry.name, *entry.aliases) for pattern in key.models)


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
    models = tuple(model for model in document.models if model.base is None)
    names = {name: model.name for model in models for name in (model.name, *model.aliases)}
    return Catalog(
        file=file,
        devices=devices
        if isinstance(devices, str)
        else tuple(d if isinstance(d, DeviceConfig) else DeviceConfig(id=d) for d in devices),
        virtual=document.virtual,
        gpu_memory_fraction=document.gpu_memory_fraction,
        models=models,
        adapters=tuple(_adapter(entry, names) for entry in document.models if entry.base is not None),
        policy=document.policy,
        engines=document.engines,
        weights=document.weights,
        kv=document.kv,
        live_scaling=document.live_scaling,
        topology=document.topology,
        server=document.server,
        log=document.log,
        keys=document.keys,
    )


def _adapter(entry: ModelConfig, names: Mapping[str, str]) -> AdapterConfig:
    """``names``: of models, by name and alias."""
    return AdapterConfig(
        name=entry.name,
        base=names.get(entry.base or "", entry.base or ""),
        adapter=entry.adapter or "",
        revision=entry.revision,
        aliases=entry.aliases,
        slo=entry.slo,
        late=entry.late,
        max_wait_s=entry.max_wait_s,
    )


def model_spec(model: ModelConfig, base: Path, adapters: Sequence[AdapterConfig] = ()) -> ModelSpec:
    """``model`` with its sizes, read from its files (relative to ``base``), and room for ``adapters``. Raises
    ``ModelFilesError``."""
    facts = model_facts_of(model, base)
    folder = local_folder(model.path, base)
    spec = spec_with(model, facts, model.path if folder is None else str(folder))
    if spec.speculation is not None and spec.speculation.draft:
        spec = with_draft(spec, base, wanted_dtype(model))
    room = lora_room(model.lora, adapters, base)
    if room is None or spec.kind is ModelKind.RERANK or reads_both_ways((facts.architecture,)):
        return spec
    return replace(spec, lora=room, weight_bytes=spec.weight_bytes + pool_bytes(room, spec.shape, spec.tp))


def model_facts_of(model: ModelConfig, base: Path) -> ModelFacts:
    """What its files say. Raises ``ModelFilesError``."""
    return model_facts(model.path, base, model.revision, wanted_dtype(model))


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
        prefer=model.prefer,
        max_wait_s=float(model.max_wait_s),
        scheduling=model.scheduling,
        lending=model.lending,
        live=model.live_scaling,
        engine_args=tuple((name, _frozen(value)) for name, value in sorted(model.engine_args.items())),
        kind=model.kind or facts.kind,
        speculation=_speculation(model),
    )


def _speculation(model: ModelConfig) -> Speculation | None:
    if (wanted := model.speculative) is None:
        return None
    return Speculation(
        wanted.algorithm,
        wanted.draft_tokens,
        wanted.ngrams,
        wanted.draft or "",
        steps=wanted.steps if wanted.draft else 0,
        branches=wanted.branches if wanted.draft else 0,
    )


def _frozen(value: object) -> object:
    """Lists as tuples, so that specs stay values."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
