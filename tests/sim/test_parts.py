"""Queue, roofline, decode batch, prefix cache, sharing, host cache, fetcher, models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.config.catalog import load_catalog
from prism.core.errors import InvalidValue
from prism.core.ids import ModelName, NodeId
from prism.sim.fetch import Fetcher
from prism.sim.gpus import GPUS, gpu
from prism.sim.host_cache import HostCache
from prism.sim.links import Link, Network
from prism.sim.models import MODELS, catalog_specs, known_model, known_spec
from prism.sim.prefix import PrefixCache
from prism.sim.queue import EventQueue
from prism.sim.roofline import Load, Run, head_flops, layer_flops_per_token, step_cost
from prism.sim.sharing import Crowd, Pool
from tests.sim.helpers import tiny_spec

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_alarms_ring_in_order_and_moving_one_leaves_no_ghost() -> None:
    queue, rung = EventQueue(), []
    alarm = queue.alarm(rung.append, "moved")
    alarm.set(5.0)
    queue.after(3.0, rung.append, "first")
    queue.after(3.0, rung.append, "second")
    alarm.set(1.0)
    gone = queue.after(2.0, rung.append, "gone")
    gone.clear()
    assert queue.next_s() == 1.0
    queue.run_until(10.0)
    assert rung == ["moved", "first", "second"]
    assert queue.now_s == 10.0
    assert queue.next_s() is None


@given(
    first_us=st.integers(1, 10**6),
    growth_us=st.integers(0, 1000),
    lead_us=st.integers(0, 10**6),
    count=st.integers(1, 500),
    part=st.floats(0.0, 1.0),
)
def test_run_has_the_sum_of_its_steps(first_us: int, growth_us: int, lead_us: int, count: int, part: float) -> None:
    run = Run(first_us * 1e-6, growth_us * 1e-6, lead_us * 1e-6)
    times = [(first_us + growth_us * i + lead_us * (i == 0)) * 1e-6 for i in range(count)]
    assert run.total_s(count) == pytest.approx(sum(times))
    work_s = part * sum(times)
    done = run.done(work_s, count)
    assert sum(times[:done]) <= work_s * (1 + 1e-9) + 1e-9 * times[0]
    assert done == count or sum(times[: done + 1]) > work_s * (1 - 1e-9)


def test_roofline_of_an_8b_model_on_an_h100_is_plausible() -> None:
    model = known_spec("m", LLAMA, 1.0, 1.0)
    cost = step_cost(model, gpu("H100"))
    decode_s = cost.decode(1, 1000)[0].first_s
    assert 0.005 < decode_s < 0.012  # 16 GB of weights at 3.35 TB/s take 4.8 ms
    batch_s = cost.decode(64, 64_000)[0].first_s
    assert decode_s < batch_s < 5 * decode_s  # batching is nearly free until KV reads dominate
    assert 20_000 < cost.prefill_tokens_per_s(2048) < 62_000  # 989 TFLOPS / 16 GFLOP per token
    halves = step_cost(known_spec("m", LLAMA, 1.0, 1.0, 2), gpu("H100"))
    assert decode_s / 2 < halves.decode(1, 1000)[0].first_s < decode_s


@pytest.mark.parametrize("name", MODELS)
def test_shapes_agree_with_parameter_counts(name: str) -> None:
    model = known_model(name)
    embeddings = head_flops(model.shape) / 2
    layers = layer_flops_per_token(model.shape) / 2
    fewest, most = layers + embeddings, layers + 2 * embeddings  # input and output embeddings tied or not
    assert 0.97 * fewest < model.parameters < 1.03 * most


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match="H100"):
        gpu("H1000")
    with pytest.raises(InvalidValue, match=LLAMA):
        known_model("llama")


def test_catalog_options_reach_known_models(tmp_path: Path) -> None:
    text = f"models: [{{name: a, path: {LLAMA}}}, {{name: b, path: {LLAMA}, tp: 2, engine_args: {{dtype: float32}}}}]"
    (tmp_path / "c.yaml").write_text(text)
    a, b = catalog_specs(load_catalog(tmp_path / "c.yaml"))
    assert (a.weight_bytes, a.tp) == (known_model(LLAMA).weight_bytes, 1)
    assert (b.tp, b.shape.dtype_bytes) == (2, 4)
    assert b.weight_bytes == pytest.approx(2 * a.weight_bytes, abs=2)
    assert dict(b.engine_args) == {"dtype": "float32"}


def test_gpu_table_is_complete() -> None:
    assert {"A100", "A800", "H100", "H800", "H200", "B200"} <= set(GPUS)


def test_prefix_cache_counts_every_block_once() -> None:
    cache = PrefixCache(100)
    assert cache.match([1, 2, 3]) == 0
    assert cache.insert([1, 2, 3]) == [1, 2, 3]
    assert cache.match([1, 2, 9]) == 2
    assert cache.hold([1, 2]) == 0  # still held by the first
    assert cache.release([1, 2, 3]) == 100  # only 3 is idle now
    assert cache.release([1, 2]) == 200
    assert cache.idle_tokens == 300
    assert cache.hold([1]) == 100
    assert cache.evict(150) == 200  # 3 and 2 go, 1 is held
    assert cache.match([1, 2]) == 1
    assert cache.idle_tokens == 0


class _Engine:
    def __init__(self) -> None:
        self.told = 0

    def speed_changed(self) -> None:
        self.told += 1


def test_engines_slow_down_only_when_the_device_is_full() -> None:
    pool, a, b, c = Pool(2.0), _Engine(), _Engine(), _Engine()
    pool.set_load(a, Load(0.9, 0.1))
    pool.set_load(b, Load(0.05, 0.8))
    assert pool.rate == 1.0
    pool.set_load(c, Load(0.05, 0.7))
    assert pool.rate == pytest.approx(1 / 1.6)
    assert (a.told, b.told, c.told) == (1, 1, 0)
    pool.set_load(b, None)
    pool.set_speed(0.5)
    assert pool.rate == 0.5


def test_engines_beyond_the_cores_cost_more_than_their_share() -> None:
    pool, engines = Pool(1.0, 0.1, Crowd(2, 0.5)), [_Engine() for _ in range(4)]
    rates = []
    for engine in engines:
        pool.set_load(engine, Load(0.5, 0.0))
        rates.append(1 / pool.rate)
    assert rates == pytest.approx([1.0, 1.1, 1.6 + 0.5, 2.1 + 1.0])
    pool.set_load(engines[0], None)
    assert 1 / pool.rate == pytest.approx(2.1)


def test_a_thread_beside_engines_waits_for_a_core_not_for_their_share() -> None:
    pool, engines = Pool(1.0, 0.1), (_Engine(), _Engine())
    assert pool.beside_threads(0.5) == 1.0
    pool.set_load(engines[0], Load(0.7, 0.0))
    assert pool.beside_threads(0.5) == pytest.approx(1.1)  # what is in the background all the time counts
    pool.set_load(engines[1], Load(0.7, 0.0))
    assert pool.beside_threads(0.5) == pytest.approx(1.6)


def test_host_cache_keeps_homes_and_forgets_the_least_used_guest() -> None:
    cache, one, two = HostCache(), NodeId("n1"), NodeId("n2")
    a, b, c = ModelName("a"), ModelName("b"), ModelName("c")
    cache.add_node(one, 100)
    cache.add_node(two, 100)
    cache.spread([(a, 60), (b, 60), (c, 30)])
    home = cache.holders(a)[0]
    other = two if home == one else one
    assert cache.holders(b)[0] == other
    assert not cache.has(other, a)
    cache.keep(other, a, 60)
    assert not cache.has(other, a)  # 40 are left there
    cache.remove_node(other)
    assert not cache.holders(b)


def test_a_node_fetches_a_few_models_at_a_time() -> None:
    queue = EventQueue()
    fetcher, link, done = Fetcher(Network(queue), 2), Link("nic", 10.0), []
    fetches = [fetcher.fetch((link,), 100.0, lambda i=i: done.append((i, queue.now_s))) for i in range(4)]
    fetcher.cancel(fetches[3])
    fetcher.cancel(fetches[0])
    queue.run_until(100.0)
    assert [i for i, _ in done] == [1, 2]
    assert done[-1][1] == pytest.approx(20.0)


def test_what_is_on_its_way_comes_once_for_all_who_ask() -> None:
    queue = EventQueue()
    fetcher, link = Fetcher(Network(queue), 2), Link("nic", 10.0)
    done: list[tuple[int, float]] = []
    fetches = [fetcher.fetch((link,), 100.0, lambda i=i: done.append((i, queue.now_s)), "m") for i in range(3)]  # type: ignore[misc]
    fetcher.cancel(fetches[0])
    fetcher.fetch((link,), 100.0, lambda: done.append((3, queue.now_s)), "another")
    queue.run_until(15.0)
    assert not done
    queue.run_until(25.0)
    assert done == [(1, 20.0), (2, 20.0), (3, 20.0)]
    fetcher.fetch((link,), 100.0, lambda: done.append((4, queue.now_s)), "m")
    queue.run_until(36.0)
    assert done[-1] == (4, 35.0)  # it has come, and is asked for anew


def test_what_the_system_does_with_tokens_grows_with_their_number() -> None:
    """Alone an answer takes its share; four at once take the thread and four times the rest, per time."""
    host = replace(gpu("cpu"), engine_share=0.6, thread_share=0.5)
    cost = step_cost(tiny_spec("m"), host)
    alone, one = cost.decode(1, 0)
    four, many = cost.decode(4, 0)
    assert one.compute == 0.6
    assert many.compute == pytest.approx(0.5 + 0.1 * 4 * alone.first_s / four.first_s)
    assert step_cost(tiny_spec("m"), replace(host, thread_share=0.0)).decode(4, 0)[1].compute == 0.6
    assert cost.prefill(100, 0.0, 0, 1)[1].compute == 0.6
