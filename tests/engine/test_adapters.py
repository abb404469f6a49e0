"""Which adapters an engine's process keeps: never more than it may, and never without one that a request here needs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prism.config.adapters import adapter_mark
from prism.engine.adapters import KEPT_PER_SLOT, AdapterRefused, EngineAdapters
from prism.wire.adapters import AdapterRef
from scripts.make_demo_adapter import make_adapter
from tests.engine.rig import codec

pytestmark = pytest.mark.engine
HIDDEN = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
SLOTS = 2
KEPT = KEPT_PER_SLOT * SLOTS


class Manager:
    """As much of SGLang's as is asked: what is loaded."""

    max_loras_per_batch = SLOTS + 1
    max_lora_rank = 4
    target_modules = frozenset(("qkv_proj",))
    base_hf_config = SimpleNamespace(to_dict=lambda: CONFIG)

    def __init__(self) -> None:
        self.lora_refs: dict[str, Any] = {}
        self.configs: dict[str, Any] = {}
        self.loras: dict[str, Any] = {}

    def _load_lora_adapter_from_tensors(self, ref: Any, tensors: dict[str, torch.Tensor], config: Any) -> Any:
        self.lora_refs[ref.lora_id] = ref
        return SimpleNamespace(success=True)

    def _unload_lora_adapter(self, ref: Any) -> Any:
        del self.lora_refs[ref.lora_id]
        return SimpleNamespace(success=True)


class Engine:
    """A scheduler whose queue is ours, with its adapters."""

    def __init__(self, base: Path) -> None:
        codec()
        self.manager, self.waiting_queue = Manager(), []
        none = SimpleNamespace(reqs=[])
        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=self.manager)),
            server_args=SimpleNamespace(model_path=str(base), revision=None, dtype="float32"),
            running_batch=none,
            last_batch=None,
            cur_batch_for_debug=none,
            waiting_queue=self.waiting_queue,
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            chunked_req=None,
        )
        self.adapters = EngineAdapters(scheduler)

    def take(self, lora_id: str, wait: bool) -> None:
        """A request comes, and waits here if ``wait``."""
        self.adapters.take(lora_id)
        if wait:
            self.waiting_queue.append(SimpleNamespace(lora_id=lora_id))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = {f"model.layers.0.self_attn.{m}.weight": torch.zeros(HIDDEN, HIDDEN) for m in ("q_proj", "v_proj")}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def ids(base: Path, count: int) -> list[str]:
    made = [make_adapter(base, base / f"a{i}", seed=i, rank=4, modules=["q_proj", "v_proj"]) for i in range(count)]
    return [AdapterRef(folder.name, str(folder), adapter_mark(folder)).id for folder in made]


def test_all_that_wait_at_once_stay(base: Path) -> None:
    """More than a process keeps: the one that came last is needed, too."""
    engine, many = Engine(base), ids(base, 3 * KEPT)
    for lora_id in many:
        engine.take(lora_id, wait=True)
    assert set(engine.manager.lora_refs) == set(many)


def test_those_used_longest_ago_are_forgotten(base: Path) -> None:
    engine, many = Engine(base), ids(base, KEPT + 4)
    engine.take(many[0], wait=True)
    for lora_id in many[1:]:
        engine.take(lora_id, wait=False)
    assert list(engine.manager.lora_refs) == [many[0], *many[-KEPT + 1 :]]
    assert not engine.adapters.forget("a0"), "a request needs it"
    engine.waiting_queue.clear()
    assert engine.adapters.forget("a0")
    assert many[0] not in engine.manager.lora_refs


def test_a_file_that_is_cut_off_is_that_adapters_problem(base: Path) -> None:
    engine, (whole, cut) = Engine(base), ids(base, 2)
    file = Path(AdapterRef.of(cut).folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AdapterRefused, match="a1"):
        engine.take(cut, wait=True)
    engine.take(whole, wait=True)
    assert list(engine.manager.lora_refs) == [whole]
