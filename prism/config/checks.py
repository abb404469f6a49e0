"""What a schema cannot say: names that must differ or exist, values that must fit together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Final

from prism.config.document import CatalogFile
from prism.config.engine_args import OWNED, REFUSED_VALUES, known_names, registries
from prism.config.sections.machine import DeviceConfig
from prism.config.sections.model import ModelConfig, SpeculativeConfig
from prism.config.yaml_source import KeyPath, YamlSource
from prism.core.errors import InvalidValue
from prism.core.settings import LongPromptPlace
from prism.core.specs import Scheduling, SpeculativeAlgorithm
from prism.scheduler.gpu_pauses import LOOK_EVERY_S

ADAPTER_KEYS: Final = ("name", "base", "adapter", "revision", "aliases", "slo", "late", "max_wait")
"""What an entry with a `base` may say."""

MIN_DEVICE_BYTES: Final = 4 << 20
"""Two pages: less cannot hold one weight page and one KV page."""

Problems = Iterator[InvalidValue]


def cross_checks(document: CatalogFile, source: YamlSource) -> list[InvalidValue]:
    """Everything about ``document`` (read from ``source``) that cannot work, by section."""
    checks: tuple[Callable[[CatalogFile, YamlSource], Problems], ...] = (
        *(_devices, _names, _models, _kv, _topology, _policy, _keys),
    )
    return [problem for check in checks for problem in check(document, source)]


def _devices(document: CatalogFile, source: YamlSource) -> Problems:
    if document.virtual.memory_bytes < MIN_DEVICE_BYTES:
        yield source.problem(("virtual", "memory"), document.virtual.memory_bytes, "must be at least 4MiB")
    if document.devices == "auto":
        return
    if not document.devices:
        yield source.problem(("devices",), [], "is empty; write auto, or a list of devices")
    seen: set[str] = set()
    for i, entry in enumerate(document.devices):
        device = entry if isinstance(entry, DeviceConfig) else DeviceConfig(id=entry)
        if device.id in seen:
            yield source.problem(("devices", i), device.id, "is listed twice")
        seen.add(device.id)
        if device.memory_bytes is None and device.kind == "host":
            yield source.problem(("devices", i), device.id, "needs `memory`, its hard cap: {id: host:0, memory: 1GiB}")
        if device.memory_bytes is not None and device.memory_bytes < MIN_DEVICE_BYTES:
            yield source.problem(("devices", i, "memory"), int(device.memory_bytes), "must be at least 4MiB")
        if device.pace is not None and device.kind != "host":
            why = "is for virtual devices (host:N): a GPU has a speed of its own"
            yield source.problem(("devices", i, "pace"), device.pace.declared().words, why)


def _names(document: CatalogFile, source: YamlSource) -> Problems:
    owner: dict[str, str] = {}
    for i, model in enumerate(document.models):
        places: list[tuple[KeyPath, str]] = [(("models", i, "name"), model.name)]
        places += [(("models", i, "aliases", j), alias) for j, alias in enumerate(model.aliases)]
        for path, name in places:
            if name in owner:
                yield source.problem(path, name, f"is already a name of model {owner[name]}")
            owner.setdefault(name, model.name)


def _models(document: CatalogFile, source: YamlSource) -> Problems:
    if not document.models:
        yield source.problem(("models",), [], "is empty; list at least one model")
    for i, model in enumerate(document.models):
        found = _model(model, document) if model.base is None else _adapter(model, document, source.data["models"][i])
        for path, value, why, choices in found:
            yield source.problem(_written(source, i, path), value, why, choices)


def _topology(document: CatalogFile, source: YamlSource) -> Problems:
    topology = document.topology
    leaves, domains = ([part.nodes for part in parts] for parts in (topology.leaves, topology.domains))
    for kind, parts in (("leaves", leaves), ("domains", domains)):
        seen: set[str] = set()
        for i, nodes in enumerate(parts):
            for j, node in enumerate(nodes):
                if node in seen:
                    yield source.problem(("topology", kind, i, "nodes", j), node, "is listed twice")
                seen.add(node)


def _kv(document: CatalogFile, source: YamlSource) -> Problems:
    kv = document.kv
    if kv.long_prompts is not LongPromptPlace.REFUSE and not kv.keep:
        why = "needs `kv.keep: true`: the KV lies in the same pool of host memory"
        yield source.problem(("kv", "long_prompts"), kv.long_prompts.value, why, (LongPromptPlace.REFUSE.value,))
    elif kv.long_prompts is LongPromptPlace.LENT and not kv.lend:
        why = "needs `kv.lend: true`: otherwise devices lend nothing"
        yield source.problem(("kv", "long_prompts"), kv.long_prompts.value, why, (LongPromptPlace.HOST.value,))


Problem = tuple[KeyPath, object, str, tuple[object, ...]]


def _adapter(model: ModelConfig, document: CatalogFile, written: dict[str, object]) -> Iterator[Problem]:
    """``written``: the adapter's entry as it stands in the file."""
    bases = {name: m for m in document.models for name in (m.name, *m.aliases) if m is not model}
    base = bases.get(model.base or "")
    if base is None:
        near = tuple(difflib.get_close_matches(model.base or "", list(bases), n=3, cutoff=0.4))
        yield ("base",), model.base, "is no model of this catalog", near
    elif base.base is not None:
        yield ("base",), model.base, f"is an adapter itself; its base is {base.base}", (base.base,)
    if model.adapter is None:
        yield ("adapter",), None, "is required but missing: the folder with the adapter's files", ()
    for key in written:
        if key not in ADAPTER_KEYS:
            yield (key,), written[key], "is no option of an adapter, which runs on its base's engines", ADAPTER_KEYS
    yield from _objectives(model)


