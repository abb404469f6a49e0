"""An instance that exists on devices of the simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey, Parts, devices_of
from prism.core.views import InstanceState
from prism.scheduler.instance_life import InstanceLife
from prism.sim.activation import Activation
from prism.sim.engine import Engine
from prism.sim.queue import Alarm


@dataclass(slots=True)
class SimInstance:
    """See the module."""

    key: InstanceKey
    parts: Parts
    late: Alarm
    """Rings when it has drained for long enough."""
    life: InstanceLife = field(default_factory=InstanceLife)
    activation: Activation | None = None
    """The one that loads it, or loaded it."""
    engine: Engine | None = None

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return devices_of(self.parts)

    @property
    def whole(self) -> bool:
        """It takes requests and has all weights."""
        loaded = self.activation is None or self.activation.over
        return self.engine is not None and self.life.state is InstanceState.READY and loaded
