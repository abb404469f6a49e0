"""What a machine that joins must know of the fleet: ``prism-serve`` publishes it in the store, ``prism-node`` reads
it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from prism.config.catalog import Catalog
from prism.config.sections.machine import LinkConfig
from prism.core.ids import local_name
from prism.core.pace import DevicePace
from prism.core.settings import GpuSettings, LiveMode, LongPromptPlace
from prism.core.specs import DeviceKind, DeviceSpec
from prism.kv.settings import DeclaredLinks, KvSettings
from prism.node.main import EngineSettings
from prism.weights.store.budget import Budget, share_of_memory
from prism.weights.store.shared_memory import SHARED_MEMORY
from prism.wire.message import PROTOCOL_VERSION

DOCUMENT: Final = "fleet"


class WeightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The store's part of the catalog."""

    host_memory_fraction: float
    disk_bytes: int | None

    def budget(self) -> Budget:
        """On this machine."""
        return Budget(self.disk_bytes, share_of_memory(self.host_memory_fraction))


class KvShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the catalog about KV outside of engines."""

    host_memory_fraction: float
    """0: nothing is kept."""
    lend_keep_fraction: float | None
    lend_rate_fraction: float = 1.0
    long_prompts: LongPromptPlace
    links: dict[str, DeclaredLinks]
    """By the device's name on its machine."""
    leave_s: float = 1.0
    """See :class:`prism.kv.settings.KvSettings`."""

    def on_this_machine(self) -> KvSettings:
        return KvSettings(
            host_bytes=min(share_of_memory(self.host_memory_fraction), self._of_shared_memory()),
            lend_keep_fraction=self.lend_keep_fraction,
            lend_rate_fraction=self.lend_rate_fraction,
            long_prompts=self.long_prompts,
            links=self.links,
            leave_s=self.leave_s,
        )

    def _of_shared_memory(self) -> int:
        """Twice the share, of the file system in shared memory: that is half of all memory, but for containers whose is
        small, and where weights are to find room, too."""
        room = os.statvfs(SHARED_MEMORY)
        return int(2 * self.host_memory_fraction * room.f_blocks * room.f_frsize)


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The catalog's part that agents work by."""

    engines: EngineSettings
    standby: bool
    """Whether a machine keeps a standby of its zygote."""
    weights: WeightSettings
    kv: KvShare
    gpu: GpuSettings
    paces: dict[str, DevicePace] = {}
    """The compute speed that virtual devices play, by the device's name on its machine."""
    layers_keep_fraction: float | None = None
    """Devices lend for layers of other engines what is free beyond this part of them; None: no layers run elsewhere."""

    def paced(self, devices: Iterable[DeviceSpec]) -> tuple[DeviceSpec, ...]:
        """A machine's devices with the speeds that the catalog declares of virtual ones by these names."""
        return tuple(
            replace(d, pace=self.paces.get(local_name(d.id))) if d.kind is DeviceKind.HOST else d for d in devices
        )


class FleetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Stands in the store under :data:`DOCUMENT`."""

    version: str
    """Of Prism; all machines of a fleet run the same."""
    protocol: int = PROTOCOL_VERSION
    check: str
    """:meth:`prism.wire.secret.FleetSecret.check_value` of the fleet's secret."""
    settings: FleetSettings

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def settings_of(catalog: Catalog) -> FleetSettings:
    """The settings that ``catalog`` gives to every machine of its fleet."""
    settings = catalog.policy.settings()
    engines = EngineSettings(
        # without an engine pool (an ablation) each activation starts its own worker
        parked_per_device=catalog.engines.parked_per_device if settings.cluster.engine_pool else 0,
        max_per_device=catalog.engines.max_per_device,
        start_timeout_s=float(catalog.engines.start_timeout_s),
        threads=catalog.engines.threads,
        parked_bytes=int(catalog.engines.parked_bytes),
        active_bytes=int(catalog.engines.active_bytes),
        kept_models=catalog.engines.kept_models,
        load_helpers=catalog.engines.load_helpers,
        overlap=catalog.engines.overlap,
    )
    weights = WeightSettings(
        host_memory_fraction=catalog.weights.host_memory_fraction,
        disk_bytes=None if catalog.weights.disk_bytes is None else int(catalog.weights.disk_bytes),
    )
    listed = () if isinstance(catalog.devices, str) else catalog.devices
    kv = KvShare(
        host_memory_fraction=catalog.kv.host_memory_fraction if catalog.kv.keep else 0.0,
        lend_keep_fraction=catalog.kv.lend_keep_fraction if catalog.kv.lend else None,
        lend_rate_fraction=catalog.kv.lend_rate_fraction,
        long_prompts=catalog.kv.long_prompts,
        leave_s=float(catalog.kv.leave_s),
        links={d.id: _declared(d.links) for d in listed},
    )
    modes = {catalog.live_scaling.mode, *(model.live_scaling for model in catalog.models)} - {None}
    live = modes != {LiveMode.WHOLE}
    return FleetSettings(
        engines=engines,
        standby=catalog.engines.standby,
        weights=weights,
        kv=kv,
        gpu=settings.gpu,
        paces={d.id: d.pace.declared() for d in listed if d.pace is not None},
        layers_keep_fraction=catalog.kv.lend_keep_fraction if live else None,
    )


def _declared(links: LinkConfig) -> DeclaredLinks:
    host, peer, memory = (float(rate) for rate in (links.host_bytes_s, links.peer_bytes_s, links.memory_bytes_s))
    return DeclaredLinks(host=host, peer=peer, memory=memory)


def decode(document: str) -> FleetDocument:
    """Raises :class:`msgspec.ValidationError` when another version wrote it."""
    return msgspec.json.decode(document, type=FleetDocument)
