"""Watch a Prism server during a replay through its admin API: queues, memory, which model is where."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from time import time
from typing import Any, Final

import httpx
import msgspec

from prism.trace.report import Residence, Sample, Timeline

EVERY_S: Final = 1.0


_Key = tuple[str, str, int]
"""Model, device, and which of its instances there."""


def _key(model: str, device: str, replica: dict[str, Any]) -> _Key:
    return model, device, int(replica.get("generation") or 0)


@dataclass(slots=True)
class _Stay:
    model: str
    device: str
    start_s: float
    ready_s: float | None = None
    end_s: float | None = None
    reason: str = ""


@dataclass(slots=True)
class TimelineBuilder:
    """Makes a timeline of what the admin API says at successive moments. Times are seconds from the run's start."""

    samples: list[Sample] = field(default_factory=list)
    device_bytes: dict[str, int] = field(default_factory=dict)
    _stays: list[_Stay] = field(default_factory=list)
    zero_unix_s: float | None = None
    """When the run started; with it, the server's own times of changes between two looks are used."""
    _open: dict[_Key, _Stay] = field(default_factory=dict)

    def add(self, t_s: float, models: list[dict[str, Any]], devices: list[dict[str, Any]]) -> None:
        """One look at the server: the lists of ``GET /admin/models`` and ``GET /admin/devices``."""
        device_queued: dict[str, int] = {}
        present: set[_Key] = set()
        last_s = self.samples[-1].t_s if self.samples else -math.inf
        for model in models:
            for replica in model.get("replicas") or []:
                for device in replica.get("devices") or []:
                    device_queued[device] = device_queued.get(device, 0) + int(replica.get("waiting") or 0)
                    present.add(_key(model["name"], device, replica))
                    self._seen(self._changed_s(replica, last_s, t_s), model["name"], device, replica)
        for key in [key for key in self._open if key not in present]:
            self._open.pop(key).end_s = t_s
        self.device_bytes.update({d["id"]: int(d["capacity_bytes"]) for d in devices if d.get("capacity_bytes")})
        self.samples.append(
            Sample(
                t_s=t_s,
                queued={m["name"]: int(m.get("waiting") or 0) for m in models},
                running={m["name"]: int(m.get("running") or 0) for m in models},
                mapped_bytes={d["id"]: _bytes(d, "weight_bytes") + _bytes(d, "kv_bytes") for d in devices},
                model_bytes={m["name"]: _bytes(m, "kv_bytes") for m in models},
                device_queued=device_queued,
            )
        )

    def _changed_s(self, replica: dict[str, Any], last_s: float, t_s: float) -> float:
        """When the replica came into its state: as the server says, if that lies since the last look; else now."""
        since_s = replica.get("since_s")
        if self.zero_unix_s is None or not isinstance(since_s, int | float):
            return t_s
        return min(max(since_s - self.zero_unix_s, last_s), t_s) if math.isfinite(last_s) else t_s

    def _seen(self, t_s: float, model: str, device: str, replica: dict[str, Any]) -> None:
        key = _key(model, device, replica)
        stay = self._open.get(key)
        if stay is None:
            stay = _Stay(model, device, t_s, reason=_reason(replica.get("reason")))
            self._stays.append(stay)
            self._open[key] = stay
        if stay.ready_s is None and replica.get("state") == "ready":
            stay.ready_s = t_s

    def build(self) -> Timeline:
        """What was seen so far."""
        stays = [Residence(**{name: getattr(s, name) for name in _Stay.__slots__}) for s in self._stays]
        return Timeline(samples=self.samples, residences=stays, device_bytes=self.device_bytes)


def joined(earlier: Timeline | None, later: Timeline) -> Timeline:
    """The timelines of two parts of one replay. What was there at the end of the first ends there."""
    if earlier is None or not earlier.samples:
        return later
    end_s = earlier.samples[-1].t_s
    stays = [msgspec.structs.replace(s, end_s=end_s if s.end_s is None else s.end_s) for s in earlier.residences]
    return Timeline(
        samples=sorted([*earlier.samples, *later.samples], key=lambda sample: sample.t_s),
        residences=[*stays, *later.residences],
        device_bytes={**earlier.device_bytes, **later.device_bytes},
    )


class Watcher:
    """Polls the admin API from a thread of its own. ``problem`` says why there is nothing, when there is nothing."""

    def __init__(self, url: str, key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=5.0)
        self._builder = TimelineBuilder()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""
        self.missed = 0

    def available(self) -> bool:
        """Whether the server has an admin API that takes our key; ``problem`` says why not."""
        try:
            self._look(0.0, keep=False)
        except (httpx.HTTPError, ValueError, KeyError) as exc:
            self.problem = f"the server's admin API cannot be read: {exc}"
        return not self.problem

    def server_facts(self) -> dict[str, Any]:
        """What the server says of itself: version, devices. For the report."""
        found: dict[str, Any] = {}
        for name in ("status", "devices"):
            try:
                found[name] = self._get(name)
            except (httpx.HTTPError, ValueError):
                continue
        return {"version": found.get("status", {}).get("version"), "devices": found.get("devices", {}).get("devices")}

    def start(self, zero_unix_s: float) -> None:
        """Look every second from now on; times count from ``zero_unix_s``."""
        self._builder.zero_unix_s = zero_unix_s
        self._thread = threading.Thread(target=self._loop, args=(zero_unix_s,), name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> Timeline:
        """What was seen."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=6.0)
        self._client.close()
        return self._builder.build()

    def _loop(self, zero_unix_s: float) -> None:
        while not self._stop.is_set():
            at_s = time()
            try:
                self._look(at_s - zero_unix_s)
            except (httpx.HTTPError, ValueError, KeyError):
                self.missed += 1
            self._stop.wait(max(0.0, EVERY_S - (time() - at_s)))

    def _look(self, t_s: float, keep: bool = True) -> None:
        models, devices = (self._get(name)[name] for name in ("models", "devices"))
        if keep:
            self._builder.add(t_s, models, devices)

    def _get(self, what: str) -> dict[str, Any]:
        reply = self._client.get(f"{self._base}/admin/{what}")
        reply.raise_for_status()
        found = reply.json()
        if not isinstance(found, dict):
            raise ValueError(f"/admin/{what} is not an object")
        return found


def _bytes(item: dict[str, Any], name: str) -> int:
    return int(item.get(name) or 0)


def _reason(value: Any) -> str:
    return str(value.get("code", "")) if isinstance(value, dict) else str(value or "")
