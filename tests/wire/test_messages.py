"""Every message survives the wire; malformed bytes are an error of one kind."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey, LayerRange, Part, Role
from prism.core.specs import ModelShape, ModelSpec
from prism.wire import messages as m

_NAMES = {cls.__name__: cls for cls in m.Message.__subclasses__()}


def test_the_union_lists_every_message() -> None:
    assert set(m.AnyMessage.__args__) == set(_NAMES.values())


SPEC = ModelSpec(
    name=ModelName("org/model:7b"),
    path="/models/x",
    slo_ttft_s=0.5,
    slo_tpot_s=0.05,
    weight_bytes=1 << 34,
    shape=ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128_256),
    context_tokens=8192,
    aliases=("m",),
    engine_args=(("dtype", "float16"), ("stream_interval", 2)),
)


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type; free-form dictionaries hold plain JSON values."""
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{f.name: _values(f.type) for f in msgspec.structs.fields(kind)})
    if kind is ModelSpec:
        return st.just(SPEC)
    if kind is Part:
        devices = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True)
        layers = st.none() | st.just(LayerRange(0, 16))
        named = devices.map(lambda found: tuple(DeviceId(f"n/cuda:{i}") for i in found))
        return st.builds(Part, named, layers, st.sampled_from(Role))
    if kind is InstanceKey:
        return st.builds(InstanceKey, st.text(max_size=5), _values(int))
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(_values(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(_values(args[0]), max_size=3)
    if origin is dict:
        plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5)
        return st.dictionaries(st.text(max_size=5), plain if args[1] is object else _values(args[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(_values, args))
    if origin in (UnionType, Union):
        return st.one_of([_values(arg) for arg in args])
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    return st.from_type(kind)


@given(st.sampled_from(sorted(_NAMES)).flatmap(lambda name: _values(_NAMES[name])))
def test_round_trip(message: m.AnyMessage) -> None:
    assert m.decode(m.encode(message)) == message


@given(st.binary(max_size=200))
def test_junk_is_refused_not_raised_as_something_else(data: bytes) -> None:
    try:
        m.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return


def test_unknown_fields_are_ignored_and_new_ones_have_defaults() -> None:
    newer = msgspec.msgpack.encode({"_": "Cancel", "id": "r", "reason": "x", "added_later": 1})
    assert m.decode(newer) == m.Cancel(id="r", reason="x")
    with pytest.raises(msgspec.ValidationError):
        m.decode(msgspec.msgpack.encode({"_": "NoSuchMessage"}))
