"""One end of a connection between two engines, made in the network namespace in which this runs.

python -m tests.net.layers_host take IP PATH            prints its address, then gives what comes to the engine at PATH
python -m tests.net.layers_host lead ADDRESS PATH TOKEN    connects, gives its end to the engine at PATH, and ends
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.node.layers_network import HeldPieces, LayersNetwork, LayersOffer, LayersWanted
from prism.remote.handing import hand_over
from prism.transfer.server import TransferServer
from prism.transfer.windows import WindowSources

SECRET = b"the fleet's"


async def take(ip: str, path: Path) -> None:
    server = TransferServer(WindowSources(), f"{ip}:0", SECRET, "peer")

    async def give(wanted: LayersWanted, sock: socket.socket) -> DeviceId:
        await asyncio.to_thread(hand_over, path, sock, wanted.device)
        return DeviceId("peer/host:0")

    def held(wanted: LayersWanted) -> list[HeldPieces]:
        key = InstanceKey(ModelName(wanted.model), Generation(1))
        return [HeldPieces(key=key, device="peer/host:0", pieces=list(range(6)), led_pieces=0, requests=0)]

    LayersNetwork(server).offer(LayersOffer(held, asyncio.sleep, give))
    print(server.address, flush=True)
    await asyncio.Event().wait()


def lead(address: str, path: Path, token: str) -> None:
    server = TransferServer(WindowSources(), "127.0.0.1:0", SECRET, "leader")
    try:
        wanted = LayersWanted("m", "leader/host:0")
        network = LayersNetwork(server)
        (there,) = network.holders({"peer": address}, wanted)
        device, sock = network.connect(there, wanted)
        with sock:
            hand_over(path, sock, device, token)
    finally:
        server.close()


if __name__ == "__main__":
    if sys.argv[1] == "take":
        asyncio.run(take(sys.argv[2], Path(sys.argv[3])))
    else:
        lead(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
