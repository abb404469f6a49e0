"""The global parameter pool (BlitzScale 5.1): which machine answers for the copy of what in the fleet's host memory.

Every entry (a pack of weights) has one *home*, a machine that keeps it in host memory whatever else happens there;
homes are spread evenly by bytes. Copies elsewhere are spare: they serve while they are there and may leave at any
time, so that the fleet needs memory for one copy of each entry::

    machine a   [e1 home] [e4 home] [e2 spare]        a dies: e1 and e4 get homes on b and c, which fetch them
    machine b   [e2 home] [e3 home]
    machine c   [e5 home] [e6 home] [e1 spare]        e1 is there already: c becomes its home, and nothing is sent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class PoolHost:
    name: str
    capacity_bytes: int
    load_bytes: int = 0
    """Of the entries whose home it is."""
    homes: dict[str, None] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes - self.load_bytes


@dataclass(slots=True)
class PoolEntry:
    nbytes: int
    near: frozenset[str]
    home: PoolHost | None = None
    holders: set[str] = field(default_factory=set)


class ParameterPool:
    """The book of one fleet. Tell it what is where; after :meth:`settle` it says who is to keep and fetch what.

    What changes nothing costs nothing; a death costs as much as what lived there.
    """

    def __init__(self) -> None:
        self._machines: dict[str, PoolHost] = {}
        self._entries: dict[str, PoolEntry] = {}
        self._held: dict[str, set[str]] = {}
        """Entry -> machines with a copy, for entries that nobody needs (yet), too."""
        self._homeless: dict[str, None] = {}
        self._sizes: Counter[int] = Counter()
        """How many needed entries have so many bytes."""
        self._dirty = False

    # --- what is told ---

    def put_machine(self, name: str, capacity_bytes: int) -> None:
        """The machine is there, with so much host memory for weights; what does not fit there any more goes."""
        machine = self._machines.get(name)
        if machine is None:
            machine = self._machines[name] = PoolHost(name, capacity_bytes)
        elif machine.capacity_bytes == capacity_bytes:
            return
        machine.capacity_bytes = capacity_bytes
        self._dirty = True
        for entry in sorted(machine.homes, key=lambda e: (-self._entries[e].nbytes, e)):
            if machine.room_bytes >= 0:
                break
            self._send_away(entry)

    def drop_machine(self, name: str) -> None:
        """The machine is gone, and its memory with it. Raises ``KeyError`` when it was not there."""
        machine = self._machines.pop(name)
        self._dirty = True
        for entry in machine.copies:
            self._held[entry].discard(name)
        for entry in list(machine.homes):
            self._send_away(entry)

    def set_copies(self, machine: str, entries: Collection[str]) -> None:
        """All that is whole in the machine's host memory now, needed or not. Raises ``KeyError`` for a machine that is
        not there."""
        known, now = self._machines[machine], set(entries)
        for entry in now - known.copies:
            self._held.setdefault(entry, set()).add(machine)
        for entry in known.copies - now:
            self._held[entry].discard(machine)
        self._dirty |= now != known.copies
        known.copies = now

    def need(self, entry: str, nbytes: int, near: frozenset[str] = frozenset()) -> None:
        """``entry`` must have a copy (from now on one of so many bytes). ``near``: machines that need nobody else to
        have it in memory; of machines that are as good otherwise one of these is taken."""
        if entry in self._entries:
            if self._entries[entry].nbytes == nbytes:
                self._entries[entry].near = near
                return
            self.forget(entry)
        self._entries[entry] = PoolEntry(nbytes, near, holders=self._held.setdefault(entry, set()))
        self._homeless[entry] = None
        self._sizes[nbytes] += 1
        self._dirty = True

    def forget(self, entry: str) -> None:
        """Nobody needs it any more: all its copies are spare. Raises ``KeyError`` for what was not needed."""
        nbytes = self._entries[entry].nbytes
        self._send_away(entry)
        del self._entries[entry], self._homeless[entry]
        self._sizes[nbytes] -= 1
        if not self._sizes[nbytes]:
            del self._sizes[nbytes]
        self._dirty = True

    # --- what is decided ---

    def settle(self) -> bool:
        """Gives everything a home; whether anything had changed since the last time.

        1. What is in some machine's memory stays there: of those with room the one that answers for least.
        2. What is nowhere goes to the machine that answers for least and has room, the largest first.
        3. While the machine that answers for most has more than the largest entry more than one with room, an entry
           changes its home: one that is there as well, else the largest that is at most half of the difference.
        """
        if not self._dirty:
            return False
        self._dirty = False
        waiting = sorted(self._homeless, key=lambda e: (-self._entries[e].nbytes, e))
        for name in waiting:  # 1
            self._place(name, (self._machines[m] for m in self._entries[name].holders))
        for name in [w for w in waiting if w in self._homeless]:  # 2
            self._place(name, self._machines.values())
        self._balance()  # 3
        return True

    def home_of(self, entry: str) -> str | None:
        """None: no machine has room for it. Raises ``KeyError`` for what is not needed."""
        home = self._entries[entry].home
        return None if home is None else home.name

    def lacking(self) -> dict[str, str]:
        """Entry -> home, of those that are not in the memory of their home: they have to be fetched there."""
        return {
            name: machine.name for machine in self._machines.values() for name in machine.homes.keys() - machine.copies
        }

    def kept_on(self, machine: str) -> set[str]:
        """What must not leave the machine's memory: what it is the home of, and copies of what is not at its home yet.
        Raises ``KeyError`` for a machine that is not there."""
        known = self._machines[machine]
        return {name for name in known.copies if name in self._entries and self._keeper(name) == machine}

    def homeless(self) -> Iterator[str]:
        """Entries for which no machine has room."""
        return iter(self._homeless)

    def load_bytes(self, machine: str) -> int:
        """What it answers for. Raises ``KeyError`` for a machine that is not there."""
        return self._machines[machine].load_bytes

    def holders(self, entry: str) -> frozenset[str]:
        """Machines with a copy in memory."""
        return frozenset(self._held.get(entry, ()))

    # --- inside ---

    def _keeper(self, name: str) -> str | None:
        entry = self._entries[name]
        if entry.home is not None and entry.home.name in entry.holders:
            return entry.home.name
        return min(entry.holders, default=None)

    def _place(self, name: str, among: Iterable[PoolHost]) -> None:
        nbytes, near = self._entries[name].nbytes, self._entries[name].near
        fitting = [m for m in among if m.room_bytes >= nbytes]
        if fitting:
            self._settle_at(name, min(fitting, key=lambda m: (m.load_bytes, m.name not in near, m.name)))

    def _settle_at(self, name: str, machine: PoolHost) -> None:
        entry = self._entries[name]
        self._send_away(name)
        del self._homeless[name]
        entry.home = machine
        machine.homes[name] = None
        machine.load_bytes += entry.nbytes

    def _send_away(self, name: str) -> None:
        entry = self._entries[name]
        if entry.home is not None:
            del entry.home.homes[name]
            entry.home.load_bytes -= entry.nbytes
            entry.home = None
        self._homeless[name] = None

    def _balance(self) -> None:
        if not self._sizes:
            return
        smallest, largest = min(self._sizes), max(self._sizes)
        while (move := self._next_move(smallest, largest)) is not None:
            self._settle_at(*move)

    def _next_move(self, smallest: int, largest: int) -> tuple[str, PoolHost] | None:
        by_load = sorted(self._machines.values(), key=lambda m: (m.load_bytes, m.name))
        lower = [m for m in by_load if m.room_bytes >= smallest]
        for top in reversed(by_load):
            for low in lower:
                if top.load_bytes - low.load_bytes <= largest:
                    break
                if (name := self._mover(top, low)) is not None:
                    return name, low
        return None

    def _mover(self, top: PoolHost, low: PoolHost) -> str | None:
        """What changes its home from ``top`` to ``low``, which answers for less by more than any entry."""
        fits = [e for e in top.homes if self._entries[e].nbytes <= low.room_bytes]
        half = (top.load_bytes - low.load_bytes) / 2

        def order(name: str) -> tuple[bool, bool, int, str]:
            nbytes = self._entries[name].nbytes
            return name not in low.copies, nbytes > half, nbytes if nbytes > half else -nbytes, name

        return min(fits, key=order, default=None)
