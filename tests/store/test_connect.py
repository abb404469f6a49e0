"""Who starts waits for a store's first answer, for so long and no longer."""

from __future__ import annotations

import pytest

from prism.store.connect import reach
from prism.store.memory import MemoryStore
from prism.store.values import StoreRefused, StoreUnavailable


class Late(MemoryStore):
    """Answers after some pings without one."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def ping(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def test_a_busy_store_is_asked_again() -> None:
    store = Late(StoreUnavailable("busy"), StoreUnavailable("busy"))
    await reach(store)
    assert not store.errors


async def test_one_that_never_answers_is_given_up() -> None:
    store = Late(StoreUnavailable("first"), StoreUnavailable("second"))
    with pytest.raises(StoreUnavailable, match="first"):
        await reach(store, within_s=0.0)
    assert len(store.errors) == 1


async def test_who_is_refused_does_not_wait() -> None:
    store = Late(StoreRefused("wrong password"), StoreUnavailable("not asked"))
    with pytest.raises(StoreRefused):
        await reach(store)
    assert len(store.errors) == 1
