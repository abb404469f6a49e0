"""How long a corrupt block is waited for."""

from __future__ import annotations

from pathlib import Path

from prism.weights.store.awaited_blocks import AwaitedBlocks
from prism.weights.store.disk_fill import FillLock

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
