"""When the weights of a scale-out are where, by system: Prism's own planners, and the rivals' ways of loading.

======================= ============================================================================================
pipelines               lambda-Scale: the production planner (:func:`prism.policy.live.pipelines.plan_live`), warm
                        machines by :func:`~prism.policy.live.pipelines.plan_warm`; receivers serve together meanwhile
zigzag                  BlitzScale: chains (:func:`prism.policy.multicast.chains.plan_chains`), pairs meanwhile
serverlessllm           from the own host memory while its cache has the model, else from the own SSD; stop-the-world
allcache                from the own host memory, always; stop-the-world
faasnet                 a binary tree over the network; stop-the-world
nccl                    a pipelined ring behind the set-up of a process group; stop-the-world
ideal                   in no time
======================= ============================================================================================

Systems that send over the network take the weights from instances that serve, else from a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from prism.policy.live.choice import STAGE_WAIT, Receiver
from prism.policy.live.pipelines import ExecutionPipeline, LiveRequest, plan_live, plan_warm
from prism.policy.multicast.chains import LinkedDevice, plan_chains
from prism.policy.multicast.estimate import NodeLink, finish_times
from prism.policy.multicast.planner import PlanRequest
from prism.policy.multicast.simple import binary_tree


class LiveSystem(StrEnum):
    PRISM = "prism"
    """Chosen per scale-out (:func:`prism.policy.live.choice.choose_scaling`)."""
    PIPELINES = "pipelines"
    ZIGZAG = "zigzag"
    MULTICAST = "multicast"
    """The pipelines' multicast, and instances that serve with their last block: Prism before live scaling."""
    SERVERLESSLLM = "serverlessllm"
    ALLCACHE = "allcache"
    FAASNET = "faasnet"
    NCCL = "nccl"
    IDEAL = "ideal"


@dataclass(frozen=True, slots=True)
class LiveLinks:
    """Of each machine, bytes/s."""

    network_bytes_s: float = 50e9
    host_bytes_s: float = 64e9
    """From host memory to all of an instance's devices together."""
    disk_bytes_s: float = 5e9
    overhead_s: float = 0.001
    """Per block and hop."""
    group_setup_s: float = 0.3
    """Of an NCCL group ("up to hundreds of ms", lambda-Scale 7.2)."""
    hop_s: float = 0.0005
    """Activations from one stage to the next."""
    stage_wait: float = STAGE_WAIT
    """See :data:`prism.policy.live.choice.STAGE_WAIT`."""


@dataclass(frozen=True, slots=True)
class ScaleOutRequest:
    """What comes where."""

    nbytes: int
    layers: int
    sources: tuple[str, ...]
    """Machines that have it, best first; none: it is on disks only."""
    receivers: tuple[str, ...]
    warm: frozenset[str] = frozenset()
    """Receivers that have it in host memory."""
    most_sources: int = 4
    """lambda-Scale's k."""
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class LiveArrivals:
    """Times count from the decision."""

    receivers: Mapping[str, Receiver]
    ready_s: Mapping[int, float] = field(default_factory=dict)
    """Pipeline -> when its members together hold the model; none: nobody serves before its last byte."""


WARM_BLOCKS: Final = 16


def plan_arrivals(system: LiveSystem, wanted: ScaleOutRequest, links: LiveLinks) -> LiveArrivals:
    """Raises ``ValueError`` for :attr:`LiveSystem.PRISM`, which is a choice between others."""
    match system:
        case LiveSystem.PRISM:
            raise ValueError("prism chooses one of the others")
        case LiveSystem.IDEAL:
            return _all_at(dict.fromkeys(wanted.receivers, 0.0))
        case LiveSystem.ALLCACHE:
            return _all_at(dict.fromkeys(wanted.receivers, wanted.nbytes / links.host_bytes_s))
        case LiveSystem.SERVERLESSLLM:
            return _all_at({n: _own_s(wanted, links, n) for n in wanted.receivers})
        case LiveSystem.FAASNET | LiveSystem.NCCL if not wanted.sources:
            return _all_at(dict.fromkeys(wanted.receivers, wanted.nbytes / links.disk_bytes_s))
        case LiveSystem.FAASNET:
            return _tree(wanted, links)
        case LiveSystem.NCCL:
            ring_s = wanted.nbytes / links.network_bytes_s
            return _all_at(dict.fromkeys(wanted.receivers, links.group_setup_s + ring_s))
        case LiveSystem.ZIGZAG:
            return _chained(wanted, links)
        case LiveSystem.PIPELINES:
            return _piped(wanted, links)
        case LiveSystem.MULTICAST:
            return _all_at({node: r.alone_s for node, r in _piped(wanted, links).receivers.items()})


