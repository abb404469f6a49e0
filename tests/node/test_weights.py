"""What an agent does for weights that are not on its machine; two machines on loopback, each with its own store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from prism.core.events import ActivationError
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import ModelShape, ModelSpec
from prism.node.instances import _why
from prism.node.mending import Mending
from prism.node.weights import NodeWeights
from prism.policy.multicast.planner import PlanRequest, plan
from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.incoming import PullOptions
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan, node_plans
from prism.weights.errors import BadPack, CorruptBlock
from prism.weights.exchange.borrowed_folders import OfferedFolders, SmallFile, _lay_out, borrow_folder, pack_elsewhere
from prism.weights.exchange.pack_fetch import PackFetch
from prism.weights.exchange.pack_windows import window_name
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.loading.loader import load
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackKey
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.kept import read_kept
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from prism.wire.commands import ActivateCommand, CopyOrder, KeepCopies
from tests.patience import PATIENCE_S, happens

SECRET = b"secret"
SHAPE = ModelShape(1, 8, 1, 1, 8, 16, 10)


class Pair:
    """Machines "a" (which has the model's folder and, once :meth:`image` was called, an engine's image) and "b"."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        rng = np.random.default_rng(1)
        tensors = {f"model.layers.{i}.w": rng.standard_normal((128, 512)).astype(np.float32) for i in range(6)}
        save_file(tensors, self.model / "model.safetensors")
        (self.model / "config.json").write_text('{"model_type": "a test"}')
        (self.model / "tokenizer.json").write_text("{}")
        (self.model / "code.py").write_text("never sent")
        self.mark = fingerprint(self.model)
        self.stores = {n: WeightStore(folder / n, host_directory=folder / f"{n}-memory") for n in "ab"}
        self.sides = {
            n: NodeWeights(n, store, bind="127.0.0.1:0", secret=SECRET, models_dir=folder / f"{n}-models")
            for n, store in self.stores.items()
        }
        self.key = PackKey(self.mark, "an image")

    def image(self) -> None:
        data = np.random.default_rng(2).bytes(1 << 20)
        with self.stores["a"].writer(self.key, plan_blocks([TensorPlan("w", "uint8", (len(data),))])) as writer:
            writer.write("w", data)
            writer.finish()

    @property
    def addresses(self) -> dict[str, str]:
        return {n: side.server.address for n, side in self.sides.items()}

    def order(self, path: Path, *plans: bytes) -> ActivateCommand:
        spec = ModelSpec(ModelName("m"), str(path), 1.0, 0.1, 100, SHAPE, 128)
        return ActivateCommand(
            command="c",
            reply_to="",
            key=InstanceKey(ModelName("m"), Generation(1)),
            parts=whole_model([DeviceId("b/host:0")]),
            reason="",
            spec=spec,
            mark=self.mark,
            plans=list(plans),
            peers={"a": self.addresses["a"]},
        )

    async def arrived(self, key: PackKey) -> None:
        await happens(lambda: not self.sides["b"].busy, "the end of all arrivals")
        here, there = self.stores["b"].get(key), self.stores["a"].get(key)
        assert here is not None and there is not None
        with here, there:
            await happens(lambda: here.complete and there.complete, "both copies")
            assert bytes(here.data) == bytes(there.data)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for side in pair.sides.values():
        side.close()


async def test_an_image_arrives_while_the_activation_goes_on(pair: Pair) -> None:
    pair.image()
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    pair.sides["a"].send_part(msgspec.msgpack.encode(parts["a"]))
    ready = await pair.sides["b"].prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
    assert ready.remote and ready.folder == str(pair.model) and ready.mark == ""
    assert pair.stores["b"].get(pair.key) is not None  # an engine may open it at once
    await pair.arrived(pair.key)
    [report] = pair.sides["b"].arriving()
    assert report.took_s is not None and report.bytes_done == report.bytes_all and set(report.sources) == {"a"}
    assert sum(pieces for pieces, _, _ in report.sources.values()) == report.pieces_all
    assert [(p.model, p.layout) for p in pair.sides["b"].packs] == [(pair.mark, "an image")]
    assert pair.sides["b"].link_bytes_s > 0
    [link] = pair.sides["b"].links()
    assert link.source == "a" and link.bytes_s > 0 and link.age_s >= 0
    assert pair.sides["a"].links() == []


