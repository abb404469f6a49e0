"""What saves least is dropped first, one by one."""

from __future__ import annotations

import time

from prism.kv.drop_order import DropOrder
from prism.policy.moving import StoredPiece

NOW_S = time.time()


def piece(name: str, age_s: float, nbytes: int = 10) -> StoredPiece:
    return StoredPiece(name, nbytes, NOW_S - age_s, nbytes * 1e-9, 0)


def test_the_oldest_goes_first_and_each_goes_once() -> None:
    order = DropOrder([piece("b", 20), piece("c", 10), piece("a", 30)], NOW_S)
    assert [getattr(order.first(), "name", None) for _ in range(4)] == ["a", "b", "c", None]
    assert order.is_worn


def test_one_of_a_size_goes_before_others_that_are_about_to_go() -> None:
    made = [piece("a", 40), piece("b", 30, 15), piece("c", 20), piece("d", 10, 20)]
    order = DropOrder(made, NOW_S)
    assert order.take(15, 20) == made[1] and order.take(15, 20) is None
    assert order.take(20, 20) is None, "it is not among them yet"
    assert order.first() == made[0] and order.take(20, 20) == made[3] and order.first() == made[2]


def test_an_order_holds_for_a_while() -> None:
    assert not DropOrder([piece("a", 1)], time.time()).is_worn
    assert DropOrder([piece("a", 1)], NOW_S - 60).is_worn and DropOrder([piece("a", 1)], time.time() + 60).is_worn
    assert DropOrder().is_worn and DropOrder().first() is None
