"""Question: how much sooner are weights loaded when 1 or 3 other devices lend their links?

Command: python -m benchmarks.weights.load_helpers [--mb 256] [--reps 3]

Virtual devices whose links are declared: one unit to host memory, ten between devices. Helpers are processes of their
own, as parked engine workers are, each with its device. The sides take turns. The limit is that of the links: n helpers
carry n + 1 times as much as the device alone; the goal is 90% of it, making the rings and asking included.

Last result: docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.weights.load_host import make_pack, opened
from prism import memory
from prism.kv.settings import DeclaredLinks
from prism.weights.loading.help_server import help_load
from prism.weights.loading.help_wire import packet_socket
from prism.weights.loading.links import LoadLinks, device_lanes
from prism.weights.loading.loader import load
from prism.weights.store.weight_store import WeightStore

LINKS = DeclaredLinks(host=64e6, peer=640e6)
SIDES = (0, 1, 3)
DEVICE_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prism-help-"))
    host = Path(tempfile.mkdtemp(prefix="prism-help-", dir="/dev/shm"))
    spawn = multiprocessing.get_context("spawn")
    helpers = [spawn.Process(target=help_others, args=(folder, i), daemon=True) for i in range(1, max(SIDES) + 1)]
    for helper in helpers:
        helper.start()
    try:
        measure(WeightStore(folder / "store", host_directory=host), folder, options.mb << 20, options.reps)
    finally:
        for helper in helpers:
            helper.kill()
            helper.join()
        shutil.rmtree(folder)
        shutil.rmtree(host)


def socket_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.help"


def help_others(folder: Path, number: int) -> None:
    device = memory.open_device(f"host:{number}", DEVICE_BYTES, account_dir=folder / "accounts")
    partial = folder / f"{number}.partial"
    with device.register("helper") as owner, packet_socket() as listening:
        listening.bind(str(partial))
        listening.listen()
        partial.rename(socket_of(folder, number))
        while True:
            load, _ = listening.accept()
            with load:
                help_load(load, owner, lambda nbytes: device_lanes(None, LINKS.host, nbytes), lambda: "")


def measure(store: WeightStore, folder: Path, nbytes: int, reps: int) -> None:
    packed = opened(store, make_pack(store, nbytes))
    for leaf in range(packed.header.leaves):
        packed.wait_leaf(leaf)
    device = memory.open_device("host:0", 2 * nbytes, account_dir=folder / "accounts")
    owner = device.register("benchmark")
    region = owner.weight_region(packed.header.data_bytes)
    region.commit()
    while not all(socket_of(folder, number).exists() for number in range(1, max(SIDES) + 1)):
        time.sleep(0.05)
    took_s: dict[int, list[float]] = {side: [] for side in SIDES}
    helped: dict[int, float] = {}
    for _ in range(reps):
        for side in SIDES:
            helpers = {f"host:{number}": socket_of(folder, number) for number in range(1, side + 1)}
            links = LoadLinks(owner, LINKS, helpers)
            start_s = time.perf_counter()
            load(packed, region, links=links)
            took_s[side].append(time.perf_counter() - start_s)
            helped[side] = sum(links.helped_bytes.values()) / packed.header.data_bytes
    alone_s = min(took_s[0])
    print(f"{packed.header.data_bytes / 1e6:.0f} MB, the link alone {packed.header.data_bytes / LINKS.host:.2f} s")
    for side in SIDES:
        ratio, limit = alone_s / min(took_s[side]), side + 1
        spread = ", ".join(f"{seconds:.2f}" for seconds in took_s[side])
        print(
            f"{side} helpers: {min(took_s[side]):5.2f} s ({spread}), {ratio:.2f} times as fast "
            f"(limit {limit}: {ratio / limit:.0%}), {helped[side]:.0%} of the bytes over helpers"
        )
    packed.close()
    region.close()
    owner.close()


if __name__ == "__main__":
    main()
