"""An image brings back what loading made of a model, however little of it is parameters: layers that quantise, repack
and tell their kernels so stand in for those that need a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from prism import memory
from prism.engine import module_state
from prism.weights.errors import WeightsError
from prism.weights.store.weight_store import WeightStore
from sglang_patches.weights import AllocateInRegion
from tests.engine.loading import (
    MIB,
    Model,
    Nested,
    Plain,
    come_back,
    construct,
    fill_randomly,
    load,
    owner,
    parameter,
    picture,
    store,
    weights_of,
)

__all__ = ["owner", "store"]
ROWS, COLUMNS = 1024, 2048
SHARED_WORKSPACE = torch.zeros(64, dtype=torch.int32)


class OnlineFp8:
    """Quantises a bfloat16 weight into a transposed float8 one, as SGLang's ``Fp8LinearMethod`` does."""

    def __init__(self) -> None:
        self.use_per_token = False

    def create(self, layer: nn.Module) -> None:
        layer.weight = parameter(ROWS, COLUMNS, dtype=torch.bfloat16)
        layer.register_parameter("input_scale", parameter(1, dtype=torch.float32))

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.abs().max().float() / 448
        layer.weight = nn.Parameter((layer.weight / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)  # no dimensions
        layer.weight_scale.format_ue8m0 = True
        layer.input_scale = None
        self.use_per_token = True


class Repacked:
    """Packs 4-bit weights anew, drops what the kernel does not read, hangs tensors and numbers on the layer (GPTQ, AWQ
    for Marlin)."""

    def create(self, layer: nn.Module) -> None:
        layer.qweight = parameter(COLUMNS // 8, ROWS, dtype=torch.int32)
        layer.scales = parameter(COLUMNS // 128, ROWS, dtype=torch.float16)
        layer.g_idx = parameter(COLUMNS, dtype=torch.int32)
        layer.is_k_full = False

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.sort_indices = torch.argsort(layer.g_idx).int()
        layer.workspace = SHARED_WORKSPACE
        layer.marlin_shape = (COLUMNS, ROWS, torch.float16)
        layer.is_k_full = True
        layer.qweight.data = layer.qweight.data.reshape(COLUMNS // 16, ROWS * 2).contiguous()
        layer.scales = nn.Parameter(layer.scales.data.flip(0).contiguous(), requires_grad=False)
        del layer.g_idx


class Blocks:
    """Bytes with scales beside them that become one tensor, seen in two ways (MXFP4), told by a helper of its own."""

    def create(self, layer: Any) -> None:
        layer.blocks = parameter(4, ROWS, 256, dtype=torch.uint8)
        layer.scales = parameter(4, ROWS, 16, dtype=torch.uint8)
        layer.scheme = Scheme()

    def process_weights_after_loading(self, layer: Any) -> None:
        whole = torch.cat([layer.blocks, layer.scales], dim=2)
        layer.w13 = nn.Parameter(whole, requires_grad=False)
        layer.w13_signed = whole.view(torch.int8)
        layer.scheme.sizes = {"k": 256, "n": ROWS, "groups": [16, 16]}
        layer.scheme.lookup = torch.arange(16, dtype=torch.uint8)
        del layer.blocks, layer.scales


class Scheme:
    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}


class Hung:
    """Leaves the weight as it was read and hangs the rest on it (bitsandbytes)."""

    def create(self, layer: Any) -> None:
        layer.qweight = parameter(ROWS * COLUMNS // 2, 1, dtype=torch.uint8)

    def process_weights_after_loading(self, layer: Any) -> None:
        inner = Nested(layer.qweight.data[:512].float(), None)
        layer.qweight.bnb_quant_state = {0: Nested(layer.qweight.data[:4096, 0] + 1, inner)}
        layer.qweight.bnb_shard_offsets = torch.tensor([0, ROWS * COLUMNS // 2])


class Finding(OnlineFp8):
    """Keeps a dictionary by which it found parameters, as some of SGLang's models do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer._cached_params_dict = dict(layer.named_parameters())
        super().process_weights_after_loading(layer)


METHODS: list[Callable[[], Any]] = [OnlineFp8, Repacked, Blocks, Finding, Hung]


@pytest.fixture(autouse=True)
def kept_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "RECORDS", {f"{Nested.__module__}:{Nested.__qualname__}"})


def test_the_second_time_everything_is_as_after_the_first(owner: memory.Owner, store: WeightStore) -> None:
    first = weights_of(owner, store)
    model, _ = load(first, METHODS)
    expected = picture(model)
    assert expected["layers.0/weight"][1][:3] == (torch.float8_e4m3fn, (COLUMNS, ROWS), (1, COLUMNS))
    assert "layers.1/g_idx" not in expected and "layers.2/blocks" not in expected
    del model
    first.release()
    second = weights_of(owner, store)
    assert second.from_image
    again = construct(second, METHODS)
    assert second.fill(again)
    assert picture(again) == expected
    assert again.head.weight.data_ptr() == again.embed.weight.data_ptr(), "tied weights stay tied"
    assert again.layers[2].w13.data_ptr() == again.layers[2].w13_signed.data_ptr() or torch.equal(
        again.layers[2].w13.view(torch.int8), again.layers[2].w13_signed
    )
    assert again.layers[0].quant_method.use_per_token
    del again
    second.release()
    gc.collect()
    assert owner.leased_bytes == 0


def test_no_model_is_in_memory_twice(owner: memory.Owner, store: WeightStore) -> None:
    """Each layer's originals go when what was made of them is there: 4 MiB become 2, layer after layer."""
    methods: list[Callable[[], Any]] = [OnlineFp8] * 6
    original_bytes, layer_bytes = 6 * ROWS * COLUMNS * 2, ROWS * COLUMNS
    first = weights_of(owner, store)
    model, most = load(first, methods)
    slack_bytes = 3 * 2 * MIB  # pages that are partly used
    assert most <= original_bytes + layer_bytes + slack_bytes
    assert first.held_bytes <= 6 * layer_bytes + slack_bytes
    del model
    first.release()
    second = weights_of(owner, store)
    again = construct(second, methods)
    second.fill(again)
    assert second.held_bytes <= 6 * layer_bytes + 2 * MIB
    del again
    second.release()


def test_without_a_store_the_weights_are_adopted_all_the_same(owner: memory.Owner) -> None:
    weights = weights_of(owner, None)
    model, _ = load(weights, METHODS)
    base = {name: t for name, t in model.named_parameters() if t.numel()}
    assert weights.held_bytes >= sum(t.numel() * t.element_size() for t in base.values()) - ROWS * COLUMNS
    del model, base
    weights.release()


def test_another_platforms_image_is_not_used(owner: memory.Owner, store: WeightStore) -> None:
    first = weights_of(owner, store, "cuda sm_90")
    load(first, METHODS)
    first.release()
    other = weights_of(owner, store, "cuda sm_80")
    assert not other.from_image
    load(other, METHODS)
    other.release()
    back = weights_of(owner, store, "cuda sm_90")
    assert back.from_image, "it was left as it is"
    back.release()


def test_a_plain_models_image_is_for_every_platform(owner: memory.Owner, store: WeightStore) -> None:
    class Unquantised(Model):
        def __init__(self) -> None:
            super().__init__([Plain])
            self.quant_config = None

    first = weights_of(owner, store)
    with AllocateInRegion(first, torch.device("cpu")):
        model = Unquantised()
    first.loading(model)
    fill_randomly(model)
    first.loaded(model)
    first.release()
    other = weights_of(owner, store, "cuda sm_80")
    assert other.from_image
    other.release()


class Strange(Plain):
    """Leaves an object that no image can hold."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.kernel = lambda: None


class OnTheParameter(Plain):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.quant_state = object()


class NewModule(Plain):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("method", "said"),
    [(Strange, "layers.0.kernel"), (OnTheParameter, "layers.0.weight"), (NewModule, "new modules (layers.0.inner)")],
)
def test_what_cannot_be_kept_is_loaded_each_time(
    owner: memory.Owner, store: WeightStore, method: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = weights_of(owner, store)
    load(first, [method])
    first.release()
    assert said in caplog.text
    second = weights_of(owner, store)
    assert not second.from_image
    second.release()


class Absorbed(Plain):
    """Derives what is needed of a module and takes that away (latent attention)."""

    def create(self, layer: Any) -> None:
        super().create(layer)
        layer.inner = nn.Linear(512, 64, bias=False)
        layer.derived = None

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.derived = layer.inner.weight.detach().clone().t()
        del layer.inner


def test_modules_that_are_gone_stay_gone(owner: memory.Owner, store: WeightStore) -> None:
    expected = come_back(owner, store, [Absorbed])
    assert "layers.0/derived" in expected and "layers.0.inner/weight" not in expected


def test_an_image_of_another_model(owner: memory.Owner, store: WeightStore) -> None:
    first = weights_of(owner, store)
    load(first, [OnlineFp8])
    first.release()
    for methods in ([OnlineFp8, OnlineFp8], []):
        second = weights_of(owner, store)
        with pytest.raises(WeightsError, match=r"does not fit|lacks"):
            second.fill(construct(second, methods))  # type: ignore[arg-type]
        second.release()
