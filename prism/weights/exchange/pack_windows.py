"""The store's packs as windows that other machines may be sent (:mod:`prism.transfer.windows`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prism.transfer.windows import Description
from prism.weights.packs.format import PREFIX, PackHeader, PackKey, decode_header, decode_prefix, encode_header
from prism.weights.packs.pack_files import SUFFIX, key_of, pack_name
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore

_KIND: Final = "weights/"


def window_name(key: PackKey) -> str:
    """The name of a pack's window, the same on every machine."""
    return _KIND + pack_name(key).removesuffix(SUFFIX)


def key_of_window(name: str) -> PackKey | None:
    """The key whose :func:`window_name` this is; None for a window of another kind."""
    return key_of(Path(name.removeprefix(_KIND))) if name.startswith(_KIND) and name.count("/") == 2 else None


def header_of_description(raw: bytes, where: str) -> PackHeader:
    """The header that a window's description holds. Raises :class:`~prism.weights.errors.BadPack`."""
    header_bytes, checksum = decode_prefix(raw, where)
    return decode_header(raw[PREFIX.size : PREFIX.size + header_bytes], checksum, where)


class PackWindows:
    """Every pack of ``store``, a :class:`~prism.transfer.windows.WindowSource`."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def describe(self, name: str) -> Description | None:
        """The pack's header, from whichever tier has it."""
        key = key_of_window(name)
        header = None if key is None else self._store.header(key)
        return None if header is None else Description(encode_header(header), header.leaves)

    def open(self, name: str) -> ResidentPack | None:
        """The pack in host memory, read from disk behind the caller's back where it has to. Raises like
        :meth:`~prism.weights.store.weight_store.WeightStore.get`."""
        key = key_of_window(name)
        return None if key is None else self._store.get(key)
