"""What an engine needs of a model beside its weights, for machines that do not have the model's folder.

Configuration, tokenizer and templates are small: they are asked for as a whole over a transfer server's connection, and
laid into a folder of their own. The weights come as a pack; where no engine has left an image of them, the machine that
has the folder packs its files (which costs it one reading of them, nothing is copied).
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from prism.transfer.errors import PeerError, SourceLost, TransferError
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import Answerer
from prism.weights.errors import WeightsError
from prism.weights.exchange.pack_windows import header_of_description
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.format import PackHeader, encode_header
from prism.weights.store.weight_store import WeightStore

FILES_TOPIC: Final = "weights.folder-files"
PACK_TOPIC: Final = "weights.pack-folder"
PATTERNS: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Never code: what a folder says is only read by libraries as data."""
MOST_BYTES: Final = 48 << 20
REACH_S: Final = 2.0
FILES_S: Final = 30.0
PACK_S: Final = 600.0
"""Longest time the other machine may take to read the model's files."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class SmallFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a model's folder; a bare name, never a path."""

    name: str
    data: bytes


class FolderQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The body of both questions: the folder's path on the machine that is asked, and its weights' fingerprint."""

    path: str
    mark: str


class OfferedFolders:
    """The model folders of this machine, as its transfer server offers them to others."""

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

    def answerers(self) -> dict[str, Answerer]:
        """For :class:`~prism.transfer.server.ServerOptions`: small files as a list, a pack as its header (empty: no
        such folder here)."""

        def files(body: bytes) -> bytes:
            question = _decode(body, FolderQuestion)
            return msgspec.msgpack.encode(self.small_files(question.path, question.mark))

        def packed(body: bytes) -> bytes:
            question = _decode(body, FolderQuestion)
            header = self.packed(question.path, question.mark)
            return encode_header(header) if header else b""

        return {FILES_TOPIC: files, PACK_TOPIC: packed}

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
                raw = peer.ask(PACK_TOPIC, msgspec.msgpack.encode(FolderQuestion(path, mark)), PACK_S)
            finally:
                peer.close()
            if raw:
                return node, header_of_description(raw, node)
        except (OSError, EOFError, WeightsError, TransferError) as error:
            logger.warning("%s cannot pack %s: %s", node, path, error)
    return None


def _decode(body: bytes, kind: type[T]) -> T:
    """What another machine sent. Raises :class:`PeerError`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError("peer", f"sent what is no {kind.__name__}: {error}") from error


def _ask_files(node: str, address: str, path: str, mark: str, secret: bytes, me: str) -> list[SmallFile]:
    peer = PeerConnection(node, address, secret, me, REACH_S)
    try:
        raw = peer.ask(FILES_TOPIC, msgspec.msgpack.encode(FolderQuestion(path, mark)), FILES_S)
        return _decode(raw, list[SmallFile])
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