async def test_without_a_plan_a_folder_that_is_here_is_used(pair: Pair) -> None:
    ready = await pair.sides["b"].prepare(pair.order(pair.model))
    assert (ready.folder, ready.remote) == (str(pair.model), False)


async def test_a_source_that_is_gone_leaves_the_folder(pair: Pair) -> None:
    pair.image()
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    pair.sides["a"].close()
    ready = await pair.sides["b"].prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
    assert not ready.remote and not pair.sides["b"].arriving()


async def test_a_block_that_is_corrupt_on_disk_comes_from_another_machine(pair: Pair) -> None:
    """Nobody was asked for it, and nobody waits."""
    damage_disk(pair)
    here = pair.stores["b"]
    written = here.directory / pack_name(pair.key)
    assert len(here.verify(pair.key)) == 1
    await pair.sides["b"].prepare(pair.order(pair.model))
    packed = here.get(pair.key)
    assert packed is not None
    with packed:
        looking = asyncio.create_task(pair.sides["b"].run())
        await happens(lambda: packed.complete, "the block")
        await pair.arrived(pair.key)
        await happens(lambda: written.exists() and not here.verify(pair.key), "its being on disk")
        looking.cancel()


def damage_disk(pair: Pair) -> WeightStore:
    """ "b" has the image on disk, with a wrong byte in it; the store as its engines open it."""
    pair.image()
    name, here = pack_name(pair.key), pair.stores["b"]
    damaged = bytearray((pair.stores["a"].directory / name).read_bytes())
    damaged[-1000] ^= 1
    (here.directory / name).parent.mkdir(exist_ok=True)
    (here.directory / name).write_bytes(damaged)
    return WeightStore(here.directory, host_directory=here.host_directory, mending_s=PATIENCE_S)


async def test_a_load_of_everything_waits_for_the_block_that_its_agent_fetches(pair: Pair) -> None:
    engines = damage_disk(pair)
    await pair.sides["b"].prepare(pair.order(pair.model))
    packed, there = engines.get(pair.key), pair.stores["a"].get(pair.key)
    assert packed is not None and there is not None
    with packed, there:
        looking = asyncio.create_task(pair.sides["b"].run())
        filled = bytearray(packed.header.data_bytes)
        await asyncio.to_thread(load, packed, filled)
        await happens(lambda: there.complete, "the copy it came from")
        assert filled == there.data
        looking.cancel()


@pytest.mark.parametrize(("others", "said"), [(True, "none of a has it"), (False, "no other machine is known")])
async def test_a_load_of_what_nobody_else_has_ends_with_the_block_and_what_to_do(
    pair: Pair, others: bool, said: str
) -> None:
    engines = damage_disk(pair)
    pair.stores["a"].rm(pair.key)
    order = pair.order(pair.model)
    await pair.sides["b"].prepare(order if others else msgspec.structs.replace(order, peers={}))
    packed = engines.get(pair.key)
    assert packed is not None
    with packed:
        looking = asyncio.create_task(pair.sides["b"].run())
        with pytest.raises(CorruptBlock, match=rf"block 'head' is corrupt.*{said}.*prism store rm {pair.mark[:12]}"):
            await asyncio.to_thread(load, packed, bytearray(packed.header.data_bytes))
        looking.cancel()


async def test_a_corrupt_block_of_what_another_process_fills_is_no_reason_to_remove_it(pair: Pair) -> None:
    """An engine fills the copy that is to come from elsewhere, too, and goes on with it; then the block is fetched."""
    engines, side = damage_disk(pair), pair.sides["b"]
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    packed = engines.get(pair.key)
    assert packed is not None
    with packed:
        await happens(lambda: any(map(packed.is_corrupt, range(packed.header.leaves))), "all that is on disk")
        fills = FillLock(packed.path)
        await happens(fills.acquire, "its being the only one that fills")
        await side.prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
        await happens(lambda: side.arriving()[0].error != "" and not side.busy, "its having found the block")
        fills.release()
        looking = asyncio.create_task(side.run())
        await happens(lambda: packed.complete, "the block, in the same memory")
        looking.cancel()


