"""What the cluster scheduler knows, in one place: models, instances, devices, demand.

Everybody may read; each part is changed by its owner only (the table in docs/policies.md).
"""

from __future__ import annotations

from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.core.settings import ClusterSettings, LiveMode
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.policy.demand import expected_remaining_s
from prism.policy.live.able import whole_only
from prism.policy.pressure import least_kv_bytes
from prism.scheduler.device_times import DeviceTimes
from prism.scheduler.fleet import Fleet
from prism.scheduler.rates import DemandRates
from prism.scheduler.records import InstanceRecord, ModelRecord


class Books:
    """Of one fleet."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.fleet = Fleet()
        self.fleet_known = True
        """Machines that are up, and what serves there, are in these books: False only while a scheduler takes over."""
        self.rates = DemandRates(settings, self.fleet)
        self.models: dict[ModelName, ModelRecord] = {}
        self.catalog_version = 0
        """Another one whenever models come, change or go."""
        self.times = DeviceTimes(self.fleet, self.models, settings)
        self.loaded: dict[InstanceKey, InstanceRecord] = {}
        """All instances, in whatever state."""
        self.several: set[ModelName] = set()
        """Models with more than one instance, in whatever state: only they can have spare ones."""
        self.turned_away: frozenset[ModelName] = frozenset()
        """Models that are not served for the time being (:mod:`prism.scheduler.triage`)."""
        self.last_devices: tuple[DeviceId, ...] = ()
        """Of the instance started last."""

    def loaded_models(self) -> list[ModelRecord]:
        """Every model with an instance in whatever state, in the order in which they were started."""
        return list({i.model: self.models[i.model] for i in self.loaded.values()}.values())

    def active(self, model: ModelName) -> list[InstanceRecord]:
        """The model's instances that serve."""
        return self.models[model].in_state(InstanceState.READY)

    def shard_kv_bytes(self, spec: ModelSpec) -> int:
        """Least KV memory that one shard of the model needs beside its weights."""
        return least_kv_bytes(spec, self.settings.min_kv_tokens)

    def idle_left_s(self, model: ModelRecord, idle_s: float) -> float:
        """How much longer the model, idle for ``idle_s``, stays so on average."""
        return expected_remaining_s(idle_s, model.idle, self.rates.pool_idle)

    def live_mode(self, model: ModelRecord) -> LiveMode:
        """When further instances of the model are to begin to serve."""
        return model.spec.live or self.settings.live

    def whole_only(self, model: ModelRecord) -> str:
        """Why instances of the model are to serve with all their weights only; empty: they may serve earlier. After an
        engine that failed the next one has nothing but itself to fail by."""
        failed = "its last engine failed" if model.failures or model.stillborn else ""
        return whole_only(model.spec) or model.whole_only or failed

    def activation_s(self, model: ModelRecord) -> float:
        """Expected time of an activation of the model."""
        return model.activation_s if model.activation_s is not None else self.settings.activation_guess_s
