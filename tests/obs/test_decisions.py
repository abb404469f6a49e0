"""The decision log."""

from __future__ import annotations

from pathlib import Path

from prism.core.effects import Activate, decision_line
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.obs.decisions import DecisionLog, read_decisions
from prism.obs.metrics import Metrics, render


def effect(i: int) -> Activate:
    key = InstanceKey(ModelName(f"m{i}"), Generation(i))
    return Activate(key, whole_model([DeviceId("n/host:0")]), because(ReasonCode.DEMAND, waiting=i))


def test_committed_decisions_are_logged_and_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    log = DecisionLog(tmp_path / "logs" / "decisions.jsonl", metrics)
    for i in range(5):
        assert log.committed(effect(i), 100.0 + i) == decision_line(effect(i), 100.0 + i)
    log.close()
    found = read_decisions(tmp_path / "logs" / "decisions.jsonl", last=2)
    assert [record["model"] for record in found] == ["m3", "m4"]
    assert found[0]["reason"] == {"code": "demand", "waiting": 3}
    assert 'action="Activate",reason="demand",scheduler="cluster"} 5.0' in render(metrics).decode()


def test_half_lines_of_a_crash_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(decision_line(effect(1), 1.0).encode() + b'\n[1]\n{"at_s": 3, \xff')
    assert [record["model"] for record in read_decisions(file)] == ["m1"]
    assert read_decisions(tmp_path / "none.jsonl") == []
