"""From the catalog's device list, or the command line's, to the devices of one machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from prism.config.catalog import Catalog
from prism.config.sections.machine import DeviceConfig
from prism.config.units import parse_size_bytes
from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId, NodeId, device_id, kind_and_index, local_name
from prism.core.specs import DeviceKind, DeviceSpec

DEFAULT_GPU_FRACTION: Final = 0.95
_WRITTEN: Final = re.compile(r"(?P<kind>cuda|host):(?P<index>\d+)(?:=(?P<memory>.+))?")


def parse_devices(
    texts: Sequence[str],
    node: NodeId,
    gpu_bytes: Mapping[int, int],
    refused: Mapping[int, str] = MappingProxyType({}),
    fraction: float = DEFAULT_GPU_FRACTION,
) -> tuple[DeviceSpec, ...]:
    """``texts`` are ``cuda:N``, ``cuda:N=SIZE`` or ``host:N=SIZE``; none: every GPU. Without a size a GPU gives
    ``fraction`` of its memory. ``refused`` says why other GPUs of the machine cannot be shared. Raises
    :class:`InvalidValue`, also for a machine without GPUs and without ``texts``."""
    if not texts:
        _check_usable("--device", gpu_bytes, refused)
    if not texts and not gpu_bytes:
        raise InvalidValue("--device", "", "is needed: this machine has no GPU", ("host:0=4GiB",))
    wanted = texts or [f"cuda:{i}" for i in sorted(gpu_bytes)]
    found = [_parsed(text, node, gpu_bytes, refused, fraction) for text in wanted]
    if len({d.id for d in found}) != len(found):
        raise InvalidValue("--device", ", ".join(texts), "names a device twice")
    return tuple(found)


def _check_usable(key: str, gpu_bytes: Mapping[int, int], refused: Mapping[int, str], where: str = "") -> None:
    """GPUs of which none can be used are said, not passed over for virtual devices."""
    if refused and not gpu_bytes:
        index, why = min(refused.items())
        raise InvalidValue(key, f"cuda:{index}", why, where=where)


def _parsed(
    text: str, node: NodeId, gpu_bytes: Mapping[int, int], refused: Mapping[int, str], fraction: float
) -> DeviceSpec:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise InvalidValue("--device", text, "is no device", ("cuda:N", "cuda:N=SIZE", "host:N=SIZE"))
    kind, index = DeviceKind(match["kind"]), int(match["index"])
    memory = None if match["memory"] is None else int(parse_size_bytes(match["memory"], "--device"))
    if kind is DeviceKind.HOST and memory is None:
        raise InvalidValue("--device", text, "needs a size", (f"{text}=4GiB",))
    if kind is DeviceKind.CUDA:
        if index not in gpu_bytes:
            present = tuple(f"cuda:{i}" for i in sorted(gpu_bytes))
            raise InvalidValue("--device", text, refused.get(index, "is not on this machine"), present)
        if memory is not None and memory > gpu_bytes[index]:
            raise InvalidValue("--device", text, f"is more than the GPU has ({gpu_bytes[index]})")
        memory = int(gpu_bytes[index] * fraction) if memory is None else memory
    assert memory is not None
    return DeviceSpec(device_id(node, kind, index), node, kind, memory)


def resolve_devices(
    catalog: Catalog,
    node: NodeId,
    gpu_bytes: Mapping[int, int],
    refused: Mapping[int, str] = MappingProxyType({}),
    islands: Sequence[frozenset[int]] = (),
) -> tuple[DeviceSpec, ...]:
    """The devices of this machine in catalog order. ``gpu_bytes``: memory by GPU index, empty without any; ``refused``:
    why other GPUs of the machine cannot be shared; ``islands``: those that NVLink joins, which become domains
    (:func:`domains_of`) where the catalog names none.

    ``auto`` takes every GPU that can be shared, and on a machine without GPUs the virtual devices. Raises
    :class:`InvalidValue` for a GPU that is not there or cannot be shared.
    """
    if isinstance(catalog.devices, str):
        _check_usable("devices", gpu_bytes, refused, str(catalog.file))
    found = [_spec(device, catalog, node, gpu_bytes, refused) for device in _configured(catalog, gpu_bytes)]
    domains = domains_of(found, islands, max((model.tp for model in catalog.models), default=1))
    return tuple(replace(spec, domain=spec.domain or domains.get(spec.id, "")) for spec in found)


def domains_of(specs: Sequence[DeviceSpec], islands: Sequence[frozenset[int]], largest_tp: int) -> dict[DeviceId, str]:
    """Domain by device: shards of a model stay in one domain, so that they talk over NVLink. None of them, and so the
    machine is one domain, if it has one island only, or if a model is spread over more GPUs than the largest has."""
    members = [
        [spec for spec in specs if spec.kind is DeviceKind.CUDA and kind_and_index(local_name(spec.id))[1] in island]
        for island in islands
    ]
    members = [found for found in members if found]
    whole = len(members) == 1 and len(members[0]) == len(specs)
    if not members or whole or largest_tp > max(map(len, members)):
        return {}
    return {spec.id: f"{spec.node} nvlink {number}" for number, island in enumerate(members) for spec in island}


def _configured(catalog: Catalog, gpu_bytes: Mapping[int, int]) -> tuple[DeviceConfig, ...]:
    if not isinstance(catalog.devices, str):
        return catalog.devices
    if gpu_bytes:
        return tuple(DeviceConfig(id=f"cuda:{index}") for index in sorted(gpu_bytes))
    virtual = catalog.virtual
    return tuple(DeviceConfig(id=f"host:{index}", memory_bytes=virtual.memory_bytes) for index in range(virtual.count))


def _spec(
    device: DeviceConfig, catalog: Catalog, node: NodeId, gpu_bytes: Mapping[int, int], refused: Mapping[int, str]
) -> DeviceSpec:
    kind = DeviceKind(device.kind)
    memory = device.memory_bytes
    if kind is DeviceKind.CUDA:
        if device.index not in gpu_bytes:
            present = tuple(f"cuda:{index}" for index in sorted(gpu_bytes))
            why = refused.get(device.index, "is not on this machine")
            raise InvalidValue("devices", device.id, why, present, where=str(catalog.file))
        total = gpu_bytes[device.index]
        if memory is not None and memory > total:
            raise InvalidValue(f"devices[{device.id}].memory", int(memory), f"is more than the GPU has ({total})")
        memory = memory if memory is not None else int(total * catalog.gpu_memory_fraction)  # type: ignore[assignment]
    assert memory is not None  # the loader refuses host devices without memory
    pace = None if device.pace is None else device.pace.declared()
    return DeviceSpec(device_id(node, kind, device.index), node, kind, int(memory), device.domain, pace=pace)