class TogetherOnly(Mending):
    """None answers before all three were asked."""

    asked = threading.Barrier(3)

    def _has(self, node: str, address: str, key: PackKey) -> bool | None:
        self.asked.wait(PATIENCE_S)
        return True if node == "a" else None


async def test_machines_are_asked_for_a_block_at_once(pair: Pair) -> None:
    damage_disk(pair)
    mending = TogetherOnly("b", pair.stores["b"], SECRET)
    mending.ordered(ModelName("m"), pair.mark, dict.fromkeys("abcd", ""))
    found = await asyncio.to_thread(mending.plan, pair.key, "here")
    assert found is not None and found[1].sources == ("a",)


class BrokenFetch(PackFetch):
    """Nothing comes, and nothing will."""

    def __init__(self, store: WeightStore, server: TransferServer, plan: NodePlan) -> None:
        super().__init__(store, server, plan, PullOptions(hold=True))

    def wait(self, on_block: object = None) -> ResidentPack:
        self.cancel()
        return super().wait()


@pytest.mark.parametrize("somebody_has_it", [True, False])
async def test_what_an_engine_may_lead_with_is_completed_when_its_reception_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, somebody_has_it: bool
) -> None:
    pair.image()
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    side, store = pair.sides["b"], pair.stores["b"]
    monkeypatch.setattr("prism.node.weights.PackFetch", BrokenFetch)
    await side.prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
    monkeypatch.undo()
    held = store.get(pair.key)
    assert held is not None
    with held:
        if not somebody_has_it:
            pair.sides["a"].close()
            await happens(lambda: store.get(pair.key) is None, "its removal")
            return
        await happens(lambda: held.complete, "the rest, in the same memory")
        await pair.arrived(pair.key)


class ThirdTime(BrokenFetch):
    """Something comes when it was tried twice."""

    tries = 0

    def __init__(self, store: WeightStore, server: TransferServer, plan: NodePlan) -> None:
        super().__init__(store, server, plan)
        type(self).tries += 1
        if self.tries == 3:
            self.start_pulling()

    def wait(self, on_block: object = None) -> ResidentPack:
        return PackFetch.wait(self) if self.tries == 3 else super().wait()


async def test_while_an_engine_leads_the_rest_of_its_weights_is_asked_for_again_and_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.image()
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    side, store = pair.sides["b"], pair.stores["b"]
    side.awaited = lambda model: True
    monkeypatch.setattr("prism.node.weights.LOOK_S", 0.01)
    monkeypatch.setattr("prism.node.weights.PackFetch", ThirdTime)
    await side.prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
    held = store.get(pair.key)
    assert held is not None
    with held:
        looking = asyncio.create_task(side.run())
        await happens(lambda: held.complete, "the rest, in the same memory")
        await pair.arrived(pair.key)
        looking.cancel()


async def test_what_did_not_come_is_removed_when_the_engine_that_awaited_it_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.image()
    parts = node_plans(plan(PlanRequest(("a",), ("b",), 1 << 20)), "s", window_name(pair.key), pair.addresses)
    side, store = pair.sides["b"], pair.stores["b"]
    here = [True]
    side.awaited = lambda model: here[0]
    monkeypatch.setattr("prism.node.weights.LOOK_S", 0.01)
    monkeypatch.setattr("prism.node.weights.PackFetch", BrokenFetch)
    await side.prepare(pair.order(pair.model, msgspec.msgpack.encode(parts["b"])))
    looking = asyncio.create_task(side.run())
    await happens(lambda: len(side.arriving()) > 2, "its being tried again")
    assert store.get(pair.key) is not None
    here[0] = False
    await happens(lambda: store.get(pair.key) is None, "its removal")
    looking.cancel()


async def test_a_folder_that_is_nowhere_is_an_error_that_names_it(pair: Pair) -> None:
    with pytest.raises(SourceLost, match=r"/no/such/model is not on this machine.*a: does not have it"):
        await pair.sides["b"].prepare(pair.order(Path("/no/such/model")))