def _own_s(wanted: ScaleOutRequest, links: LiveLinks, node: str) -> float:
    return wanted.nbytes / (links.host_bytes_s if node in wanted.warm else links.disk_bytes_s)


def _all_at(alone_s: Mapping[str, float]) -> LiveArrivals:
    return LiveArrivals({node: Receiver(at_s, at_s) for node, at_s in alone_s.items()})


def _tree(wanted: ScaleOutRequest, links: LiveLinks) -> LiveArrivals:
    """From one source, in 16 blocks."""
    schedule = binary_tree(1 + len(wanted.receivers), WARM_BLOCKS)
    rates = [NodeLink(links.network_bytes_s, links.network_bytes_s)] * schedule.nodes
    times = finish_times(schedule, rates, wanted.nbytes / WARM_BLOCKS, links.overhead_s)
    return _all_at({node: float(times[1 + i]) for i, node in enumerate(wanted.receivers)})


def _chained(wanted: ScaleOutRequest, links: LiveLinks) -> LiveArrivals:
    """Layer by layer along chains of equal links; without a source each machine reads its own disk."""
    if not wanted.sources:
        return _from_disks(wanted, links)
    rate, layer_s = links.network_bytes_s, wanted.nbytes / wanted.layers / links.network_bytes_s + links.overhead_s

    def device(node: str) -> LinkedDevice:
        return LinkedDevice(node, "", "", rate)

    cold = [n for n in wanted.receivers if n not in wanted.warm]
    found = {n: _loaded(wanted, links.host_bytes_s) for n in wanted.receivers if n in wanted.warm}
    for chain in plan_chains([device(s) for s in wanted.sources], [device(n) for n in cold]):
        for hop, group in enumerate(chain.groups[1:]):
            for one in group.devices:
                found[one.name] = Receiver((hop + 1) * layer_s, (hop + wanted.layers) * layer_s)
    return LiveArrivals(found)


def _piped(wanted: ScaleOutRequest, links: LiveLinks) -> LiveArrivals:
    """Warm machines load from their own memory, the others get it by multicast."""
    warm = [n for n in wanted.receivers if n in wanted.warm]
    cold = tuple(n for n in wanted.receivers if n not in wanted.warm)
    made: list[ExecutionPipeline] = []
    if warm:
        made += plan_warm(warm, WARM_BLOCKS, wanted.nbytes, links.host_bytes_s)
    if cold and wanted.sources:
        sources = wanted.sources[: wanted.most_sources]
        default = NodeLink(links.network_bytes_s, links.network_bytes_s)
        request = PlanRequest(
            sources, cold, wanted.nbytes, default_link=default, overhead_s=links.overhead_s, blocks=wanted.blocks
        )
        made += plan_live(LiveRequest(request)).pipelines
    elif cold:
        made += plan_warm(cold, WARM_BLOCKS, wanted.nbytes, links.disk_bytes_s)
    return _of_pipelines(made)


def _of_pipelines(made: Sequence[ExecutionPipeline]) -> LiveArrivals:
    receivers = {
        seat.node: Receiver(pipeline.ready_s, alone_s, number)
        for number, pipeline in enumerate(made)
        for seat, alone_s in pipeline.alone_s.items()
    }
    return LiveArrivals(receivers, {number: pipeline.ready_s for number, pipeline in enumerate(made)})


def _from_disks(wanted: ScaleOutRequest, links: LiveLinks) -> LiveArrivals:
    rates = {n: links.host_bytes_s if n in wanted.warm else links.disk_bytes_s for n in wanted.receivers}
    return LiveArrivals({node: _loaded(wanted, rate) for node, rate in rates.items()})


def _loaded(wanted: ScaleOutRequest, bytes_s: float) -> Receiver:
    whole_s = wanted.nbytes / bytes_s
    return Receiver(whole_s / wanted.layers, whole_s)
