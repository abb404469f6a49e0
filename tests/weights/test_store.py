"""The store: whole packs or none, shared copies, budgets, damage that is named and repaired."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.transfer.errors import SourceLost
from prism.weights.errors import BadPack, CorruptBlock, IncompletePack, StoreFull
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import open_copy
from prism.weights.store.kept import read_kept, write_kept
from prism.weights.store.reclaim import ReclaimCandidate, choose_victims
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import SourceRates, StartKind, Tier
from tests.weights.conftest import KEY, Contents, contents_of, damage_file, write_pack


def read_all(store: WeightStore, key: PackKey = KEY) -> Contents:
    packed = store.get(key)
    assert packed is not None
    with packed:
        return {t.name: bytes(packed.tensor(t.name)[1]) for t in packed.header.tensors}


def test_what_was_written_is_read(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    assert read_all(store) == contents
    assert store.verify(KEY) == []


def test_a_pack_that_is_not_there(store: WeightStore) -> None:
    assert store.get(KEY) is None
    assert store.header(KEY) is None
    assert store.rm(KEY) == 0
    with pytest.raises(KeyError):
        store.verify(KEY)


def test_pieces_in_any_order(store: WeightStore) -> None:
    contents = contents_of()
    plans = [TensorPlan(name, "uint8", (len(data),)) for name, data in contents.items()]
    with store.writer(KEY, plan_blocks(plans)) as writer:
        for name, data in reversed(contents.items()):
            writer.write(name, data[:777])
            writer.write(name, data[777:], 777)
        writer.finish()
    assert read_all(store) == contents
    assert store.verify(KEY) == []


@pytest.mark.parametrize("last", ["model.embed_tokens.weight", "model.rotary_emb.inv_freq", "model.layers.0.w.weight"])
def test_a_small_tensor_that_comes_last_keeps_its_bytes(store: WeightStore, last: str) -> None:
    sizes = {
        "model.embed_tokens.weight": 100_000,
        "model.rotary_emb.inv_freq": 64,
        "model.layers.0.w.weight": 2_000_000,
    }
    contents = {name: bytes([n + 1]) * size for n, (name, size) in enumerate(sizes.items())}
    plans = [TensorPlan(name, "uint8", (size,)) for name, size in sizes.items()]
    with store.writer(KEY, plan_blocks(plans)) as writer:
        for name in sorted(contents, key=lambda name: name == last):
            writer.write(name, contents[name])
        writer.finish()
    assert read_all(store) == contents
    assert store.verify(KEY) == []


def test_nothing_is_visible_before_the_end_or_after_an_error(store: WeightStore) -> None:
    with store.writer(KEY, plan_blocks([TensorPlan("a", "uint8", (10,)), TensorPlan("b", "uint8", (10,))])) as writer:
        writer.write("a", bytes(10))
        assert store.get(KEY) is None
        with pytest.raises(ValueError, match="tensor of 10"):
            writer.write("b", bytes(11))
        with pytest.raises(KeyError):
            writer.write("c", b"")
        with pytest.raises(IncompletePack, match="b"):
            writer.finish()
    assert store.ls() == []
    assert [p for p in store.directory.rglob("*") if p.is_file() and not p.name.startswith(".lock")] == []


def test_aliases_name_the_same_bytes(store: WeightStore) -> None:
    plan = TensorPlan("embed_tokens.weight", "uint8", (4,), (), ("lm_head.weight",))
    with store.writer(KEY, plan_blocks([plan])) as writer:
        writer.write("embed_tokens.weight", b"tied")
        writer.finish()
    packed = store.get(KEY)
    assert packed is not None
    with packed:
        assert bytes(packed.tensor("lm_head.weight")[1]) == b"tied"
        with pytest.raises(KeyError):
            packed.tensor("other")


def test_two_users_share_one_copy(packed_store: tuple[WeightStore, Contents]) -> None:
    store, _ = packed_store
    first, second = store.get(KEY), store.get(KEY)
    assert first is not None and second is not None
    with first, second:
        assert first.path.stat().st_ino == second.path.stat().st_ino
        assert [i.in_use for i in store.ls() if i.tier is Tier.HOST] == [True]
    assert [i.in_use for i in store.ls() if i.tier is Tier.HOST] == [False]


def test_concurrent_writers_leave_one_whole_pack(store: WeightStore) -> None:
    contents = contents_of()
    threads = [threading.Thread(target=write_pack, args=(store, contents)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_all(store) == contents


def test_a_new_pack_replaces_the_copy_in_memory(packed_store: tuple[WeightStore, Contents]) -> None:
    store, _ = packed_store
    read_all(store)
    newer = contents_of(seed=2)
    write_pack(store, newer)
    assert read_all(store) == newer


def test_a_removed_pack_stays_usable_for_its_users(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    packed = store.get(KEY)
    assert packed is not None
    with packed:
        packed.tensor("model.norm.weight")
        assert store.rm(KEY) > 0
        assert store.get(KEY) is None
        assert bytes(packed.tensor("model.norm.weight")[1]) == contents["model.norm.weight"]


# --- damage ---


@settings(deadline=None)
@given(st.integers(1, 1_000_000))
def test_truncated_files_are_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    store = WeightStore(folder / "disk", host_directory=folder / "host")
    write_pack(store, contents_of(2, 200_000))
    path = store.directory / pack_name(KEY)
    size = path.stat().st_size
    os.truncate(path, size - min(cut, size))
    with pytest.raises(BadPack, match="not a usable weight pack"):
        store.get(KEY)


def test_a_corrupt_block_on_disk_is_named_and_not_handed_out(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    header = store.header(KEY)
    assert header is not None
    at = -header.data_bytes + header.blocks[2].offset + 5000

    def flip(data: bytearray) -> None:
        data[at] ^= 1

    damage_file(store.directory / pack_name(KEY), flip)
    assert ["layer1" in error.block for error in store.verify(KEY)] == [True]
    packed = store.get(KEY)
    assert packed is not None
    with packed:
        assert bytes(packed.tensor("model.embed_tokens.weight")[1])[:10] == contents["model.embed_tokens.weight"][:10]
        with pytest.raises(CorruptBlock, match="layer1"):
            packed.tensor("model.layers.1.mlp.weight")


def test_a_corrupt_block_is_fetched_elsewhere(packed_store: tuple[WeightStore, Contents], tmp_path: Path) -> None:
    store, contents = packed_store
    whole = (store.directory / pack_name(KEY)).read_bytes()
    asked: list[int] = []

    def elsewhere(header: PackHeader, leaf: int) -> bytes | None:
        asked.append(leaf)
        first, end = header.leaf_range(leaf)
        data = whole[len(whole) - header.data_bytes :]
        return data[first:end]

    def flip(data: bytearray) -> None:
        data[-50_000] ^= 1

    damage_file(store.directory / pack_name(KEY), flip)
    other = WeightStore(store.directory, host_directory=tmp_path / "host2", elsewhere=elsewhere)
    assert read_all(other) == contents
    assert len(asked) == 1


def test_damage_in_memory_is_repaired_from_disk(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    read_all(store)
    copy = open_copy(store.host_directory / pack_name(KEY), writable=True)
    assert copy is not None
    copy.data[100] ^= 1
    copy.arrival[0] = 2
    copy.close()
    assert read_all(store) == contents


def test_what_is_wrong_on_disk_is_not_written_over_what_others_may_use(
    packed_store: tuple[WeightStore, Contents],
) -> None:
    """Another process brings the right bytes at the same time, from another machine."""
    store, _ = packed_store
    read_all(store)

    def flip(data: bytearray) -> None:
        data[-50_000] ^= 1

    damage_file(store.directory / pack_name(KEY), flip)
    (error,) = store.verify(KEY)
    copy = open_copy(store.host_directory / pack_name(KEY), writable=True)
    packed = store.get(KEY)
    assert copy is not None and packed is not None
    with packed:
        copy.arrival[error.leaf] = 2
        assert packed.is_corrupt(error.leaf) and copy.damaged
        assert not packed.repair(error.leaf)
        assert copy.mark(error.leaf), "the bytes are as they were"
    copy.close()


# --- arrival ---


def test_a_dead_filler_is_taken_over(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    header = store.header(KEY)
    assert header is not None
    lock = FillLock(store.make_host_copy(header))
    assert lock.acquire()  # somebody else fills ...
    packed = store.get(KEY)
    assert packed is not None
    with packed:
        assert not packed.has(range(1))
        lock.release()  # ... and dies
        assert bytes(packed.tensor("model.norm.weight")[1]) == contents["model.norm.weight"]


def test_a_lost_sender_without_a_file_on_disk_is_an_error(packed_store: tuple[WeightStore, Contents]) -> None:
    store, _ = packed_store
    header = store.header(KEY)
    assert header is not None
    store.make_host_copy(header)
    store.rm(KEY, (Tier.DISK,))
    packed = store.get(KEY)
    assert packed is not None
    with packed, pytest.raises(SourceLost, match="gone"):
        packed.wait_leaf(0)


def test_waiting_can_be_cancelled(packed_store: tuple[WeightStore, Contents]) -> None:
    store, _ = packed_store
    header = store.header(KEY)
    assert header is not None
    lock = FillLock(store.make_host_copy(header))
    assert lock.acquire()
    packed = store.get(KEY)
    assert packed is not None
    with packed:
        assert not packed.wait_leaf(0, lambda: True)
    lock.release()


# --- budgets ---


def test_the_least_recently_used_leaves(tmp_path: Path) -> None:
    one = 4 * 300_000 + 301_000
    store = WeightStore(tmp_path / "d", 3 * one, host_directory=tmp_path / "h")
    for i, name in enumerate("abc"):
        write_pack(store, contents_of(3, 300_000), PackKey(name))
        os.utime(store.directory / pack_name(PackKey(name)), (i, i))
    read_all(store, PackKey("a"))  # now the most recent
    write_pack(store, contents_of(3, 300_000), PackKey("d"))
    assert {i.key.model for i in store.ls() if i.tier is Tier.DISK} == {"a", "c", "d"}


def test_a_copy_in_use_is_not_reclaimed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "d", host_directory=tmp_path / "h", host_budget_bytes=2_000_000)
    for name in "ab":
        write_pack(store, contents_of(3, 300_000), PackKey(name))
    held = store.get(PackKey("a"))
    assert held is not None
    with held, pytest.raises(StoreFull, match="2000000"):
        store.get(PackKey("b"))
    read_all(store, PackKey("b"))
    assert {i.key.model for i in store.ls() if i.tier is Tier.HOST} == {"b"}


def test_a_pack_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "d", 1000, host_directory=tmp_path / "h")
    with pytest.raises(StoreFull, match="1000 bytes"):
        write_pack(store, contents_of())


candidates = st.lists(
    st.builds(
        ReclaimCandidate,
        key=st.uuids().map(lambda u: PackKey(str(u))),
        nbytes=st.integers(1, 100),
        used_s=st.floats(0, 10),
        in_use=st.booleans(),
        kept=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.key,
)


@settings(deadline=None)
@given(candidates, st.integers(0, 150), st.integers(0, 400))
def test_reclaim_frees_enough_and_not_more(packs: list[ReclaimCandidate], needed: int, budget: int) -> None:
    victims = choose_victims(packs, needed, budget)
    sizes = {p.key: p for p in packs}
    total = sum(p.nbytes for p in packs) + needed
    idle = sum(p.nbytes for p in packs if not p.in_use)
    if victims is None:
        assert total - idle > budget
        return
    freed = [sizes[key].nbytes for key in victims]
    assert total - sum(freed) <= budget
    assert not any(sizes[key].in_use for key in victims)
    if victims:
        assert total - sum(freed[:-1]) > budget, "one victim too many"
        stays = min(((p.kept, p.used_s) for p in packs if p.key not in victims and not p.in_use), default=(True, 11))
        assert max((sizes[key].kept, sizes[key].used_s) for key in victims) <= stays


def test_the_fleets_copies_leave_last(store: WeightStore) -> None:
    keys = [PackKey(KEY.model, f"layout {i}") for i in range(3)]
    for i, key in enumerate(keys):
        write_pack(store, contents_of(), key)
        with store.get(key) as _:  # type: ignore[union-attr]
            pass
        os.utime(store.host_directory / pack_name(key), (i, i))
    assert read_kept(store.host_directory) == frozenset()
    write_kept(store.host_directory, [keys[0]])
    sizes = [info.nbytes for info in store.ls() if info.tier is Tier.HOST]
    store.host_budget_bytes = sum(sizes)
    new = PackKey(KEY.model, "new")
    write_pack(store, contents_of(), new)
    with store.get(new) as _:  # type: ignore[union-attr]
        pass
    here = {info.key for info in store.ls() if info.tier is Tier.HOST}
    assert keys[0] in here and keys[1] not in here and new in here


# --- whereabouts ---


def test_where(packed_store: tuple[WeightStore, Contents]) -> None:
    store, _ = packed_store
    cold = store.where(KEY.model, peers={"n2": {KEY.model}, "n3": set()})
    assert (cold.start, cold.tiers) == (StartKind.COLD, (Tier.DISK, Tier.REMOTE))
    assert cold.quickest(SourceRates(1e9, 5e9)) is Tier.REMOTE
    assert cold.quickest(SourceRates(2e9, 1e9)) is Tier.DISK
    read_all(store)
    warm = store.where(KEY.model)
    assert (warm.start, warm.host) == (StartKind.WARM, ("raw",))
    assert warm.quickest(SourceRates(1, 1)) is Tier.HOST
    hot = store.where(KEY.model, devices={"local/host:0": KEY.model, "local/host:1": "other"})
    assert (hot.start, hot.device) == (StartKind.HOT, ("local/host:0",))
    assert hot.quickest(SourceRates(1, 1)) is Tier.DEVICE
    assert store.where("unknown").quickest(SourceRates(1, 1)) is None


def test_a_received_pack_can_be_kept_on_disk(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    read_all(store)
    store.rm(KEY, (Tier.DISK,))
    store.keep_on_disk(KEY)
    store.rm(KEY, (Tier.HOST,))
    assert read_all(store) == contents
    with pytest.raises(KeyError):
        store.keep_on_disk(PackKey("unknown"))


def test_a_private_copy_may_be_written_to(packed_store: tuple[WeightStore, Contents]) -> None:
    store, contents = packed_store
    packed = store.get(KEY)
    assert packed is not None
    entry, data = packed.tensor("model.norm.weight")
    start = packed.wait_tensor(entry)
    mine = packed.private_copy()
    mine[start : start + 4] = b"mine"
    assert bytes(data) == contents["model.norm.weight"]
    del data
    packed.close()
    assert bytes(mine[start : start + entry.nbytes]) == b"mine" + contents["model.norm.weight"][4:]
    assert not any(info.in_use for info in store.ls())
