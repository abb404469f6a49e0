"""Links for KV: which way it goes, at what rate, and what a lender loses to whoever copies out of its memory."""

from __future__ import annotations

import pytest

from benchmarks.kv.lent_model import LENDERS, LentRun, borrower_rate, lender_step_ms
from prism.config.sections.machine import KvConfig
from prism.core.errors import InvalidValue
from prism.sim.gpus import gpu
from prism.sim.kv_links import KvLinks, KvTier
from prism.sim.links import Network
from prism.sim.models import known_spec
from prism.sim.queue import EventQueue

A100 = gpu("A100")
PCIE = A100.pcie_bytes_per_s * A100.pcie_efficiency
NET = 5e9
ONE, SHARE = LENDERS[:1], KvConfig().lend_rate_fraction


def moved_in_s(*moves: tuple[str, str]) -> list[float]:
    """When each of these moves of 10 GB, begun together, is done."""
    queue = EventQueue()
    links = KvLinks(Network(queue), A100, ("a", "b"), NET)
    ended: dict[int, float] = {}
    for i, (source, target) in enumerate(moves):
        links.move(source, target, 10e9, lambda i=i: ended.update({i: queue.now_s}))  # type: ignore[misc]
    queue.run_until(100.0)
    return [ended[i] for i in range(len(moves))]


def test_each_way_at_the_rate_of_its_narrowest_link() -> None:
    for move, rate in (
        (("a", "b"), A100.nvlink_bytes_per_s),
        ((KvTier.HOST, "a"), PCIE),
        (("a", KvTier.HOST), PCIE),
        (("a", KvTier.NETWORK), NET),
        ((KvTier.NETWORK, "b"), NET),
    ):
        assert moved_in_s(move) == [pytest.approx(10e9 / rate)]


def test_directions_do_not_disturb_each_other_and_one_link_is_shared() -> None:
    assert moved_in_s(("a", KvTier.HOST), (KvTier.HOST, "a")) == pytest.approx([10e9 / PCIE] * 2)
    assert moved_in_s((KvTier.HOST, "a"), (KvTier.HOST, "a")) == pytest.approx([20e9 / PCIE] * 2)
    assert moved_in_s(("a", KvTier.NETWORK), ("b", KvTier.NETWORK)) == pytest.approx([20e9 / NET] * 2)


def test_places_that_are_not_there_are_named() -> None:
    links = KvLinks(Network(EventQueue()), A100, ("a",), NET)
    with pytest.raises(InvalidValue, match="'c'"):
        links.path("a", "c")
    with pytest.raises(InvalidValue, match="one end of a move is a device"):
        links.path(KvTier.HOST, KvTier.NETWORK)


def test_a_lender_is_a_faster_place_and_loses_only_memory_bandwidth() -> None:
    assert borrower_rate(ONE) > 3 * borrower_rate(())
    lender = known_spec("lender", "meta-llama/Llama-3.1-8B-Instruct", 1.0, 0.1)
    alone, beside = lender_step_ms(lender, None), lender_step_ms(lender, ONE)
    assert alone < beside < 1.25 * alone
    assert lender_step_ms(lender, ()) == pytest.approx(alone, rel=0.01)
    assert LentRun().lender_steps == 0


def test_who_lends_is_bound_and_not_who_borrows() -> None:
    links = KvLinks(Network(EventQueue()), A100, ("a", "b"), NET, ("b",), 0.05)
    lent = {link.name for link in links.path("a", "b") if "lent" in link.name}
    assert lent == {link.name for link in links.path("b", "a") if "lent" in link.name} == {"b lent"}


@pytest.mark.parametrize(
    ("path", "tp"), [("meta-llama/Llama-3.1-8B-Instruct", 1), ("meta-llama/Llama-3.3-70B-Instruct", 4)]
)
def test_a_lender_loses_a_twentieth_at_most_by_default(path: str, tp: int) -> None:
    spec = known_spec("lender", path, 1.0, 0.1, tp)
    alone, unbounded = lender_step_ms(spec, None), lender_step_ms(spec, ONE)
    for lenders in (ONE, LENDERS):
        assert alone < lender_step_ms(spec, lenders, SHARE) <= 1.05 * alone < unbounded


def test_several_places_at_once_give_the_sum_of_their_rates() -> None:
    """What the lender's share is too small for, another lender and host memory add."""
    one = LentRun(lenders=ONE, lent_share=SHARE)
    assert one.dealt() == {ONE[0]: 0.75, KvTier.HOST: 0.25}
    assert LentRun(lenders=ONE).dealt() == {ONE[0]: 1.0}, "host memory is too slow beside it"
    host = borrower_rate(())
    assert borrower_rate(ONE, SHARE) > 3.5 * host
    assert borrower_rate(LENDERS, SHARE) > 5 * host
