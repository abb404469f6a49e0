"""What waited for a model is dealt to the instances of a pipeline as they come up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.scheduler.beginnings import HOLD_S, SETTLE_S, Beginnings, ShareNow

M = ModelName("m")
DEVICES = [DeviceId(f"{node}/host:0") for node in "abcd"]


def orders(live: LiveMode = LiveMode.PIPELINES) -> list[Activate]:
    why = because(ReasonCode.OPERATOR)
    return [Activate(InstanceKey(M, Generation(i)), whole_model([d]), why, live=live) for i, d in enumerate(DEVICES)]


def test_each_gets_its_share_when_it_comes_up() -> None:
    """The first of four, a few hundredths of a second before the others, got all fifty, and most moved twice."""
    beginnings, waiting, got = Beginnings(), 50, list[int]()
    beginnings.ordered(orders(), 0.0)
    for i, device in enumerate(DEVICES):
        share = beginnings.share(M, DEVICES[: i + 1], waiting, 0.01 * i)
        assert share.devices == (device,)
        got.append(waiting if share.most is None else share.most)
        waiting -= got[-1]
        assert beginnings.begins_settling(M, 0.01 * i) == (i == 0)
        assert beginnings.settles_for(M, 0.01 * i)
    assert got == [13, 13, 12, 12] and waiting == 0
    assert beginnings.settles_for(M, HOLD_S + SETTLE_S) == 0.0


def test_who_is_up_already_is_given_nothing_more_while_others_may_come() -> None:
    beginnings = Beginnings()
    beginnings.ordered(orders(), 0.0)
    assert beginnings.share(M, DEVICES[:2], 10, 5.0) == ShareNow((*DEVICES[:2],), 6)
    assert beginnings.share(M, DEVICES[:2], 4, 5.0).most == 0


def test_members_that_come_up_half_a_second_apart_have_their_shares_and_may_be_relieved_soon() -> None:
    """Two that led over the two others made these busy: they were told to lead 0.3 s later, when all had been given to
    the first two. What waited was then not shared out before anybody was whole, as nothing is while queues settle."""
    beginnings, waiting, got = Beginnings(), 50, list[int]()
    beginnings.ordered(orders(), 0.0)
    for i, at_s in enumerate((0.0, 0.19, 0.32, 0.45)):
        share = beginnings.share(M, DEVICES[: i + 1], waiting, at_s)
        got.append(waiting if share.most is None else share.most)
        waiting -= got[-1]
        beginnings.begins_settling(M, at_s)
        assert beginnings.settles_for(M, at_s + 0.29) > 0.0
    assert got == [13, 13, 12, 12] and beginnings.settles_for(M, 0.45 + SETTLE_S) == 0.0
    assert not beginnings.begins_settling(M, 0.45 + SETTLE_S)


def test_where_nothing_waits_nothing_is_kept() -> None:
    beginnings = Beginnings()
    beginnings.ordered(orders(), 0.0)
    assert beginnings.share(M, DEVICES[:1], 0, 5.0) == ShareNow((DEVICES[0],))
    assert beginnings.share(M, DEVICES[:1], 3, 5.1) == ShareNow((DEVICES[0],)), "who had an old placement"
    assert not beginnings.begins_settling(M, 5.1)


def test_who_does_not_come_in_time_leaves_its_share_to_the_others() -> None:
    beginnings = Beginnings()
    beginnings.ordered(orders(), 0.0)
    beginnings.share(M, DEVICES[:1], 50, 5.0)
    beginnings.share(M, DEVICES[:2], 37, 5.1)
    assert beginnings.share(M, DEVICES[:2], 24, 5.0 + HOLD_S) == ShareNow((*DEVICES[:2],))
    late = 5.0 + HOLD_S + SETTLE_S
    assert beginnings.share(M, DEVICES[:3], 24, late) == ShareNow((*DEVICES[:3],)), "as ever"


def test_what_does_not_come_together_is_not_waited_for() -> None:
    beginnings = Beginnings()
    assert beginnings.share(M, DEVICES[:1], 50, 0.0) == ShareNow((DEVICES[0],))
    for others in (orders(LiveMode.WHOLE), orders()[:1]):
        beginnings.ordered(orders(), 0.0)
        beginnings.ordered(others, 0.0)
        assert beginnings.share(M, DEVICES[:1], 50, 0.0) == ShareNow((DEVICES[0],))
        assert not beginnings.begins_settling(M, 0.0)
    beginnings.ordered(orders(), 0.0)
    beginnings.ordered([replace(o, key=InstanceKey(ModelName("n"), Generation(9))) for o in orders()[:1]], 0.0)
    assert beginnings.share(M, DEVICES[:1], 50, 0.0).most == 13, "another model's decision"


def test_queues_that_settle_are_so_for_a_while_and_a_new_decision_ends_it() -> None:
    beginnings = Beginnings()
    beginnings.ordered(orders(), 0.0)
    beginnings.share(M, DEVICES[:1], 50, 5.0)
    assert beginnings.begins_settling(M, 5.0) and not beginnings.begins_settling(M, 5.1)
    assert beginnings.settles_for(M, 5.1) == pytest.approx(HOLD_S - 0.1), "others may come until then"
    beginnings.share(M, DEVICES, 37, 5.2)
    assert beginnings.settles_for(M, 5.2) == pytest.approx(SETTLE_S), "all are there"
    beginnings.ordered(orders(), 0.0)
    assert beginnings.settles_for(M, 5.2) == 0.0


def test_what_took_long_is_waited_for_longer() -> None:
    """Members of a slow load come up further apart: the last of four had nothing, and then half of the others'."""
    for took_s, held_s in ((1.0, HOLD_S), (22.0, 2.2)):
        beginnings = Beginnings()
        beginnings.ordered(orders(), 5.0)
        assert beginnings.share(M, DEVICES[:1], 50, 5.0 + took_s).most == 13
        assert beginnings.ask_again_in(M, 5.0 + took_s) == pytest.approx(held_s)
        assert beginnings.share(M, DEVICES[:2], 37, 5.0 + took_s + 0.9 * held_s).most == 13
        assert beginnings.share(M, DEVICES[:2], 24, 5.0 + took_s + held_s).most is None


def test_nothing_is_kept_for_those_that_lead_later() -> None:
    beginnings = Beginnings()
    beginnings.ordered(orders(), 0.0, {order.key for order in orders()[2:]})
    assert beginnings.share(M, DEVICES[:1], 50, 1.0).most == 25
    assert beginnings.share(M, DEVICES[:2], 25, 1.1) == ShareNow((DEVICES[1],))
    assert beginnings.settles_for(M, 1.1) and beginnings.settles_for(M, 1.45), (
        "others come, and lead for the same pipelines"
    )
    assert beginnings.share(M, DEVICES[:3], 3, 1.2) == ShareNow((DEVICES[2],)), "what comes later is dealt to them, too"
    assert beginnings.share(M, DEVICES, 0, 1.3).devices == (DEVICES[3],) and beginnings.settles_for(M, 1.6) == 0.0
    beginnings.ordered(orders(), 0.0, {order.key for order in orders()[2:]})
    beginnings.share(M, DEVICES[:2], 25, 10.0)
    assert beginnings.settles_for(M, 14.9) and not beginnings.settles_for(M, 15.0), (
        "who does not come is not waited for"
    )
