"""One machine of a test or benchmark: a store and a weight server, driven by JSON lines on standard input.

``{"do": "make", ...}`` packs seeded random weights, ``join`` takes part in a plan as a source, ``fetch`` receives (the
answer comes when it is complete), ``digest`` tells what came, ``drop`` forgets the pack, ``quit`` ends. Every command
is answered by one line.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from prism.transfer.incoming import PullOptions
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.server import ServerOptions, TransferServer
from prism.transfer.session import NodePlan
from prism.weights.exchange.pack_fetch import PackFetch
from prism.weights.exchange.pack_windows import PackWindows
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackKey
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore

SECRET = b"a secret for tests"


class Worker:
    def __init__(self, name: str, ip: str, folder: Path, host_folder: Path, offered: list[str]) -> None:
        self.name, self.folders = name, (folder, host_folder)
        self.store = WeightStore(folder, host_directory=host_folder)
        networks: list[OneSidedNetwork] = []
        if "nixl" in offered:
            from prism.transfer.nixl_network import NixlNetwork

            networks.append(NixlNetwork(name))
        self.server = TransferServer(PackWindows(self.store), f"{ip}:0", SECRET, name, ServerOptions(networks))
        self.held: list[Any] = []
        self.fetched: ResidentPack | None = None

    def make(self, model: str, nbytes: int, tensors: int, seed: int) -> dict[str, Any]:
        key = PackKey(model)
        plans = [TensorPlan(f"layers.{i}.weight", "uint8", (nbytes // tensors,)) for i in range(tensors)]
        rng = np.random.default_rng(seed)
        with self.store.writer(key, plan_blocks(plans)) as writer:
            for plan in plans:
                writer.write(plan.name, rng.integers(0, 256, plan.nbytes, dtype=np.uint8).tobytes())
            writer.finish()
        packed = self.store.get(key)
        assert packed is not None
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        self.held.append(packed)
        return {"nbytes": packed.header.data_bytes, "digest": xxhash.xxh3_128_hexdigest(packed.data)}

    def join(self, plan: str) -> dict[str, Any]:
        self.server.join_session(msgspec.json.decode(plan, type=NodePlan))
        return {}

    def fetch(self, plan: str, at_s: float, dead_s: float, ready: bool) -> dict[str, Any]:
        """Starts at ``at_s`` (the monotonic clock, which hosts in namespaces share), with memory and connections made
        before if ``ready`` (``spare_s`` tells how long before). ``end_s`` is on the same clock; ``cpu_s`` is what this
        process took in between, for its sends too."""
        blocks: list[float] = []
        decoded = msgspec.json.decode(plan, type=NodePlan)
        try:
            if not ready:
                time.sleep(max(0.0, at_s - time.monotonic()))
            fetch = PackFetch(self.store, self.server, decoded, PullOptions(dead_s=dead_s, hold=ready))
            spare_s = at_s - time.monotonic()
            time.sleep(max(0.0, spare_s))
            before_s = _cpu_s()
            fetch.start_pulling()
            packed = fetch.wait(lambda index, block: blocks.append(time.monotonic()))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        progress = fetch.progress
        answer = {
            "end_s": blocks[-1],
            "cpu_s": _cpu_s() - before_s,
            "spare_s": spare_s,
            "blocks_s": blocks,
            "pieces_s": fetch.arrived_s,
            "reroutes": [[r.piece, r.source, r.reason, r.at_s] for r in progress.reroutes],
            "by_source": progress.by_source,
            "timed": progress.timed,
        }
        self.fetched = packed
        return answer

    def digest(self) -> dict[str, Any]:
        """Of what was fetched last. Asked for when all have it: hosts share the processors."""
        assert self.fetched is not None
        digest = xxhash.xxh3_128_hexdigest(self.fetched.data)
        self.fetched.close()
        self.fetched = None
        return {"digest": digest}

    def drop(self, model: str, session: str) -> dict[str, Any]:
        self.server.leave_session(session)
        self.store.rm(PackKey(model))
        return {}


def _cpu_s() -> float:
    """Processor time of this process so far."""
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    name, ip, folder, host_folder = sys.argv[1:5]
    worker = Worker(name, ip, Path(folder), Path(host_folder), sys.argv[5:])
    print(json.dumps({"address": worker.server.address}), file=answers)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            if do == "quit":
                break
            print(json.dumps(getattr(worker, do)(**command)), file=answers)
    finally:
        worker.server.close()
        for path in worker.folders:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
