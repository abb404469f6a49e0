"""Weights that arrive when a test says so."""

from __future__ import annotations

from prism.remote.pieces import layers_of, piece_of
from prism.weights.packs.format import TensorEntry
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import open_copy
from prism.weights.store.weight_store import WeightStore


class SlowImage:
    """The image of ``model`` in ``store``, from now on arriving in host memory piece by piece, as from elsewhere. Of an
    engine of several ranks, that of one whose ``layout`` it is (a part of it)."""

    def __init__(self, store: WeightStore, model: str, layout: str = "") -> None:
        found = {i.key for i in store.ls() if (header := store.header(i.key)) is not None and header.label == model}
        (key,) = {key for key in found if layout in key.layout}
        resident = store.get(key)
        assert resident is not None
        for leaf in range(resident.header.leaves):  # it may be coming from disk
            resident.wait_leaf(leaf)
        self._header, self._bytes = resident.header, bytes(resident.data)
        resident.close()
        self._file = store.directory / pack_name(key)
        self._on_disk = self._file.read_bytes() if self._file.exists() else b""  # a copy may be all there is
        store.rm(key)
        path = store.make_host_copy(self._header)
        self._filling = FillLock(path)
        assert self._filling.acquire(), "whoever fills a copy holds its lock"
        copy = open_copy(path, writable=True)
        assert copy is not None
        self._copy = copy
        self.layers = layers_of(t.name for t in self._header.tensors)

    def arrive(self, *pieces: int) -> None:
        for leaf in sorted(set().union(*map(self._leaves_of, pieces))):
            begin, end = self._header.leaf_range(leaf)
            self._copy.write(begin, memoryview(self._bytes)[begin:end])
            assert self._copy.accept(leaf)

    def spoil(self, piece: int) -> None:
        """A leaf that only ``piece`` has arrives with a wrong byte, and is so on disk, too."""
        assert self._on_disk, "what was never on disk cannot be corrupt there"
        leaf = min(
            self._leaves_of(piece) - {leaf for p in range(self.layers + 2) if p != piece for leaf in self._leaves_of(p)}
        )
        begin, end = self._header.leaf_range(leaf)
        wrong = bytearray(self._bytes[begin:end])
        wrong[0] ^= 1
        self._copy.write(begin, memoryview(wrong))
        assert not self._copy.mark(leaf)
        at = len(self._on_disk) - self._header.data_bytes + begin
        self._file.write_bytes(self._on_disk[:at] + wrong + self._on_disk[at + len(wrong) :])

    def _leaves_of(self, piece: int) -> set[int]:
        names = ((t, {piece_of(name, self.layers) for name in (t.name, *t.aliases)}) for t in self._header.tensors)
        return {leaf for tensor, pieces in names if piece in pieces for leaf in self._leaves(tensor)}

    def _leaves(self, tensor: TensorEntry) -> range:
        first = self._header.blocks[tensor.block].offset + tensor.offset
        return self._header.cut.holding(first, first + tensor.nbytes)

    def close(self) -> None:
        self._copy.close()
        self._filling.release()


class SlowImages:
    """The same of all ranks of an engine, at the same time."""

    def __init__(self, store: WeightStore, model: str, ranks: int) -> None:
        self._images = [SlowImage(store, model, f"rank{rank}/") for rank in range(ranks)]
        self.layers = self._images[0].layers

    def arrive(self, *pieces: int) -> None:
        for image in self._images:
            image.arrive(*pieces)

    def close(self) -> None:
        for image in self._images:
            image.close()
