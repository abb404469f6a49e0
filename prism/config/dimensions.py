"""Whether ``config.json`` and the weights beside it speak of the same model, by the shapes in the weights' headers.

An engine would find out while it loads, or not at all: some loaders cut or pad what does not fit. Judged is only what
one configuration fixes for every layer::

    q_proj [heads x head_dim, hidden]    k_proj [kv_heads x head_dim, hidden]    o_proj [hidden, heads x head_dim]

Families that say other numbers for some of their layers, and tensors that are packed, pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prism.config.errors import ModelFilesError
from prism.core.specs import ModelShape

WHOLE: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Stored dtypes whose tensors have one element per weight."""
_LAYER: Final = re.compile(r"(?:(?:model|language_model|transformer)\.)*layers\.(\d{1,6})\.(.+)")
"""Of the language model; towers that see or hear have names of their own."""
_JUDGED: Final = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})
_OF_OTHER_LAYERS: Final = ("linear_", "mamba_", "ssm_", "lm_head")
_OF_SOME_LAYERS: Final = re.compile(
    r"head_dim|heads|attention_groups|other_setting|block_configs|hidden_size_per|attention_hidden"
)
_INPUTS: Final = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")

Shapes = Mapping[str, Sequence[int]]


def check_dimensions(config: Mapping[str, Any], shape: ModelShape, tensors: Shapes, where: str) -> None:
    """``config``: the language model's part of ``config.json``, called ``where``; ``shape``: what was read of it;
    ``tensors``: those stored as :data:`WHOLE`. Raises :class:`ModelFilesError` that names the field, its value, and
    what the weights say."""
    layers: dict[int, dict[str, Sequence[int]]] = {}
    for name, dims in tensors.items():
        if (found := _LAYER.fullmatch(name)) is not None:
            layers.setdefault(int(found[1]), {})[found[2]] = dims
    if 0 not in layers:
        return
    if (most := max(layers) + 1) < shape.layers:
        raise ModelFilesError(f"{where}: `num_hidden_layers` is {shape.layers}, and the weights have {most} layers")
    if any(_differs_by_layer(key, value) for key, value in config.items()):
        return
    judge = _latent_faults if shape.latent else _plain_faults
    for index, parts in layers.items():
        if index < shape.layers and (why := next(judge(config, shape, parts), None)) is not None:
            raise ModelFilesError(f"{where}: {why} (layer {index} of the weights)")


def _differs_by_layer(key: str, value: Any) -> bool:
    """Whether ``key`` says how some of the layers attend."""
    if not value or key in _JUDGED or key.startswith(_OF_OTHER_LAYERS) or _of_latents(key):
        return False
    return _OF_SOME_LAYERS.search(key) is not None


def _of_latents(key: str) -> bool:
    return key in ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")


def _plain_faults(config: Mapping[str, Any], shape: ModelShape, parts: Shapes) -> Iterator[str]:
    if config.get("v_head_dim"):
        return
    for name in _INPUTS:
        yield from _input_fault(shape, name, parts.get(name))
    head_dim = shape.head_dim
    if (columns := _columns(parts.get("self_attn.o_proj.weight"))) is not None:
        if config.get("head_dim") is None and columns % shape.heads == 0:
            head_dim = columns // shape.heads
        if columns != shape.heads * head_dim:
            said = (
                f"`num_attention_heads` is {shape.heads} and `head_dim` {head_dim}, {shape.heads * head_dim} together"
            )
            yield f"{said}, and self_attn.o_proj.weight takes {columns}"
    elif config.get("head_dim") is None:
        return
    if config.get("num_key_value_heads") is not None:
        yield from _kv_faults(shape, head_dim, parts)


def _kv_faults(shape: ModelShape, head_dim: int, parts: Shapes) -> Iterator[str]:
    """Rows of keys and values, by themselves or below the queries'."""
    above = {"k_proj": 0, "v_proj": 0, "qkv_proj": shape.heads * head_dim}
    for name, queries in above.items():
        dims = parts.get(f"self_attn.{name}.weight")
        if dims is None or len(dims) != 2:
            continue
        rows = dims[0] - queries
        heads = rows // (2 if queries else 1) / head_dim
        if heads != shape.kv_heads:
            said = f"`num_key_value_heads` is {shape.kv_heads} and `head_dim` {head_dim}"
            yield f"{said}, and self_attn.{name}.weight has {dims[0]} rows, which are {heads:g} heads of keys"


def _latent_faults(_: Mapping[str, Any], shape: ModelShape, parts: Shapes) -> Iterator[str]:
    """The projection to the latent row (DeepSeek-V2, section 2.1)."""
    name = "self_attn.kv_a_proj_with_mqa.weight"
    dims = parts.get(name)
    yield from _input_fault(shape, name, dims)
    if dims is not None and dims[0] != shape.latent:
        said = f"`kv_lora_rank` and `qk_rope_head_dim` are {shape.latent} together"
        yield f"{said}, and {name} has {dims[0]} rows"


def _input_fault(shape: ModelShape, name: str, dims: Sequence[int] | None) -> Iterator[str]:
    if (columns := _columns(dims)) is not None and columns != shape.hidden:
        yield f"`hidden_size` is {shape.hidden}, and {name} takes {columns}"


def _columns(dims: Sequence[int] | None) -> int | None:
    return dims[1] if dims is not None and len(dims) == 2 else None
