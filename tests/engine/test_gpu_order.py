"""What an engine does to its GPU and when, with stand-ins that write down each call: no GPU is needed."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engine import boot, cuda_stub
from sglang_patches.streams import fence_freed_pages, run_loop

pytestmark = pytest.mark.engine


class Calls(list[str]):
    def note(self, name: str) -> Any:
        return lambda *_: self.append(name)


@pytest.fixture
def worker() -> Any:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prism.engine import worker
    return worker


@pytest.fixture
def calls(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr("torch.cuda.synchronize", calls.note("synchronize"))
    monkeypatch.setattr("torch.cuda.empty_cache", calls.note("empty torch's cache"))
    for name in ("release_scheduler", "forget_globals", "keep_all"):
        monkeypatch.setattr(worker, name, calls.note(name))
    return calls


def deactivate(worker: Any, kind: str, calls: Calls) -> None:
    made: Any = object.__new__(worker.Worker)
    made._kind, made._args = kind, SimpleNamespace(world=1)
    made._skeletons = SimpleNamespace(most=0, builds=list)
    made._device = SimpleNamespace(set_limit=calls.note("lift the limit"))
    made._owner = SimpleNamespace(id=1)
    made._outside = SimpleNamespace(park=calls.note("give the engine's grant back"), most_kept_bytes=None)
    active: Any = SimpleNamespace(
        scheduler=object(),
        seat=SimpleNamespace(close_pools=calls.note("unmap KV"), long_tiers=None),
        weights=SimpleNamespace(release=calls.note("unmap weights")),
    )
    made._deactivate(active)


def test_a_gpu_is_done_before_its_memory_goes_and_torch_keeps_none(worker: Any, calls: Calls) -> None:
    deactivate(worker, "cuda", calls)
    assert calls.index("synchronize") < calls.index("unmap KV")
    assert calls.index("forget_globals") < calls.index("empty torch's cache")
    assert calls.index("unmap weights") < calls.index("empty torch's cache")
    assert calls.index("empty torch's cache") < calls.index("give the engine's grant back")


def test_a_virtual_device_asks_no_gpu(worker: Any, calls: Calls) -> None:
    deactivate(worker, "host", calls)
    assert "unmap KV" in calls and not {"synchronize", "empty torch's cache"} & set(calls)


def test_kept_models_are_counted_and_the_oldest_go_when_they_are_too_much(
    worker: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = object.__new__(worker.Worker)
    kept, granted = ["old", "new", "newest"], []
    made._kind = "cuda"
    made._skeletons = SimpleNamespace(builds=lambda: kept, pop=lambda: kept.pop(0) if kept else None)
    made._outside = SimpleNamespace(park=granted.append, most_kept_bytes=250)
    made._drop = calls.append
    monkeypatch.setattr(worker, "torch_bytes", lambda kind: 100 * len(kept))
    made._bound_kept()
    assert calls == ["old", "empty torch's cache"] and kept == ["new", "newest"] and granted == [200]


@pytest.mark.parametrize(("overlap", "stream"), [(False, 11), (True, 22)])
def test_pages_are_fenced_on_the_stream_that_steps_run_on(overlap: bool, stream: int) -> None:
    fenced: list[int] = []
    group = SimpleNamespace(pool=SimpleNamespace(defer_on_stream=fenced.append))
    scheduler = SimpleNamespace(
        device="cuda",
        enable_overlap=overlap,
        schedule_stream=SimpleNamespace(cuda_stream=11),
        forward_stream=SimpleNamespace(cuda_stream=22),
        server_args=SimpleNamespace(prism_seat=SimpleNamespace(kv_groups=[group])),
    )
    fence_freed_pages(scheduler)
    scheduler.device = "cpu"
    fence_freed_pages(scheduler)
    assert fenced == [stream]


@dataclass
class Step:
    """As much of SGLang's batch as is looked at; requests come and go after it was started."""

    reqs: list[Any]
    forward_iter: int = 0


def running(rid: str, finished: bool = False) -> Any:
    return SimpleNamespace(rid=rid, finished=lambda: finished)


def started(step: Step) -> list[Any]:
    return [step, [getattr(step, field.name) for field in fields(step)]]


def test_a_fault_is_suspected_of_the_steps_in_flight_too(worker: Any) -> None:
    previous = Step([running("a"), running("b"), running("over", finished=True)])
    scheduler = SimpleNamespace(cur_batch_for_debug=Step([running("b"), running("new")]), batch_record_buf=[None, None])
    assert worker.suspects_of(scheduler) == ["b", "new"]
    scheduler.batch_record_buf[0] = started(previous)
    previous.reqs = []  # "a" was retracted since
    assert sorted(worker.suspects_of(scheduler)) == ["a", "b", "new"]
    del scheduler.batch_record_buf
    scheduler.cur_batch_for_debug = None
    assert worker.suspects_of(scheduler) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_in_flight_is_finished_when_the_loop_ends(overlap: bool) -> None:
    processed: list[tuple[str, str]] = []
    scheduler = SimpleNamespace(
        device="cpu",
        enable_overlap=overlap,
        chunked_prefill_size=2048,
        max_running_requests=64,
        running_batch=SimpleNamespace(batch_is_full=False),
        process_batch_result=lambda *step: processed.append(step),
    )

    def loop(scheduler: Any) -> None:
        if overlap:
            scheduler.result_queue = deque([("batch", "result")])

    run_loop(loop, scheduler)
    assert processed == ([("batch", "result")] if overlap else [])
