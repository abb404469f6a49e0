"""The machine's store of packed weights: cached files on disk, shared copies in host memory, a budget for each.

::

    DIRECTORY/FINGERPRINT/LAYOUT.pack          the cached file, or an index into the model's files (tier: disk)
    HOST_DIRECTORY/FINGERPRINT/LAYOUT.pack     the shared copy in memory (tier: host)

Every process of the machine opens the same two folders; nothing else coordinates them. Access times order what is
reclaimed first; a host copy that any process holds open is never reclaimed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.weights.errors import BadPack, CorruptBlock, StoreFull
from prism.weights.packs.blocks import BlockPlan, layout_header
from prism.weights.packs.disk_pack import header_of, open_pack, read_index
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.packs.index import PackIndex, encode_index
from prism.weights.packs.pack_files import SUFFIX, key_of, pack_name
from prism.weights.packs.verify import verify_file
from prism.weights.packs.writer import PackWriter, publish, write_copy
from prism.weights.store import host_copy
from prism.weights.store.awaited_blocks import take_back
from prism.weights.store.budget import read_budget
from prism.weights.store.disk_fill import WHOLE_TURN, Turn
from prism.weights.store.kept import read_kept
from prism.weights.store.locks import locked, try_lock
from prism.weights.store.reclaim import ReclaimCandidate, choose_victims
from prism.weights.store.resident import Elsewhere, ResidentPack
from prism.weights.store.shared_memory import claim_shared, default_host_directory
from prism.weights.store.whereabouts import Tier, Whereabouts


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One pack of the store, as ``prism store ls`` shows it. ``path`` is its file on ``tier``."""

    key: PackKey
    tier: Tier
    path: Path
    nbytes: int
    used_s: float
    """Unix time of the last use."""
    in_use: bool


