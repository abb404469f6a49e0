"""What an engine needs of a model beside its weights, for machines that do not have the model's folder.

Configuration, tokenizer and templates are small: they are asked for as a whole over a weight server's connection, and
laid into a folder of their own. The weights come as a pack; where no engine has left an image of them, the machine that
has the folder packs its files (which costs it one reading of them, nothing is copied).
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from prism.transfer.peer_connection import PeerConnection
from prism.weights.errors import PeerError, SourceLost, WeightsError
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.format import PackHeader
from prism.weights.store.weight_store import WeightStore

PATTERNS: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Never code: what a folder says is only read by libraries as data."""
MOST_BYTES: Final = 48 << 20
REACH_S: Final = 2.0
PACK_S: Final = 600.0
"""Longest time the other machine may take to read the model's files."""
logger = logging.getLogger(__name__)


class SmallFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a model's folder; a bare name, never a path."""

    name: str
    data: bytes


class Folders:
    """The model folders of this machine, as its weight server offers them to others."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def small_files(self, path: str, mark: str) -> list[SmallFile]:
        """The small files of the folder at ``path``; none unless its weights have the fingerprint ``mark``. Raises
        :class:`WeightsError` when they are too many."""
        if not self._is(path, mark):
            return []
        names = sorted({file for pattern in PATTERNS for file in Path(path).glob(pattern) if file.is_file()})
        if (total := sum(file.stat().st_size for file in names)) > MOST_BYTES:
            raise WeightsError(f"{path}: its small files have {total} bytes, at most {MOST_BYTES} are sent")
        return [SmallFile(file.name, file.read_bytes()) for file in names]

    def packed(self, path: str, mark: str) -> PackHeader | None:
        """Packs the folder at ``path``; None unless its weights have the fingerprint ``mark``."""
        return pack_folder(self._store, Path(path)) if self._is(path, mark) else None

    def _is(self, path: str, mark: str) -> bool:
        folder = Path(path)
        if not folder.is_absolute() or not folder.is_dir() or not any(folder.glob("*.safetensors")):
            return False
        return fingerprint(folder, self._store.directory) == mark


def borrow_folder(path: str, mark: str, into: Path, peers: Mapping[str, str], secret: bytes, me: str) -> Path:
    """A folder below ``into`` with the small files of the model at ``path`` on one of ``peers`` (node -> address); made
    once. Raises :class:`SourceLost` when none of them has the model."""
    folder = into / mark
    if (folder / "config.json").is_file():
        return folder
    tried: list[str] = []
    for node, address in peers.items():
        try:
            files = _ask_files(node, address, path, mark, secret, me)
        except (OSError, EOFError, PeerError) as error:
            tried.append(f"{node}: {error}")
            continue
        if any(file.name == "config.json" for file in files):
            return _lay_out(folder, files)
        tried.append(f"{node}: does not have it")
    raise SourceLost(f"{path} is not on this machine, nor on another: " + ("; ".join(tried) or "there is none"))


def pack_elsewhere(
    path: str, mark: str, peers: Mapping[str, str], secret: bytes, me: str
) -> tuple[str, PackHeader] | None:
    """The first of ``peers`` that has the folder at ``path``, and the header of the pack it made of it."""
    for node, address in peers.items():
        try:
            peer = PeerConnection(node, address, secret, me, REACH_S)
            try:
                header = peer.packed_folder(path, mark, PACK_S)
            finally:
                peer.close()
        except (OSError, EOFError, WeightsError) as error:
            logger.warning("%s cannot pack %s: %s", node, path, error)
            continue
        if header is not None:
            return node, header
    return None


def _ask_files(node: str, address: str, path: str, mark: str, secret: bytes, me: str) -> list[SmallFile]:
    peer = PeerConnection(node, address, secret, me, REACH_S)
    try:
        return [SmallFile(name, data) for name, data in peer.small_files(path, mark)]
    finally:
        peer.close()


def _lay_out(folder: Path, files: list[SmallFile]) -> Path:
    """Writes the files; visible as a whole or not at all. Raises :class:`PeerError` for a name that is a path."""
    fresh = folder.with_name(f".{uuid.uuid4().hex}.tmp")
    fresh.mkdir(parents=True)
    try:
        for file in files:
            if file.name != Path(file.name).name or file.name.startswith("."):
                raise PeerError(str(folder), f"was sent a file called {file.name!r}")
            (fresh / file.name).write_bytes(file.data)
        fresh.rename(folder)
    except FileExistsError:
        pass  # somebody else was quicker
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder
