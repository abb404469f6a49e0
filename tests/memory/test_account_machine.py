"""The account against a model that adds up: floors, limits, classes, refusals, exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from prism import memory
from prism.memory import errors
from prism.memory.owner import Klass

CAPACITY = 1 << 20
BYTES = st.integers(0, CAPACITY + 1)
KLASSES = st.sampled_from(["weights", "kv", "staging", "outside"])


@dataclass
class Entry:
    """What the model thinks of one owner."""

    owner: memory.Owner
    floor: int
    limit: int | None
    held: dict[str, int] = field(default_factory=lambda: {"weights": 0, "kv": 0, "staging": 0, "outside": 0})
    measured: int = 0

    @property
    def total(self) -> int:
        return sum(self.held.values()) - self.held["outside"]

    @property
    def charged(self) -> int:
        return max(self.total, self.floor) + max(self.held["outside"], self.measured)


class AccountMachine(RuleBasedStateMachine):
    """Owners come, reserve, release, are limited and go."""

    device: memory.Device
    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.foreign = 0

    def teardown(self) -> None:
        for entry in self.entries:
            entry.owner.close()
        self.device.note_foreign(0)
        assert self.device.free_bytes() == CAPACITY

    @property
    def free(self) -> int:
        return CAPACITY - self.foreign - sum(entry.charged for entry in self.entries)

    @rule(target=owners, floor=st.just(0) | BYTES, limit=st.none() | BYTES)
    def enter(self, floor: int, limit: int | None) -> Entry | None:
        try:
            entry = Entry(self.device.register("owner", floor, limit), floor, limit)
        except errors.FloorUnavailable as error:
            assert floor > self.free == error.numbers["free_bytes"]
            return None
        assert floor <= max(0, self.free)
        self.entries.append(entry)
        return entry

    @rule(entry=consumes(owners))
    def leave(self, entry: Entry | None) -> None:
        if entry is None:
            return
        entry.owner.close()
        self.entries.remove(entry)

    @rule(entry=owners, nbytes=BYTES, klass=KLASSES)
    def reserve(self, entry: Entry | None, nbytes: int, klass: Klass) -> None:
        if entry is None:
            return
        over = entry.limit is not None and klass != "outside" and entry.total + nbytes > entry.limit
        before = entry.charged
        entry.held[klass] += nbytes
        more = entry.charged - before
        entry.held[klass] -= nbytes
        short = more > 0 and more > self.free
        try:
            entry.owner.reserve(nbytes, klass)
        except errors.LimitExceeded as error:
            assert over and error.numbers["held_bytes"] == entry.total
        except errors.OutOfMemory as error:
            assert short and not over and error.numbers["free_bytes"] == self.free
        else:
            assert not over and not short
            entry.held[klass] += nbytes

    @rule(entry=owners, nbytes=BYTES, klass=KLASSES)
    def release(self, entry: Entry | None, nbytes: int, klass: Klass) -> None:
        if entry is None:
            return
        try:
            entry.owner.release(nbytes, klass)
        except errors.OverRelease:
            assert nbytes > entry.held[klass]
        else:
            entry.held[klass] -= nbytes

    @rule(entry=owners, nbytes=BYTES)
    def measure(self, entry: Entry | None, nbytes: int) -> None:
        """What is found counts, whether there is room or not."""
        if entry is not None:
            self.device.note_outside(entry.owner.id, nbytes)
            entry.measured = nbytes

    @rule(nbytes=BYTES)
    def strangers(self, nbytes: int) -> None:
        self.device.note_foreign(nbytes)
        self.foreign = nbytes

    @rule(entry=owners, limit=st.none() | BYTES)
    def set_limit(self, entry: Entry | None, limit: int | None) -> None:
        if entry is not None:
            self.device.set_limit(entry.owner.id, limit)
            entry.limit = limit

    @invariant()
    def books_agree(self) -> None:
        audit = self.device.audit()
        assert not audit.problems
        assert audit.books.free_bytes == self.free and self.device.free_bytes() == max(0, self.free)
        assert self.device.foreign_bytes() == self.foreign
        assert self.device.outside_bytes() == sum(max(e.held["outside"], e.measured) for e in self.entries)
        seen = {o.id: o for o in audit.books.owners}
        assert len(seen) == len(self.entries)
        for entry in self.entries:
            o = seen[entry.owner.id]
            held = {
                "weights": o.weights_bytes,
                "kv": o.kv_bytes,
                "staging": o.staging_bytes,
                "outside": o.granted_bytes,
            }
            assert (held, o.floor_bytes, o.limit_bytes) == (entry.held, entry.floor, entry.limit)
            over = max(0, entry.total - entry.limit) if entry.limit is not None else 0
            overdrawn = max(0, min(-self.free, entry.total - entry.floor))
            assert entry.owner.excess() == over and entry.owner.pressure() == max(over, overdrawn)


def test_account_agrees_with_the_model(device: memory.Device) -> None:
    machine = type("Machine", (AccountMachine,), {"device": device})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
