"""``prism mem``: what is held is shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from prism import memory
from prism.cli.mem import command
from prism.kv.host_pool import HostPool
from prism.kv.naming import PieceChain, as_tokens, space_of
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import KvSettings, write_kv_settings


def test_every_owner_and_class_is_shown(tmp_path: Path) -> None:
    device = memory.open_device("host:3", 64 << 20, account_dir=tmp_path, page_bytes=65536)
    with device.register("llama", floor_bytes=1 << 20, limit_bytes=32 << 20) as owner:
        owner.reserve(3 << 20, "staging")
        owner.reserve(5 << 20, "outside")
        device.note_foreign(7 << 20)
        owner.arena(64 << 20).divide(memory.KvLayout(layers=2, kv_heads=2, head_dim=64), 1000, 2 << 20)
        shown = CliRunner().invoke(command, ["--accounts", str(tmp_path), "--audit"])
        assert shown.exit_code == 0, shown.output
        for word in ("host:3", "llama", "64.0 MiB", "OUTSIDE", "5.0 MiB", "7.0 MiB held by other", "the books agree"):
            assert word in shown.output, shown.output
        asked = CliRunner().invoke(command, ["host:3", "--accounts", str(tmp_path), "--json"])
        (data,) = json.loads(asked.output)
        assert data["device"] == "host:3" and data["owners"][0]["staging_bytes"] == 3 << 20
        device.note_outside(owner.id, 80 << 20)
        shown = CliRunner().invoke(command, ["--accounts", str(tmp_path), "--audit"])
        assert shown.exit_code == 0 and "overdrawn by" in shown.output, shown.output


def test_what_is_lent_and_kept_in_host_memory_is_shown(tmp_path: Path) -> None:
    device = memory.open_device("host:0", 64 << 20, account_dir=tmp_path, page_bytes=65536)
    device.offer(8 << 20)
    with device.register("borrower") as owner:
        region = owner.lent_region(5 << 20)
        region.commit()
        shown = CliRunner().invoke(command, ["--accounts", str(tmp_path)], env={"COLUMNS": "200"})
        for words in ("lends what is free beyond 8.0 MiB", "5.0 MiB", "KV in host memory: none is kept"):
            assert words in shown.output, shown.output
        write_kv_settings(tmp_path, KvSettings(host_bytes=1 << 20))
        try:
            piece = PieceChain(space_of("a"), as_tokens(range(9))).piece(0, 9)
            pool = HostPool(host_pool_directory(tmp_path), 1 << 20)
            pool.put(space_of("a"), piece, 4096, lambda place: place.write(np.zeros(4096, dtype=np.uint8), 0))
            shown = CliRunner().invoke(command, ["--accounts", str(tmp_path)])
            assert "KV in host memory: 4.0 KiB of 1.0 MiB in 1 pieces" in shown.output, shown.output
        finally:
            drop_host_pool(tmp_path)


def test_devices_without_accounts(tmp_path: Path) -> None:
    empty = CliRunner().invoke(command, ["--accounts", str(tmp_path)])
    assert empty.exit_code == 0 and "no accounts" in empty.output
    wrong = CliRunner().invoke(command, ["cuda:7", "--accounts", str(tmp_path)])
    assert wrong.exit_code == 2 and "cuda:7 has no account" in wrong.output


def test_books_that_lie_are_reported(tmp_path: Path) -> None:
    """Memory that the kernel counts but the books do not: here, written to by hand."""
    device = memory.open_device("host:0", 64 << 20, account_dir=tmp_path, page_bytes=65536)
    with device.register("liar") as owner:
        region = owner.weight_region(1 << 20)
        region.commit()
        raw = bytearray(device.account_path.read_bytes())
        held = raw.index((1 << 20).to_bytes(8, "little"), 4096)
        with device.account_path.open("r+b") as file:
            file.seek(held)
            file.write((4096).to_bytes(8, "little"))
        shown = CliRunner().invoke(command, ["--accounts", str(tmp_path), "--audit"])
        assert shown.exit_code == 1 and "more physical memory than it holds" in shown.output
        with device.account_path.open("r+b") as file:
            file.seek(held)
            file.write((1 << 20).to_bytes(8, "little"))


def test_watching_shows_changes_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = memory.open_device("host:0", 64 << 20, account_dir=tmp_path, page_bytes=65536)
    with device.register("llama") as owner:
        pauses = iter([lambda: owner.reserve(5 << 20, "kv"), lambda: None])

        def pause(seconds: float) -> None:
            change = next(pauses, None)
            if change is None:
                raise KeyboardInterrupt
            change()

        monkeypatch.setattr("prism.cli.mem.time.sleep", pause)
        shown = CliRunner().invoke(command, ["--accounts", str(tmp_path), "--watch"])
        assert shown.exit_code == 0, shown.output
        assert "5.0 MiB" in shown.output and "59.0 MiB free" in shown.output
