"""Copies in shared memory go when their store is gone."""

from __future__ import annotations

from pathlib import Path

from prism.weights.store.shared_memory import claim_shared, default_host_directory, drop_shared


def test_folders_of_removed_stores_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "shm"
    stores = [tmp_path / "one", tmp_path / "two"]
    folders = [default_host_directory(store, root) for store in stores]
    assert folders[0] != folders[1]
    for store, folder in zip(stores, folders, strict=True):
        store.mkdir()
        folder.mkdir(parents=True)
        claim_shared(folder, store)
    stores[0].rmdir()
    claim_shared(folders[1], stores[1])
    assert not folders[0].exists()
    assert folders[1].exists()


def test_a_store_gives_its_memory_back(tmp_path: Path) -> None:
    folder = default_host_directory(tmp_path / "one", tmp_path)
    folder.mkdir()
    drop_shared(tmp_path / "two", tmp_path)
    assert folder.exists()
    drop_shared(tmp_path / "one", tmp_path)
    assert not folder.exists()
