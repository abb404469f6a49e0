"""How long a corrupt block is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prism.weights.errors import CorruptBlock
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.awaited_blocks import SAID_S, AwaitedBlocks, say_nobody_has, take_back
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.weight_store import WeightStore
from tests.patience import PATIENCE_S
from tests.weights.conftest import KEY, Contents, damage_file

NO_PATIENCE_S = 1e-9


def test_a_block_is_waited_for_as_long_as_somebody_fills_the_copy(tmp_path: Path) -> None:
    """A large piece over a slow link takes longer than the patience, and counts as nothing until its block is there."""
    path = tmp_path / "copy.host"
    awaited = AwaitedBlocks(path, "mark", NO_PATIENCE_S, arrived_bytes=lambda: 0)
    filler = FillLock(path)
    assert filler.acquire()
    awaited.why_not(3)
    assert awaited.why_not(3) is None
    filler.release()
    assert "did not come from another machine" in str(awaited.why_not(3))


def test_who_comes_when_it_is_known_that_nobody_has_the_block_is_told_at_once(tmp_path: Path) -> None:
    """Until somebody may have it, or the agent has not said so for long."""
    path = tmp_path / "copy.host"

    def why_not() -> str | None:
        return AwaitedBlocks(path, "mark", PATIENCE_S, arrived_bytes=lambda: 0).why_not(3)

    say_nobody_has(path, ["a", "b"])
    assert "none of a, b has it" in str(why_not())
    said = path.with_suffix(".alone")
    long_ago_s = said.stat().st_mtime - 10 * SAID_S
    os.utime(said, (long_ago_s, long_ago_s))
    assert why_not() is None
    say_nobody_has(path, ["a", "b"])
    take_back(path)
    assert why_not() is None


def test_a_corrupt_block_that_nobody_mends_is_waited_for_so_long_and_no_longer(
    packed_store: tuple[WeightStore, Contents], tmp_path: Path
) -> None:
    store, _ = packed_store

    def flip(data: bytearray) -> None:
        data[-50_000] ^= 1

    damage_file(store.directory / pack_name(KEY), flip)
    engines = WeightStore(store.directory, host_directory=tmp_path / "host2", mending_s=0.1)
    with pytest.raises(CorruptBlock, match=r"did not come from another machine in 0.1 s; `prism store rm"):
        waiting = engines.get(KEY)
        assert waiting is not None
        with waiting:
            for leaf in range(waiting.header.leaves):
                waiting.wait_leaf(leaf)
