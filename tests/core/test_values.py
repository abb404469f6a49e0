"""Requests, reasons and decision lines."""

from __future__ import annotations

import json

import pytest

from prism.core.effects import Activate, Dispatch, Route, decision_line
from prism.core.errors import InvalidValue
from prism.core.events import ActivationError
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.request import Request
from prism.core.settings import Admission, PolicyName, PolicySettings


def test_a_resumed_request_prefills_what_was_delivered_and_keeps_its_place_in_time() -> None:
    request = Request(RequestId("r"), ModelName("m"), 5.0, 100, 1.0, 60.0, cached_tokens=40)
    assert (request.prefill_tokens, request.kv_tokens, request.is_resumed) == (60, 100, False)
    again = request.resumed(7).resumed(3)
    assert (again.prefill_tokens, again.kv_tokens, again.is_resumed) == (107, 107, True)
    assert (again.deadline_s, again.must_run_s) == (6.0, 65.0)


def test_a_fully_cached_prompt_still_costs_a_step() -> None:
    assert Request(RequestId("r"), ModelName("m"), 0.0, 10, 1.0, 60.0, cached_tokens=10).prefill_tokens == 1


def test_reasons_read_well() -> None:
    assert str(because(ReasonCode.LATE, slack_s=-0.123456789, queued=3)) == "late (slack_s=-0.123457, queued=3)"
    assert str(Reason(ReasonCode.PINNED)) == "pinned"


def test_decision_lines_are_stable_json() -> None:
    reason = because(ReasonCode.DEMAND, waiting=2, waited_s=0.1 + 0.2)
    effect = Activate(InstanceKey(ModelName("m"), Generation(3)), whole_model([DeviceId("n/host:0")]), reason)
    line = decision_line(effect, 1.0000000001)
    assert line == (
        '{"at_s":1.0,"do":"Activate","model":"m","devices":["n/host:0"],"generation":3,'
        '"reason":{"code":"demand","waiting":2,"waited_s":0.3},"kv_cap_bytes":null}'
    )
    assert json.loads(decision_line(effect, 1795248661.123456))["at_s"] == 1795248661.123456
    assert json.loads(decision_line(Route(ModelName("m"), ()), 2.0))["devices"] == []
    late = because(ReasonCode.LATE, slack_s=float("-inf"))
    assert "-inf" in decision_line(Dispatch(RequestId("r"), InstanceKey(ModelName("m"), Generation(1)), late), 0.0)


def test_only_broken_models_fail_for_good() -> None:
    assert {e for e in ActivationError if e.permanent} == {
        ActivationError.WEIGHTS_MISSING,
        ActivationError.WEIGHTS_CORRUPT,
        ActivationError.UNSUPPORTED,
    }


@pytest.mark.parametrize("name", [p.value for p in PolicyName])
def test_presets_follow_their_papers(name: str) -> None:
    settings = PolicySettings.named(name)
    assert settings.cluster.policy.value == name
    assert (settings.gpu.admission is Admission.MOORE_HODGSON) == (name == "prism")
    assert settings.cluster.elastic_memory == (name != "static")


def test_an_unknown_policy_is_named_with_the_choices() -> None:
    with pytest.raises(InvalidValue, match=r"policy: unknown policy \(got 'best'\); choices: prism, static"):
        PolicySettings.named("best")
