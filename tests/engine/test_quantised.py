"""Engine images of what SGLang's own quantisation makes of a checkpoint's layers: FP8, compressed-tensors, GPTQ and AWQ
for Marlin, bitsandbytes. Their layouts are kept as they are, whatever they are; only kernels that need a GPU have
stand-ins here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism import memory
from prism.engine import module_state
from prism.weights.store.weight_store import WeightStore
from tests.engine.loading import MIB, come_back, construct, load, owner, store, weights_of
from tests.engine.rig import codec

__all__ = ["owner", "store"]
pytestmark = pytest.mark.engine
INPUTS, OUTPUTS = 512, (512, 256)


def repack(weight: torch.Tensor, **sizes: int) -> torch.Tensor:
    """In place of Marlin's: another shape, other places."""
    size_k, size_n = sizes["size_k"], sizes["size_n"]
    return weight.flatten().flip(0).reshape(size_k // 16, size_n * sizes["num_bits"] // 2)


def to_fp8(given: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_static: bool) -> None:
    """In place of the kernel that quantises a whole tensor."""
    if not is_static:
        scale.fill_(given.abs().max().float() / 448)
    out.copy_((given / scale).to(out.dtype))


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's quantisation, on a GPU as far as it asks for one."""
    codec()
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.hardware_backend.gpu.quantization import awq_kernels, gptq_kernels
    from sglang.srt.layers.quantization import awq, compressed_tensors, fp8, gptq, marlin_utils
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as packed

    monkeypatch.setattr(fp8_kernel, "sgl_per_tensor_quant_fp8", to_fp8, raising=False)
    monkeypatch.setattr(marlin_utils, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(gptq_kernels, "gptq_marlin_repack", lambda w, perm, **sizes: repack(w, **sizes))
    monkeypatch.setattr(packed, "gptq_marlin_repack", lambda w, perm, **sizes: repack(w, **sizes), raising=False)
    monkeypatch.setattr(awq_kernels, "awq_marlin_repack", repack, raising=False)
    for module in (awq_kernels, gptq_kernels, packed):
        monkeypatch.setattr(module, "marlin_make_workspace", lambda _: torch.zeros(64, dtype=torch.int32))
    return SimpleNamespace(fp8=fp8, awq=awq.awq, gptq=gptq.gptq, compressed=compressed_tensors.schemes)


class Method:
    """A layer's, as SGLang's linear layers use it. ``scheme``: it belongs to the layer."""

    def __init__(self, method: Any = None, scheme: Any = None) -> None:
        self.method, self.made = method, scheme

    def create(self, layer: Any) -> None:
        if self.made is not None:
            layer.scheme = self.made
        else:
            layer.quant_method = self.method
        (self.made or self.method).create_weights(
            layer=layer,
            input_size_per_partition=INPUTS,
            output_partition_sizes=list(OUTPUTS),
            input_size=INPUTS,
            output_size=sum(OUTPUTS),
            params_dtype=torch.float16,
            weight_loader=None,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        self.made.process_weights_after_loading(layer)


def fp8(sglang: Any, serialized: bool, static: bool) -> Any:
    config = sglang.fp8.Fp8Config(serialized, "static" if static else "dynamic")
    return Method(sglang.fp8.Fp8LinearMethod(config))


def int8(sglang: Any, strategy: str, static: bool) -> Any:
    return Method(scheme=sglang.compressed.CompressedTensorsW8A8Int8(strategy, static, True))


def packed(sglang: Any, order: str | None) -> Any:
    return Method(scheme=sglang.compressed.CompressedTensorsWNA16("group", 4, 128, actorder=order))


def gptq(sglang: Any, order: bool) -> Any:
    from sglang.srt.layers.quantization.gptq.schemes.gptq_marlin import GPTQMarlinLinearScheme

    return Method(scheme=GPTQMarlinLinearScheme(sglang.gptq.GPTQMarlinConfig(4, 128, order, True, False, {}, {})))


def awq(sglang: Any) -> Any:
    from sglang.srt.layers.quantization.awq.schemes.awq_marlin import AWQMarlinLinearScheme

    return Method(scheme=AWQMarlinLinearScheme(sglang.awq.AWQMarlinConfig(4, 128, True, False, [], {})))


MADE: dict[str, Callable[[Any], Any]] = {
    "FP8 checkpoint": lambda sglang: fp8(sglang, True, False),
    "FP8 checkpoint with scales of inputs": lambda sglang: fp8(sglang, True, True),
    "FP8 made when it is loaded": lambda sglang: fp8(sglang, False, False),
    "compressed-tensors, int8 by channel": lambda sglang: int8(sglang, "channel", False),
    "compressed-tensors, int8 by tensor": lambda sglang: int8(sglang, "tensor", True),
    "compressed-tensors, 4 bits": lambda sglang: packed(sglang, None),
    "GPTQ": lambda sglang: gptq(sglang, False),
    "GPTQ in the order of activations": lambda sglang: gptq(sglang, True),
    "AWQ": awq,
}


@pytest.mark.parametrize("name", MADE)
def test_it_comes_back_from_its_image(sglang: Any, owner: memory.Owner, store: WeightStore, name: str) -> None:
    """Every tensor in its layout, with the numbers and flags that kernels were told."""
    come_back(owner, store, [lambda: MADE[name](sglang)] * 2, "cuda sm_90")


def test_what_kernels_were_told_is_in_the_image(sglang: Any, owner: memory.Owner, store: WeightStore) -> None:
    """Objects of objects of a layer have a part of its state: without it the second activation would have no
    workspace."""
    expected = come_back(owner, store, [lambda: gptq(sglang, False)], "cuda sm_90")
    assert expected["layers.0#scheme#kernel/workspace"][0] == module_state.ATTRIBUTE
    assert expected["layers.0#scheme#kernel/is_k_full"][1] is True


def test_neither_time_twice_the_memory(sglang: Any, owner: memory.Owner, store: WeightStore) -> None:
    """Eight layers are read as 16-bit and quantised to 8: what was read goes layer by layer."""
    methods: list[Callable[[], Any]] = [lambda: fp8(sglang, False, False)] * 8
    layer_bytes = INPUTS * sum(OUTPUTS)
    first = weights_of(owner, store)
    _, most = load(first, methods)
    slack_bytes = 3 * 2 * MIB  # pages that are partly used
    assert most <= 8 * 2 * layer_bytes + layer_bytes + slack_bytes
    first.release()
    second = weights_of(owner, store)
    assert second.fill(construct(second, methods))
    assert second.held_bytes <= 8 * layer_bytes + 2 * MIB
    second.release()
