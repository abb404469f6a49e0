"""Weights of which only some are in memory: pages of the others are given back, and come again from the image."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final

import torch

from prism import memory
from prism.remote.pieces import layers_of, piece_of
from prism.weights.packs.format import TensorEntry
from prism.weights.store.resident import ResidentPack

TEND_S: Final = 0.5


class HeldTensors:
    """Which tensors of an image are in the region it was laid out for. Tensors that are not have no elements, so that a
    use of them raises."""

    def __init__(self, region: memory.WeightRegion, packed: ResidentPack) -> None:
        self._region, self._packed = region, packed
        header = packed.header
        self._first = {t.name: header.blocks[t.block].offset + t.offset for t in header.tensors}
        layers = layers_of(t.name for t in header.tensors)
        self._of_piece: dict[int, list[TensorEntry]] = {}
        """A tensor that two pieces share, such as a tied head, is of both."""
        for entry in header.tensors:
            for piece in {piece_of(name, layers) for name in (entry.name, *entry.aliases)}:
                self._of_piece.setdefault(piece, []).append(entry)
        self._absent: dict[str, torch.Tensor] = {}
        """Where the tensors that are not here go again, by name."""
        self._tended_s = 0.0

    @property
    def whole(self) -> bool:
        return not self._absent

    def begin(self, model: torch.nn.Module, pieces: Set[int]) -> None:
        """Nothing of the image is in the region yet, whose memory is there, and ``model`` points there: bring these
        pieces. The memory of the others stays, for :meth:`bring`."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for entry in self._packed.header.tensors:
            if entry.name not in parameters:
                self._bring(entry)
                continue
            self._absent[entry.name] = parameters[entry.name].data
            _point(parameters, entry, torch.empty(0, dtype=parameters[entry.name].dtype))
        self.bring(model, pieces)

    def arrived(self, piece: int) -> bool:
        """Whether all tensors of the piece are here or in host memory."""
        cut, first = self._packed.cut, self._first
        return all(
            entry.name not in self._absent
            or self._packed.has(cut.holding(first[entry.name], first[entry.name] + entry.nbytes))
            for entry in self._of_piece.get(piece, ())
        )

    def tend(self) -> None:
        """See to it that what is not here comes: fill host memory when whoever did so has died, and repair what is
        corrupt. Looks every :data:`TEND_S` at most. Raises :class:`WeightsError` or :class:`TransferError` when that
        cannot be."""
        now_s = time.monotonic()
        if now_s < self._tended_s + TEND_S:
            return
        self._tended_s = now_s
        cut = self._packed.cut
        entries = (e for e in self._packed.header.tensors if e.name in self._absent)
        leaves = (leaf for e in entries for leaf in cut.holding(self._first[e.name], self._first[e.name] + e.nbytes))
        missing = [leaf for leaf in leaves if not self._packed.has(range(leaf, leaf + 1))]
        for leaf in (*missing[:1], *filter(self._packed.is_corrupt, missing)):
            self._packed.tend(leaf)

    def hold(self, model: torch.nn.Module, wanted: Callable[[str], bool]) -> None:
        """Have the tensors one of whose names is ``wanted``, and buffers, and no others. Waits for what has not arrived
        in host memory yet. Raises ``prism.memory.OutOfMemory``; then what was there is there."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        entries = self._packed.header.tensors
        keep = {
            e.name
            for e in entries
            if not parameters.keys() >= {e.name, *e.aliases} or any(map(wanted, (e.name, *e.aliases)))
        }
        self._bring_all(parameters, keep)
        for entry in entries:
            if entry.name not in keep and entry.name not in self._absent:
                self._absent[entry.name] = parameters[entry.name].data
                _point(parameters, entry, torch.empty(0, dtype=parameters[entry.name].dtype))
        self._give_back(entries)

    def bring(self, model: torch.nn.Module, pieces: Set[int]) -> None:
        """Have the tensors of ``pieces`` beside those that are here. Waits and raises as :meth:`hold`."""
        wanted = {entry.name for piece in pieces for entry in self._of_piece.get(piece, ())}
        self._bring_all(dict(model.named_parameters(remove_duplicate=False)), wanted)

    def _bring_all(self, parameters: Mapping[str, torch.nn.Parameter], keep: Set[str]) -> None:
        for entry in self._packed.header.tensors:
            if entry.name in keep and entry.name in self._absent:
                self._bring(entry)
                _point(parameters, entry, self._absent.pop(entry.name))

    def _bring(self, entry: TensorEntry) -> None:
        first = self._first[entry.name]
        self._region.commit(entry.nbytes, offset_bytes=first, timeout_s=5.0)
        there = self._packed.wait_tensor(entry)
        if not entry.nbytes:
            return
        place = self._region.tensor(first, (entry.nbytes,), torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the image is read only, and is not written to
            place.copy_(torch.frombuffer(self._packed.data[there : there + entry.nbytes], dtype=torch.uint8))

    def _give_back(self, entries: Iterable[TensorEntry]) -> None:
        """Decommit what lies between tensors that are here."""
        held = sorted((self._first[e.name], e.nbytes) for e in entries if e.name not in self._absent)
        at = 0
        for first, nbytes in (*held, (self._region.nbytes, 0)):
            if first > at:
                self._region.decommit(first - at, offset_bytes=at)
            at = max(at, first + nbytes)


def _point(parameters: Mapping[str, torch.nn.Parameter], entry: TensorEntry, place: torch.Tensor) -> None:
    for name in (entry.name, *entry.aliases):
        parameters[name].data = place
