"""Metrics: one process, several processes, and what is counted for a decision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism.core.effects import Activate, Deactivate, Dispatch, Effect, Route
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.obs import names
from prism.obs.definition import MetricKind
from prism.obs.metrics import Metrics, prepare_directory, render

ROOT = Path(__file__).parents[2]
MODEL, DEVICE = ModelName("m"), DeviceId("n/host:0")
KEY = InstanceKey(MODEL, Generation(1))


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in names.METRICS}) == len(names.METRICS)
    for metric in names.METRICS:
        assert metric.name.startswith("prism_")
        assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
        assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith((".", "..."))


def test_one_process() -> None:
    metrics = Metrics()
    metrics.inc(names.REQUESTS, model="a", device="", outcome="ok")
    metrics.observe(names.TTFT_SECONDS, 0.2, model="a", device="")
    metrics.set(names.CAPACITY_BYTES, 5, device="n/host:0")
    text = render(metrics).decode()
    assert 'prism_requests_total{device="",model="a",outcome="ok"} 1.0' in text
    assert 'prism_ttft_seconds_bucket{device="",le="0.25",model="a"} 1.0' in text
    assert 'prism_device_capacity_bytes{device="n/host:0"} 5.0' in text


def test_wrong_labels_are_errors() -> None:
    with pytest.raises(ValueError, match="label"):
        Metrics().inc(names.REQUESTS, model="a")


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        (
            Dispatch(RequestId("r"), KEY, because(ReasonCode.RESUMED)),
            ['prism_decisions_total{action="Dispatch",reason="resumed",scheduler="device"} 1.0'],
        ),
        (
            Activate(KEY, whole_model([DEVICE]), because(ReasonCode.MIGRATION)),
            ['prism_migrations_total{model="m"} 1.0', 'reason="migration",scheduler="cluster"} 1.0'],
        ),
        (
            Deactivate(
                InstanceKey(MODEL, Generation(1)),
                whole_model([DEVICE]),
                True,
                because(ReasonCode.MAKE_ROOM, need_bytes=3),
            ),
            ['prism_evictions_total{device="n/host:0",model="m",reason="make_room"} 1.0'],
        ),
        (Route(MODEL, ()), ['action="Route",reason="route",scheduler="cluster"} 1.0']),
    ],
)
def test_decisions_are_counted(effect: Effect, expected: list[str]) -> None:
    metrics = Metrics()
    metrics.decision(effect)
    text = render(metrics).decode()
    for line in expected:
        assert line in text


CHILD = """
import sys
from prism.obs import names
from prism.obs.metrics import Metrics, render
metrics = Metrics()
metrics.inc(names.GENERATED_TOKENS, 5, model="a")
metrics.inc(names.WAITING, 2, model="a")
metrics.set(names.KVPR, float(sys.argv[1]), device="d")
if sys.argv[2:]:
    from prism.obs.metrics import forget_process
    forget_process(int(sys.argv[2]))
    sys.stdout.write(render(metrics).decode())
else:
    import os
    print(os.getpid())
"""


def run_child(env: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", CHILD, *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_processes_are_merged(tmp_path: Path) -> None:
    env = prepare_directory(tmp_path / "metrics")
    first = run_child(env, "1")
    text = run_child(env, "2", first.strip())
    assert 'prism_generated_tokens_total{model="a"} 10.0' in text, "counters add up, those of the dead too"
    assert 'prism_requests_waiting{model="a"} 2.0' in text, "gauges of a process that ended are gone"
    assert 'prism_device_kvpr{device="d"} 2.0' in text


def test_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    env = prepare_directory(tmp_path)
    run_child(env, "1")
    assert list(tmp_path.glob("*.db"))
    prepare_directory(tmp_path)
    assert not list(tmp_path.glob("*.db"))


def test_making_the_environment_does_not_import_the_client() -> None:
    """prometheus_client reads the environment when it is imported: too early would be for ever wrong."""
    code = "import sys, prism.obs.metrics, prism.obs.decisions; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