def _objectives(model: ModelConfig) -> Iterator[Problem]:
    for key, value_s in (("ttft", model.slo.ttft_s), ("tpot", model.slo.tpot_s)):
        if value_s <= 0:
            yield ("slo", key), float(value_s), "must be more than 0", ()
    if model.max_wait_s <= 0:
        yield ("max_wait",), float(model.max_wait_s), "must be more than 0", ()


def _model(model: ModelConfig, document: CatalogFile) -> Iterator[Problem]:
    if not model.path:
        yield ("path",), None, "is required but missing (an adapter has `base` and `adapter` instead)", ()
    if model.adapter is not None:
        yield ("base",), None, "is required but missing: the model that the adapter is for", ()
    yield from _objectives(model)
    if isinstance(document.devices, tuple) and model.tp > len(document.devices):
        yield ("tp",), model.tp, f"needs more devices than the catalog has ({len(document.devices)})", ()
    if model.scheduling is Scheduling.FAIR and not document.kv.keep:
        yield (
            ("scheduling",),
            "fair",
            "needs `kv.keep: true`: requests whose turn it is not are paged out",
            ("deadline",),
        )
    if model.scheduling is Scheduling.FAIR and model.speculative is not None:
        yield ("speculative",), model.speculative.algorithm.value, "does not go with `scheduling: fair`", ()
    if model.speculative is not None:
        for key, value, why in _guesses(model.speculative):
            yield ("speculative", key), value, why, ()
    for name, value in model.engine_args.items():
        if name in OWNED:
            yield ("engine_args", name), value, f"is decided by {OWNED[name]}", ()
        elif name not in known_names():
            near = tuple(difflib.get_close_matches(name, known_names(), n=3))
            yield ("engine_args", name), name, "is not an argument of SGLang's engine", near
        elif value is not None and value not in (choices := registries().engine_args.get(name, (value,))):
            yield ("engine_args", name), value, "is none of the values SGLang's engine takes", choices
        elif isinstance(value, str | bool) and (name, value) in REFUSED_VALUES:
            yield ("engine_args", name), value, *REFUSED_VALUES[name, value]
    for kind in ("reasoning_parser", "tool_call_parser"):
        known, value = getattr(registries(), kind), getattr(model, kind)
        if value is not None and value not in known:
            yield (kind,), value, "is no parser of SGLang", _near(value, known)


