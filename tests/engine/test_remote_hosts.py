"""An engine leads its requests over one of another machine: token for token, and alone when the cable is pulled.

The connection is made in two network namespaces by what agents use; the engines it is handed to need no network.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from prism.remote.handing import PREFIX
from prism.remote.orders import RouteStop
from tests.engine.rig import Rig, prompt, tokenized
from tests.net.netns import Hosts, why_not
from tests.patience import PATIENCE_S, happens

pytestmark = [pytest.mark.net, pytest.mark.engine]
NEW = 24


def connect(hosts: Hosts, peer: Path, leader: Path, token: str) -> None:
    """Hands both engines their ends of a connection from host 1 to host 0."""
    module = [sys.executable, "-m", "tests.net.layers_host"]
    command = hosts.command(0, [*module, "take", hosts.ip(0), str(peer)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taker:
        try:
            assert taker.stdout is not None
            address = taker.stdout.readline().strip()
            assert address, "the peer's side did not start"
            done = hosts.command(1, [*module, "lead", address, str(leader), token])
            subprocess.run(done, check=True, timeout=PATIENCE_S)
        finally:
            taker.kill()


@pytest.mark.parametrize("tp", [1, 2])
async def test_layers_on_another_machine_until_its_cable_is_pulled(rig: Rig, tp: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(count=2, mbit=400.0) as hosts:
        spec = rig.spec("demo-llama", tp)
        first = await rig.activate(spec, rig.devices[-tp:])
        await first.deactivate()  # it leaves an image
        whole = await rig.activate(spec, rig.devices[:tp])
        leader = await rig.activate(spec, rig.devices[-tp:])
        peer_path, leader_path = rig.folder / "whole.layers", rig.folder / "leader.layers"
        for device in rig.devices[:tp]:
            rig.pool.memory[device].offer(0)
        await whole.remote.serve_layers(peer_path)
        await leader.remote.serve_layers(leader_path)
        await asyncio.to_thread(connect, hosts, peer_path, leader_path, "t")
        over = [RouteStop("", 0, 1), RouteStop(f"{PREFIX}t", 1, 4), RouteStop("", 4, 6)]
        await leader.remote.set_route(over, [RouteStop("", 0, 6)])
        await happens(lambda: leader.load and leader.load.remote and leader.load.remote.peers == ["peer/host:0"], "it")
        prompts = [prompt(80 + i, 30 + 11 * i) for i in range(3)]
        rids = [rig.submit(leader, tokenized("", p, NEW)) for p in prompts]
        for rid, p in zip(rids, prompts, strict=True):
            assert await rig.answer(rid) == rig.reference("demo-llama", p, NEW)
        assert leader.load and leader.load.remote and leader.load.remote.peers, "all that over the network"
        rid = rig.submit(leader, tokenized("", prompts[0], 8 * NEW))
        await rig.wait_tokens(rid, 3)
        await asyncio.to_thread(hosts.set_link, 0, False)
        assert await rig.answer(rid) == rig.reference("demo-llama", prompts[0], 8 * NEW)
        await happens(
            lambda: leader.load and leader.load.remote and not leader.load.remote.peers, "the end of the peer"
        )
        await leader.deactivate()
        await whole.deactivate()
