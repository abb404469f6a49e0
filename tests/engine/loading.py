"""Models that a loader fills and processes layer by layer, in the memory of one engine: what tests of engine images
work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from prism import memory
from prism.engine.module_state import HELPERS, holders, members
from prism.engine.weight_seat import EngineWeights
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import WeightStore
from sglang_patches.weights import AllocateInRegion

MIB = 1 << 20
DEVICE_BYTES = 64 * MIB
NOT_STATE = ("quant_config", "made")
"""Attributes of layers and their helpers that are other objects in every model."""
KEY = PackKey("a" * 32, "sglang-x/form2/tp1/rank0/bfloat16")


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Nested:
    """How a weight was quantised, itself quantised (bitsandbytes' ``QuantState``)."""

    def __init__(self, scales: torch.Tensor, inner: Nested | None) -> None:
        self.scales, self.inner, self.dtype, self.shape = scales, inner, torch.float16, torch.Size((3, 4))


class Plain:
    def create(self, layer: Any) -> None:
        layer.weight = parameter(300, 7, dtype=torch.float32)
        layer.register_buffer("steps", torch.arange(40, dtype=torch.int64))
        layer.table = torch.arange(2048, dtype=torch.float32)  # made again by every construction

    def process_weights_after_loading(self, layer: Any) -> None:
        return


class Layer(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.quant_method = method
        method.create(self)


class Model(nn.Module):
    def __init__(self, methods: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.quant_config = object()
        self.embed = Layer(Plain())
        self.layers = nn.ModuleList(Layer(method()) for method in methods)
        self.head = nn.Module()
        self.head.weight = self.embed.weight  # tied


def fill_randomly(model: nn.Module) -> None:
    """In place of ``load_weights``."""
    generator = torch.Generator().manual_seed(3)
    for value in model.parameters():
        raw = value.data.view(torch.uint8) if value.element_size() == 1 else value.data
        if value.is_floating_point():
            raw.copy_(torch.randn(raw.shape, generator=generator))
        else:
            raw.copy_(torch.randint(0, 100, raw.shape, generator=generator))


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything that a forward pass could read."""
    found: dict[str, Any] = {}
    for path, holder in holders(model):
        for name, kind, value in members(holder):
            if name in (*HELPERS, *NOT_STATE):
                continue
            if isinstance(value, torch.Tensor):
                found[f"{path}/{name}"] = (kind, look(value))
                found[f"{path}/{name}/marks"] = {k: look(v) for k, v in vars(value).items() if not callable(v)}
            else:
                found[f"{path}/{name}"] = (kind, look(value))
    return found


def look(value: Any) -> Any:
    """Something equal exactly for what is equal: tensors by their bytes, records by what they have."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, tuple(value.shape), value.stride(), xxhash.xxh3_64_hexdigest(raw)
    if isinstance(value, dict):
        return {key: look(item) for key, item in value.items()}
    return {key: look(item) for key, item in vars(value).items()} if isinstance(value, Nested) else value


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[memory.Owner]:
    device = memory.open_device("host:0", capacity_bytes=DEVICE_BYTES, account_dir=tmp_path / "accounts")
    with device.register("engine") as owner:
        yield owner


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "disk", host_directory=tmp_path / "host")


def weights_of(owner: memory.Owner, store: WeightStore | None, platform: str = "cpu") -> EngineWeights:
    return EngineWeights(owner, store, KEY, "a model", DEVICE_BYTES, 0, platform)


def construct(weights: EngineWeights, methods: list[Callable[[], Any]]) -> Model:
    with AllocateInRegion(weights, torch.device("cpu")):
        return Model(methods)


def load(weights: EngineWeights, methods: list[Callable[[], Any]]) -> tuple[Model, int]:
    """As SGLang's loader goes about it. The model, and the most bytes that were held meanwhile."""
    model = construct(weights, methods)
    weights.loading(model)
    fill_randomly(model)
    most = 0
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
            weights.processed(module)
            most = max(most, weights.held_bytes)
    weights.loaded(model)
    return model, most


def come_back(
    owner: memory.Owner, store: WeightStore, methods: list[Callable[[], Any]], platform: str = "cpu"
) -> dict[str, Any]:
    """Loads a model, then fills a second one from the image that the first left, and compares everything. Returns the
    picture."""
    first = weights_of(owner, store, platform)
    model, _ = load(first, methods)
    expected = picture(model)
    del model
    first.release()
    second = weights_of(owner, store, platform)
    assert second.from_image
    again = construct(second, methods)
    assert second.fill(again)
    found = picture(again)
    assert found.keys() == expected.keys()
    differing = {key: (expected[key], value) for key, value in found.items() if value != expected[key]}
    assert not differing, differing
    del again
    second.release()
    return expected
