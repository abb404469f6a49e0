"""A simulated world in which an operator asks for further instances of one model, and what was told of it."""

from __future__ import annotations

from dataclasses import replace

from prism.core.events import ActivationFinished, ClusterEvent
from prism.core.settings import LiveMode, PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.engine import Engine
from prism.sim.job import Job
from prism.sim.models import known_spec
from prism.sim.recorder import RunRecorder
from prism.sim.world import World


def llama_8b() -> ModelSpec:
    return known_spec("m", "meta-llama/Llama-3.1-8B-Instruct", 1.0, 0.05)


class ScaleOut:
    """Requests of 1,500 tokens and answers of 200; only who is asked for comes, in the way ``live``."""

    def __init__(self, fleet: Cluster, spec: ModelSpec, live: LiveMode) -> None:
        self.spec = spec
        chosen = PolicySettings.named("prism")
        cluster = replace(chosen.cluster, live=live, max_replicas=1, standing_replicas=False)
        self.recorder = RunRecorder(0.002)
        self.world = World(fleet, [spec], replace(chosen, cluster=cluster), self.recorder)
        self.jobs: list[Job] = []
        self.told: list[tuple[float, ClusterEvent]] = []
        self.tell = self.world.control.tell

        def listen(event: ClusterEvent) -> None:
            self.told.append((self.world.queue.now_s, event))
            self.tell(event)

        self.world.control.tell = listen  # type: ignore[method-assign]
        self.world.join()

    def ask(self, count: int, rate: float, since_s: float = 0.0) -> None:
        self.jobs = [Job(i, self.spec, since_s + i / rate, 1500, 200) for i in range(count)]

    def run(self) -> None:
        for _ in self.world.run(iter(self.jobs)):
            pass

    def finished(self) -> list[tuple[float, ActivationFinished]]:
        return [(at_s, e) for at_s, e in self.told if isinstance(e, ActivationFinished)]

    def engines(self) -> list[Engine]:
        return [e for device in self.world.devices.values() for e in device.engines.values()]
