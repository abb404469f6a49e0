"""Who helps whom to load, on one machine: parked workers of devices that load nothing and help nobody."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prism.core.ids import DeviceId, kind_and_index, local_name
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.commands import Nudge
from prism.engine.link import WorkerLink
from prism.kv.settings import read_kv_settings
from prism.memory.gpus import gpus_if_any
from prism.policy.load_help import share_helpers


class LoadHelpers:
    """``most`` helpers of each device that loads, from now on; 0: none. Asked in one thread."""

    def __init__(self, devices: Collection[DeviceSpec], account_dir: Path, most: int) -> None:
        self._devices, self._account_dir, self.most = tuple(devices), account_dir, most
        self._loading: list[DeviceId] = []
        self._helping: dict[DeviceId, WorkerLink] = {}
        on_gpus = any(device.kind is DeviceKind.CUDA for device in self._devices)
        self._nvlinks = self._joined() if on_gpus else None

    @contextmanager
    def during(
        self, loading: Sequence[DeviceId], parked_on: Callable[[DeviceId], WorkerLink | None]
    ) -> Iterator[Mapping[DeviceId, Sequence[WorkerLink]]]:
        """While the block runs these devices load; yields who helps each. Who helps others from them stops: their links
        are wanted."""
        for device in loading:
            if (link := self._helping.get(device)) is not None:
                link.send(Nudge())
        self._loading += loading
        helpers = self._choose(loading, parked_on)
        chosen = {link.device: link for links in helpers.values() for link in links}
        self._helping.update(chosen)
        try:
            yield helpers
        finally:
            for device in loading:
                self._loading.remove(device)
            for device in chosen:
                del self._helping[device]

    def _choose(
        self, loading: Sequence[DeviceId], parked_on: Callable[[DeviceId], WorkerLink | None]
    ) -> dict[DeviceId, list[WorkerLink]]:
        if self.most == 0:
            return {device: [] for device in loading}
        busy = {*self._loading, *self._helping}
        parked = {d.id: link for d in self._devices if d.id not in busy and (link := parked_on(d.id)) is not None}
        shared = share_helpers(loading, list(parked), self._reached(), self.most)
        return {device: [parked[helper] for helper in helpers] for device, helpers in shared.items()}

    def _reached(self) -> Mapping[DeviceId, frozenset[DeviceId]]:
        """Devices whose memory each can read over a link that is not its own to the host."""
        if self._nvlinks is not None:
            return self._nvlinks
        links = read_kv_settings(self._account_dir).links
        every = frozenset(device.id for device in self._devices)
        playing = [
            d.id
            for d in self._devices
            if (name := local_name(d.id)) in links and 0 < links[name].host < links[name].peer
        ]
        return {device: every - {device} for device in playing}

    def _joined(self) -> dict[DeviceId, frozenset[DeviceId]]:
        """As NVLink joins the GPUs."""
        links = {gpu.index: set(gpu.nvlinks) for gpu in gpus_if_any().gpus}
        number = {device.id: kind_and_index(local_name(device.id))[1] for device in self._devices}
        return {
            device: frozenset(other for other, index in number.items() if index in links.get(mine, ()))
            for device, mine in number.items()
        }
