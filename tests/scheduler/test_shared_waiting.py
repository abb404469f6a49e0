"""What waits for a model is shared out whenever a further instance of it has come up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import ShareWaiting
from prism.core.events import ActivationFinished, CatalogChanged, DeviceReport, InstanceLoad, OperatorLoad, WaitingDealt
from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.small_world import GB0, GB1, QUIET, A, report_load, serve, world


def test_what_waits_is_shared_out_once_most_of_those_that_come_together_are_there() -> None:
    w = world(model_spec("a", 300), devices=4, settings=replace(QUIET, standing_replicas=False))
    serve(w, A)
    for _ in range(6):
        report_load(w, A, 20, 24)
    first, *further = list(w.live)
    assert len(further) == 3
    w.activated(further[0])
    assert not _shared(w), "as many are to come as are there"
    w.activated(further[1])
    assert _shared(w) == [(first, GB0, pytest.approx(1 / 3))], "the last one may be late"
    w.activated(further[2])
    assert [share for _, _, share in _shared(w)[1:]] == 3 * [pytest.approx(3 / 4)], "and has its share then"


def test_an_instance_that_serves_early_gets_its_share_while_others_are_still_to_come() -> None:
    """These may have the last of their weights much later; it would stand idle until then."""
    w = world(model_spec("a", 300), devices=3, settings=replace(QUIET, standing_replicas=False))
    serve(w, A)
    for _ in range(6):
        report_load(w, A, 20, 12)
    first, *further = list(w.live)
    w.live[further[0]].state = "ready"
    w.send(ActivationFinished(further[0], 0.1, early=True))
    assert _shared(w) == [(first, GB0, pytest.approx(1 / 2))]
    w.activated(further[1])
    assert [key for key, _, _ in _shared(w)[1:]] == [first, further[0]], "each had half of it"
    assert [share for _, _, share in _shared(w)[1:]] == 2 * [pytest.approx(2 / 3)]


def test_what_came_to_the_first_instance_before_the_others_were_up_is_shared_out_with_its_next_report() -> None:
    """All that waited for the model went to the first one that came up, and no report said so yet."""
    w = world(model_spec("a", 300), devices=3, settings=replace(QUIET, standing_replicas=False))
    w.send(OperatorLoad(A, (), 3))
    first, *further = list(w.live)
    for key in (first, *further):
        w.activated(key)
    assert not _shared(w)
    load = InstanceLoad(first, 300, 100, 0, 4, 45, 9)
    for _ in range(2):
        w.send(DeviceReport(GB0, 1000, 500, (load,)))
    assert _shared(w) == [(first, GB0, pytest.approx(1 / 3))], "once, although the next report knows no better"


def test_reports_that_were_made_before_all_of_it_had_come_are_not_the_last_word() -> None:
    """Those that come at the same moment: what waited is on its way to the first one when all have come up."""
    w = world(model_spec("a", 300), devices=3, settings=replace(QUIET, standing_replicas=False))
    w.send(OperatorLoad(A, (), 3))
    first, *further = list(w.live)
    for key in (first, *further):
        w.activated(key)
    for waiting, running in ((0, 0), (0, 0), (0, 0), (0, 0), (1, 0), (45, 4)):
        w.send(DeviceReport(GB0, 1000, 500, (InstanceLoad(first, 300, 100, 0, running, waiting, 9),)))
    assert _shared(w) == [(first, GB0, pytest.approx(1 / 3))]


def test_while_what_waited_is_dealt_nothing_is_shared_out_and_then_by_what_is_reported() -> None:
    """What was decided meanwhile was not carried out, the books believed it was, and it was never decided again."""
    w = world(model_spec("a", 300), devices=3, settings=replace(QUIET, standing_replicas=False))
    w.send(OperatorLoad(A, (), 3))
    first, second, third = list(w.live)
    w.activated(first)
    w.send(WaitingDealt(A, settled=False))
    _report(w, GB0, first, 12)
    w.activated(second)
    _report(w, GB1, second, 12)
    for _ in range(4):
        _report(w, GB0, first, 20)
    w.activated(third)
    assert not _shared(w)
    _report(w, GB0, first, 18)
    w.send(WaitingDealt(A, settled=True))
    assert _shared(w) == [(first, GB0, pytest.approx(10 / 18)), (second, GB1, pytest.approx(10 / 12))], "loads of then"
    _report(w, GB0, first, 40)
    assert _shared(w)[2:] == [(first, GB0, pytest.approx(20 / 40))], "and by the next reports"


def test_a_model_that_is_gone_settles_too() -> None:
    w = world(model_spec("a", 300))
    serve(w, A)
    w.send(WaitingDealt(A, settled=False))
    w.send(CatalogChanged(removed=(A,)))
    w.step()
    w.send(WaitingDealt(A, settled=True))
    assert not _shared(w)


def _report(w: World, device: DeviceId, key: InstanceKey, waiting: int) -> None:
    w.send(DeviceReport(device, 1000, 500, (InstanceLoad(key, 300, 100, 0, 4, waiting, 9),)))


def _shared(w: World) -> list[tuple[object, object, float]]:
    return [(e.key, e.device, e.kept_share) for _, e in w.log if isinstance(e, ShareWaiting)]