async def test_small_files_are_borrowed_once_and_code_is_not(pair: Pair, tmp_path: Path) -> None:
    peers = {"gone": "127.0.0.1:1", "a": pair.addresses["a"]}
    lent = await asyncio.to_thread(borrow_folder, str(pair.model), pair.mark, tmp_path / "m", peers, SECRET, "b")
    assert {f.name for f in lent.iterdir()} == {"config.json", "tokenizer.json"}
    assert borrow_folder(str(pair.model), pair.mark, tmp_path / "m", {}, SECRET, "b") == lent
    with pytest.raises(SourceLost):
        await asyncio.to_thread(borrow_folder, str(pair.model), "another", tmp_path / "m", peers, SECRET, "b")


async def test_files_that_nobody_packed_are_packed_by_who_has_them(pair: Pair) -> None:
    order = pair.order(pair.model)
    assert await pair.sides["b"]._fetch_files(order)
    await pair.arrived(PackKey(pair.mark))
    found = await asyncio.to_thread(pack_elsewhere, "/no/such/model", pair.mark, order.peers, SECRET, "b")
    assert found is None


def test_what_is_sent_of_a_folder_is_bounded_and_names_are_no_paths(tmp_path: Path) -> None:
    folders = OfferedFolders(WeightStore(tmp_path / "s", host_directory=tmp_path / "h"))
    assert folders.small_files("relative", "x") == folders.small_files(str(tmp_path), "x") == []
    for name in ("../config.json", "/etc/x", ".hidden"):
        with pytest.raises(PeerError, match="a file called"):
            _lay_out(tmp_path / "m" / "mark", [SmallFile(name, b"")])
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("error", [SourceLost("nobody has it"), PeerError("a", "refused"), BadPack("x", "is broken")])
def test_an_activation_without_weights_says_so(error: Exception) -> None:
    """Whether the machines or the pack are the reason: the scheduler does not take it for a broken engine."""
    cause, detail = _why(error, InstanceKey(ModelName("m"), Generation(1)))
    assert cause is ActivationError.WEIGHTS_MISSING and detail == str(error)


# --- the parameter pool ---


def pool_order(**more: object) -> KeepCopies:
    return KeepCopies(**{"keep": [], "spare_s": 1e9, **more})  # type: ignore[arg-type]


async def test_a_copy_comes_from_the_own_disk_or_from_another_machine(pair: Pair) -> None:
    pair.image()
    copy = CopyOrder(mark=pair.mark, layout=pair.key.layout, nbytes=1 << 20, model="m")
    pair.sides["a"].keep_copies(pool_order(fetch=[copy, copy]))
    whole = asyncio.create_task(pair.sides["a"].run())
    try:
        await happens(lambda: any(p.in_memory for p in pair.sides["a"].packs), "the copy in a's memory")
        sent = msgspec.structs.replace(copy, source="a", address=pair.addresses["a"])
        pair.sides["b"].keep_copies(pool_order(fetch=[sent]))
        await happens(lambda: pair.sides["b"].packs, "the copy in b's memory")
        await pair.arrived(pair.key)
    finally:
        whole.cancel()


async def test_what_the_fleet_keeps_leaves_last_and_spare_copies_leave(pair: Pair) -> None:
    pair.image()
    kept, store = pair.sides["a"].copies, pair.stores["a"]
    opened = store.get(pair.key)
    assert opened is not None and kept.host_bytes > 0
    kept.tidy()  # no controller has said anything
    pair.sides["a"].keep_copies(pool_order(keep=[(pair.mark, pair.key.layout)], spare_s=-1.0))
    assert read_kept(store.host_directory) == {pair.key}
    opened.close()
    kept.tidy()
    assert store.where(pair.mark).host, "it is the fleet's"
    with store.get(pair.key) as _:  # type: ignore[union-attr]
        pair.sides["a"].keep_copies(pool_order(spare_s=-1.0))
        kept.tidy()
        assert store.where(pair.mark).host, "somebody uses it"
    kept.tidy()
    assert not store.where(pair.mark).host and store.where(pair.mark).disk