def _guesses(wanted: SpeculativeConfig) -> Iterator[tuple[str, object, str]]:
    """What cannot be in a `speculative`: (key, value, why)."""
    if wanted.algorithm is SpeculativeAlgorithm.NGRAM:
        if wanted.draft is not None:
            yield "draft", wanted.draft, "is for `eagle` and `eagle3`; n-grams are looked up"
        return
    if wanted.draft is None:
        yield "draft", None, f"is required but missing: the model that guesses ({wanted.algorithm.value})"
    most = 1 + wanted.branches + (wanted.steps - 1) * wanted.branches**2
    if not wanted.steps < wanted.draft_tokens <= most:
        allowed = str(most) if most == wanted.steps + 1 else f"from {wanted.steps + 1} to {most}"
        yield (
            "draft_tokens",
            wanted.draft_tokens,
            f"must be {allowed}: one more than `steps` at least, and no more than {wanted.branches} branches make",
        )


def _near(value: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """What resembles ``value``; all there is when nothing does."""
    return tuple(difflib.get_close_matches(value, known, n=3)) or known


def _written(source: YamlSource, i: int, path: KeyPath) -> KeyPath:
    """Where an option of model ``i`` is written: in the model itself or in ``defaults``."""
    own: KeyPath = ("models", i, *path)
    inherited: KeyPath = ("defaults", *path)
    return own if own in source.lines or inherited not in source.lines else inherited


def _policy(document: CatalogFile, source: YamlSource) -> Problems:
    cluster = document.policy.settings().cluster
    names = tuple(model.name for model in document.models if model.base is None)
    for key in ("expected_rates", "expected_prompt_tokens", "expected_output_tokens"):
        for name, value in getattr(cluster, key):
            if name not in names:
                near = tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.4))
                yield source.problem(("policy", key, name), value, "is for no model of this catalog", near)
    if cluster.rate_window_s <= 0:
        yield source.problem(("policy", "rate_window"), cluster.rate_window_s, "must be more than 0")
    if cluster.planning_window_s <= 0:
        yield source.problem(("policy", "planning_window"), cluster.planning_window_s, "must be more than 0")
    if cluster.failure_backoff_max_s < cluster.failure_backoff_s:
        path = ("policy", "failure_backoff_max")
        yield source.problem(path, cluster.failure_backoff_max_s, "is less than failure_backoff")
    if 0 < (longest_s := document.policy.settings().gpu.longest_pause_s) < LOOK_EVERY_S:
        why = f"must be 0 or at least {LOOK_EVERY_S:g} s, for which a decision holds"
        yield source.problem(("policy", "longest_pause"), longest_s, why)
    if document.engines.parked_per_device > document.engines.max_per_device:
        path = ("engines", "parked_per_device")
        yield source.problem(path, document.engines.parked_per_device, "is more than engines.max_per_device")
    if document.engines.active_bytes < document.engines.parked_bytes:
        path = ("engines", "active_memory")
        yield source.problem(path, int(document.engines.active_bytes), "is less than engines.parked_memory")
    if document.gpu_memory_fraction <= 0:
        yield source.problem(("gpu_memory_fraction",), document.gpu_memory_fraction, "must be more than 0")


def _keys(document: CatalogFile, source: YamlSource) -> Problems:
    known = [name for model in document.models for name in (model.name, *model.aliases)]
    names: set[str] = set()
    secrets: set[str] = set()
    for i, key in enumerate(document.keys):
        if key.name in names:
            yield source.problem(("keys", i, "name"), key.name, "is the name of another key too")
        if key.key in secrets:
            yield source.problem(("keys", i, "key"), "...", "is the same secret as another key's")
        names.add(key.name)
        secrets.add(key.key)
        for j, pattern in enumerate(key.models or ()):
            if not any(c in pattern for c in "*?[") and pattern not in known:
                choices = tuple(difflib.get_close_matches(pattern, known, n=3, cutoff=0.4))
                yield source.problem(("keys", i, "models", j), pattern, "is no model of this catalog", choices)
