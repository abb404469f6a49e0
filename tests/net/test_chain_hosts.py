"""Planned chains over real links: a link between machines is sharded over their devices, which gather the shards."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from prism.policy.live.chains import LinkedDevice, SendChain, plan_chains
from prism.policy.multicast.planner import Plan
from prism.policy.multicast.schedule import Schedule, build, violations
from tests.net.cluster import Cluster

pytestmark = pytest.mark.net
NBYTES, BLOCKS, LINK_BYTES_S = 24 << 20, 16, 50e6


def planned() -> SendChain:
    """Two devices of a machine send to two of another one, over two links, and these to one device."""
    sources = [LinkedDevice(f"n{i}", "A", "leaf", LINK_BYTES_S) for i in (0, 1)]
    targets = [LinkedDevice(f"n{i}", "B", "leaf", LINK_BYTES_S) for i in (2, 3)]
    (chain,) = plan_chains(sources, [*targets, LinkedDevice("n4", "", "leaf", LINK_BYTES_S)])
    return chain


def transfers(chain: SendChain) -> list[tuple[int, int, int]]:
    """(from, to, block): each block over one shard of each link, and from where it came in to the rest of its group."""
    names = [device.name for group in chain.groups for device in group.devices]
    wanted = []
    for block in range(BLOCKS):
        for hop, group in enumerate(chain.groups[1:]):
            shards = chain.shards(hop)
            sender, receiver = shards[block % len(shards)]
            others = [device.name for device in group.devices if device.name != receiver]
            wanted += [(names.index(sender), names.index(receiver), block)]
            wanted += [(names.index(receiver), names.index(other), block) for other in others]
    return wanted


def in_steps(chain: SendChain) -> Schedule:
    """As early as each link is free, in the order of blocks."""
    left, nodes = transfers(chain), sum(len(group.devices) for group in chain.groups)
    sources = len(chain.groups[0].devices)
    held = {(node, block) for node in range(sources) for block in range(BLOCKS)}
    done: list[tuple[int, int, int, int]] = []
    step = 0
    while left:
        sending: set[int] = set()
        receiving: set[int] = set()
        now = []
        for src, dst, block in left:
            if (src, block) in held and src not in sending and dst not in receiving:
                sending.add(src)
                receiving.add(dst)
                now.append((src, dst, block))
        left = [each for each in left if each not in now]
        held |= {(dst, block) for _, dst, block in now}
        done += [(step, *each) for each in now]
        step += 1
    columns = (np.array(column, dtype=np.int32) for column in zip(*done, strict=True))
    return build("chain of shards", nodes, sources, BLOCKS, *columns)


def test_the_chain_has_a_link_of_two_shards_and_one_of_one() -> None:
    chain = planned()
    assert [chain.shards(hop) for hop in (0, 1)] == [[("n0", "n2"), ("n1", "n3")], [("n2", "n4")]]
    assert violations(in_steps(chain)) == []


@pytest.mark.parametrize("cluster", [{"count": 5}], indirect=True)
@pytest.mark.parametrize("victim", ["", "n1", "n3"])
def test_a_planned_chain_with_a_sharded_link_delivers_every_byte(cluster: Cluster, victim: str) -> None:
    """Also when the sender of one shard, or its receiver, dies on the way: the rest comes from whoever has it."""
    made = cluster.make("m", NBYTES, sources=2)
    schedule = in_steps(planned())
    names = tuple(f"n{i}" for i in range(schedule.nodes))

    def kill(start_s: float) -> None:
        if victim:
            cluster.nodes[victim].process.send_signal(signal.SIGKILL)

    chosen = Plan(names, schedule, schedule.steps * NBYTES / BLOCKS / LINK_BYTES_S, {})
    answers = cluster.run(chosen, "m", during=kill, skip=frozenset({victim}))
    assert set(answers) == {"n2", "n3", "n4"} - {victim}
    for name, answer in answers.items():
        assert answer.get("digest") == made["digest"], (name, answer)
        assert sum(nbytes for nbytes, _ in answer["by_source"].values()) <= made["nbytes"], "a byte came twice"
