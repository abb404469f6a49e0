"""What SGLang does with a GPU at an activation and around it, on stand-ins: graphs later, no processes spawned."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.engine import boot, cuda_stub, zygote
from prism.engine.zygote_messages import Fork
from sglang_patches import gpus, graphs

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.managers.scheduler  # noqa: F401


class Runner:
    """As much of SGLang's model runner as capturing touches."""

    is_draft_worker = False
    decode_cuda_graph_runner: str | None = None
    prefill_cuda_graph_runner: str | None = None

    def __init__(self, device: str = "cuda", speculative: bool = False, full: bool = False) -> None:
        self.device, self.full = device, full
        self.spec_algorithm = SimpleNamespace(is_speculative=lambda: speculative)
        self.captured: list[str] = []

    def init_decode_cuda_graph(self) -> None:
        self.captured.append("capture")
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.decode_cuda_graph_runner = "graphs"


def scheduler(runner: Runner, tp: int = 1) -> Any:
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), forward_ct=0, ps=SimpleNamespace(tp_size=tp))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: found.append("synchronize"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: found.append("empty"))
    return found


def build(runner: Runner) -> Any:
    return graphs.put_off(lambda model_runner: "captured at once", model_runner=runner)


def test_graphs_are_captured_when_nobody_waits_and_once(calls: list[str]) -> None:
    runner = Runner()
    assert build(runner).runner is None and runner.captured == []
    engine = scheduler(runner)
    graphs.capture_due(engine, idle=False)
    assert runner.captured == [], "requests run"
    graphs.capture_due(engine, idle=True)
    graphs.capture_due(engine, idle=True)
    assert runner.captured == ["capture"] and calls == ["synchronize"], "the steps before are over"


def test_steps_that_go_over_a_route_run_without_graphs_until_the_engine_is_alone() -> None:
    runner = Runner()
    runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner = "decode", "prefill"
    found = graphs.Graphs(runner)
    for allowed in (True, False, False, True, True, False):
        found.allow(allowed)
        now = runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner
        assert now == (("decode", "prefill") if allowed else (None, None))


def test_an_engine_that_never_rests_captures_after_many_steps(calls: list[str]) -> None:
    runner = Runner()
    build(runner)
    engine = scheduler(runner)
    engine.forward_ct = graphs.EAGER_STEPS - 1
    graphs.capture_due(engine, idle=False)
    assert runner.captured == []
    engine.forward_ct += 1
    graphs.capture_due(engine, idle=False)
    assert runner.captured == ["capture"]


def test_without_memory_for_graphs_decoding_goes_on_without(calls: list[str]) -> None:
    runner = Runner(full=True)
    build(runner)
    graphs.capture_due(scheduler(runner), idle=True)
    assert runner.decode_cuda_graph_runner is None and calls == ["synchronize", "empty"]
    ranks = Runner(full=True)
    build(ranks)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture_due(scheduler(ranks, tp=2), idle=True)


@pytest.mark.parametrize("runner", [Runner("cpu"), Runner(speculative=True)], ids=["cpu", "drafts"])
def test_elsewhere_construction_does_what_it_did(runner: Runner, calls: list[str]) -> None:
    assert build(runner) == "captured at once"
    graphs.capture_due(scheduler(runner), idle=True)
    assert runner.captured == [] and calls == []


def test_the_kernel_that_stores_kv_takes_every_row(calls: list[str]) -> None:
    stored: dict[str, Any] = {}
    rows = torch.zeros((40, 2, 4))
    gpus.store_in_any_row(
        lambda *args, **kwargs: stored.update(kwargs), rows, rows, rows, rows, [39], row_dim=8, size_limit=33
    )
    assert stored == {"row_dim": 8, "size_limit": 40}


def test_the_memory_of_a_gpu_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=(index + 1) << 30)
    )

    def original(device: str | None) -> str:
        assert device == "cpu", "this spawns nvidia-smi"
        return "host"

    assert gpus.gpu_memory_mib(original, "cuda") == 4096
    assert gpus.gpu_memory_mib(original, "cpu") == "host"


def test_a_worker_opens_its_own_gpu_and_compiles_sampling_while_parked(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    from prism.engine import sglang_process

    on_host = {name: getattr(torch, name) for name in ("zeros", "ones")}

    def made_on_the_gpu(name: str) -> Any:
        def make(*args: Any, device: str, **kwargs: Any) -> torch.Tensor:
            assert device == "cuda"
            return on_host[name](*args, **kwargs)

        return make

    for name in on_host:
        monkeypatch.setattr(torch, name, made_on_the_gpu(name))
    monkeypatch.setattr("torch.cuda.set_device", lambda index: calls.append(f"gpu {index}"))
    monkeypatch.setattr(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        lambda probs, seeds, positions: calls.append(f"{len(probs)} {len(seeds)} {len(positions)}"),
    )
    sglang_process.open_gpu(3)
    assert calls == ["gpu 3", "1 1 1", "2 2 2", "synchronize", "empty"]


def test_what_sglang_keeps_of_a_model_on_a_gpu_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of graphs that nothing else refers to: gigabytes for each parked engine."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_executor import input_buffers
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    from prism.engine import sglang_process

    monkeypatch.setattr(factory, "_ROPE_DICT", {"a shape": object()})
    monkeypatch.setattr(input_buffers, "_forward_input_buffer_pool", {"input_ids": torch.zeros(1)})
    monkeypatch.setattr(GraphSharedOutput, "_process_shared", object())
    sglang_process.forget_globals()
    assert not factory._ROPE_DICT and not input_buffers._forward_input_buffer_pool
    assert GraphSharedOutput._process_shared is None


def test_ranks_may_stand_on_gpus_with_unequal_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses such ranks unless it is told not to look."""
    from sglang.srt.environ import envs

    assert envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get() is True
    for name, value in boot.CUDA_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get() is False


def test_sizing_after_capture_is_off_whatever_sglang_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    for name, value in boot.CUDA_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() is False


def test_a_front_door_beside_gpus_is_booted_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    booted: list[str] = []
    monkeypatch.setattr(boot, "boot", booted.append)
    front = Fork(ask=1, entry="", args={}, watch_pid=1, kind="host")
    zygote.boot_child(front, "cuda")
    zygote.boot_child(Fork(ask=2, entry="", args={}, watch_pid=1), "cuda")
    zygote.boot_child(front, "host")
    assert booted == ["host", "cuda"]
    assert boot.HOST_ENVIRONMENT["CUDA_VISIBLE_DEVICES"] == ""