class WeightStore:
    """Opens (and makes) the store in ``directory``. Budgets are in bytes; None: what the store's
    own budget says (:mod:`prism.weights.store.budget`).
    ``elsewhere`` is asked for leaves that are corrupt here and on disk. ``mending_s``: who needs such a leaf waits for
    the machine's agent to mend it, so long after the last one came; 0: there is none."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int | None = None,
        *,
        host_directory: Path | None = None,
        host_budget_bytes: int | None = None,
        elsewhere: Elsewhere | None = None,
        mending_s: float = 0.0,
    ) -> None:
        self.elsewhere, self.mending_s = elsewhere, mending_s
        self.directory = directory
        self.host_directory = host_directory or default_host_directory(directory)
        for folder in (self.directory, self.host_directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        budget = read_budget(directory)
        self.budget_bytes = budget.disk_bytes if budget_bytes is None else budget_bytes
        self.host_budget_bytes = budget.host_bytes if host_budget_bytes is None else host_budget_bytes
        if host_directory is None:
            claim_shared(self.host_directory, self.directory)

    def get(self, key: PackKey, turn: Turn = WHOLE_TURN) -> ResidentPack | None:
        """The pack in host memory, None if the store does not have it. Returns at once: a pack that is only on disk is
        read into host memory behind the caller's back, block by block (:meth:`ResidentPack.wait_leaf`), in the order of
        ``turn`` (:func:`prism.weights.store.disk_fill.lead_first`) if nobody has begun to.

        Raises :class:`BadPack` for a broken file (:class:`~prism.weights.errors.StalePack`: an index whose files have
        changed) and :class:`StoreFull` when host memory has no room for it.
        """
        disk = self.directory / pack_name(key)
        host = self.host_directory / pack_name(key)
        for _ in range(3):  # a copy may be reclaimed between its making and its opening
            copy = host_copy.open_copy(host)
            if copy is not None:
                fill_from = disk if disk.exists() else None
                packed = ResidentPack(copy, fill_from, self.elsewhere, turn, self.mending_s)
                self._touch(disk, host)
                if not packed.complete:
                    packed.start_filling()
                return packed
            if not disk.exists():
                return None
            with open_pack(disk) as pack:  # an index whose files have changed is refused here
                header = pack.header
            self.make_host_copy(header, reserve=False)
        raise BadPack(host, "is removed as fast as it is made")

    def host_path(self, key: PackKey) -> Path:
        """Where the copy in host memory is, if there is one."""
        return self.host_directory / pack_name(key)

    def header(self, key: PackKey) -> PackHeader | None:
        """The header alone, from whichever tier has it; no data is read."""
        for folder in (self.host_directory, self.directory):
            try:
                return header_of(folder / pack_name(key))
            except FileNotFoundError:
                continue
        return None

    def writer(self, key: PackKey, blocks: Sequence[BlockPlan], label: str = "", meta: bytes = b"") -> PackWriter:
        """A writer for a new (or replaced) pack. Raises :class:`StoreFull` when the budget has no room."""
        header = layout_header(key, blocks, label, meta)
        self._make_room(self.directory, header.data_bytes, self.budget_bytes)
        return PackWriter(self.directory / pack_name(key), header, published=lambda: self.rm(key, (Tier.HOST,)))

    def put_index(self, index: PackIndex) -> None:
        """Adds (or replaces) a pack whose bytes stay in the model's files. Raises :class:`StoreFull`."""
        raw = encode_index(index)
        self._make_room(self.directory, len(raw), self.budget_bytes)
        publish(self.directory / pack_name(index.header.key), raw)
        self.rm(index.header.key, (Tier.HOST,))

    def usable(self, key: PackKey) -> PackHeader | None:
        """The header of the pack on disk if its bytes are there too: None also for a broken one and for an index whose
        files have changed."""
        try:
            with open_pack(self.directory / pack_name(key)) as pack:
                return pack.header
        except (FileNotFoundError, BadPack):
            return None

    def refers_to(self, key: PackKey) -> Path | None:
        """The model's folder if the pack on disk is an index into it, None otherwise. Raises :class:`BadPack`."""
        try:
            index = read_index(self.directory / pack_name(key))
        except FileNotFoundError:
            return None
        return None if index is None else Path(index.folder)

    def make_host_copy(self, header: PackHeader, reserve: bool = True) -> Path:
        """An empty copy in host memory for ``header`` (unless there is one), with room made for it; ``reserve`` as for
        :func:`prism.weights.store.host_copy.create`. Raises :class:`StoreFull`."""
        path = self.host_directory / pack_name(header.key)
        with locked(self.host_directory / ".lock"):
            self._make_room(self.host_directory, header.data_bytes, self.host_budget_bytes)
            try:
                host_copy.create(path, header, reserve)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                room = os.statvfs(self.host_directory)
                free = room.f_bavail * room.f_frsize
                raise StoreFull(self.host_directory, header.data_bytes, free, 0) from error
        return path

    def ls(self) -> list[PackInfo]:
        """Every pack on both tiers, by key. Reads no pack."""
        found = [i for t in (Tier.HOST, Tier.DISK) for i in self._scan(t)]
        return sorted(found, key=lambda i: (i.key, i.tier))

    def where(
        self, model: str, devices: Mapping[str, str] | None = None, peers: Mapping[str, Collection[str]] | None = None
    ) -> Whereabouts:
        """Every place of the model (a fingerprint). The store sees its own two tiers; ``devices`` (device id ->
        fingerprint loaded there) and ``peers`` (node -> fingerprints in its memory) are what the caller knows."""
        found = {t: tuple(sorted(i.key.layout for i in self._of_model(t, model))) for t in (Tier.HOST, Tier.DISK)}
        on = tuple(sorted(d for d, loaded in (devices or {}).items() if loaded == model))
        remote = tuple(sorted(n for n, models in (peers or {}).items() if model in models))
        return Whereabouts(model, on, found[Tier.HOST], found[Tier.DISK], remote)

    def _of_model(self, tier: Tier, model: str) -> Iterator[PackInfo]:
        return (info for info in self._scan(tier) if info.key.model == model)

    def keep_on_disk(self, key: PackKey) -> None:
        """Writes the copy in host memory to disk as well, so that it outlives the machine's memory. Raises
        ``KeyError`` unless it is in host memory, :class:`StoreFull` when the disk budget has no room."""
        if (self.directory / pack_name(key)).exists():
            return
        packed = self.get(key)
        if packed is None:
            raise KeyError(key)
        with packed:
            for leaf in range(packed.header.leaves):
                packed.wait_leaf(leaf)
            self._make_room(self.directory, packed.header.data_bytes, self.budget_bytes)
            write_copy(packed.header, packed.data, self.directory / pack_name(key))

    def rm(self, key: PackKey, tiers: Sequence[Tier] = (Tier.HOST, Tier.DISK)) -> int:
        """Removes the pack from ``tiers``; bytes freed (mappings that are open stay usable). 0 if it was not there."""
        freed = 0
        for tier in tiers:
            path = self._folder(tier) / pack_name(key)
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            path.with_suffix(".fill").unlink(missing_ok=True)
            take_back(path)
            freed += size
        return freed

    def verify(self, key: PackKey) -> list[CorruptBlock]:
        """Reads the pack on disk and checks every leaf; the corrupt ones. Raises :class:`BadPack` or ``KeyError``."""
        path = self.directory / pack_name(key)
        if not path.exists():
            raise KeyError(key)
        return verify_file(path)

    def _folder(self, tier: Tier) -> Path:
        return {Tier.HOST: self.host_directory, Tier.DISK: self.directory}[tier]

    def _scan(self, tier: Tier) -> Iterator[PackInfo]:
        folder = self._folder(tier)
        for model in os.scandir(folder):
            if not model.is_dir() or model.name.startswith("."):
                continue
            for entry in os.scandir(model.path):
                if not entry.name.endswith(SUFFIX):
                    continue
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                path = Path(entry.path)
                in_use = tier is Tier.HOST and _held(path)
                yield PackInfo(key_of(path), tier, path, stat.st_size, stat.st_mtime, in_use)

    def _make_room(self, folder: Path, needed_bytes: int, budget_bytes: int | None) -> None:
        if budget_bytes is None:
            return
        tier = Tier.HOST if folder == self.host_directory else Tier.DISK
        packs = list(self._scan(tier))
        kept = read_kept(folder) if tier is Tier.HOST else frozenset()
        candidates = [ReclaimCandidate(i.key, i.nbytes, i.used_s, i.in_use, i.key in kept) for i in packs]
        victims = choose_victims(candidates, needed_bytes, budget_bytes)
        if victims is None:
            held = sum(i.nbytes for i in packs if i.in_use)
            raise StoreFull(folder, needed_bytes, budget_bytes, held)
        for key in victims:
            self.rm(key, (tier,))

    @staticmethod
    def _touch(*paths: Path) -> None:
        now = time.time()
        for path in paths:
            try:
                os.utime(path, (now, now))
            except FileNotFoundError:
                continue


def _held(path: Path) -> bool:
    """Whether any process has the host copy at ``path`` open."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, exclusive=True)
    finally:
        os.close(fd)
