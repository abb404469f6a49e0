"""Headers survive the round trip; everything malformed is an error that names the file, never a crash."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.weights.errors import BadPack
from prism.weights.packs.blocks import TensorPlan, layout_header, plan_blocks
from prism.weights.packs.format import (
    DTYPE_BITS,
    PREFIX,
    PackHeader,
    PackKey,
    TensorEntry,
    check_header,
    decode_header,
    decode_prefix,
    encode_header,
    expected_bytes,
)

KEY = PackKey("f" * 32, "sglang-0.5.16/tp1/rank0/float32")

tensors = st.lists(
    st.builds(
        TensorPlan,
        name=st.integers(0, 10_000).map(lambda i: f"model.layers.{i % 7}.t{i}"),
        dtype=st.sampled_from(sorted(DTYPE_BITS)),
        shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda t: t.name,
)


def sample() -> PackHeader:
    plans = [TensorPlan(f"layers.{i}.w", "bfloat16", (64, 100)) for i in range(5)]
    return layout_header(KEY, plan_blocks(plans), "a model", b"meta")


def decode(raw: bytes) -> PackHeader:
    size, checksum = decode_prefix(raw, "here")
    return decode_header(raw[PREFIX.size : PREFIX.size + size], checksum, "here")


@given(tensors, st.none() | st.integers(1, 5000))
def test_header_round_trip(plans: list[TensorPlan], block_bytes: int | None) -> None:
    header = layout_header(KEY, plan_blocks(plans, block_bytes), "label", b"\0meta")
    assert decode(encode_header(header)) == header
    assert {t.name for t in header.tensors} == {p.name for p in plans}
    ends = sorted((header.blocks[t.block].offset + t.offset, t.nbytes) for t in header.tensors)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ends)), "tensors overlap"
    assert all((header.blocks[t.block].offset + t.offset) % 256 == 0 for t in header.tensors)


@pytest.mark.hostile
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    raw = bytearray(encode_header(sample()))
    body_end = PREFIX.size + decode_prefix(bytes(raw), "here")[0]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, body_end - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
    if bytes(raw) != encode_header(sample()):
        with pytest.raises(BadPack, match="here"):
            decode(bytes(raw))


@pytest.mark.hostile
@given(st.binary(max_size=200))
def test_garbage_with_a_right_checksum_is_refused(body: bytes) -> None:
    with pytest.raises(BadPack):
        decode_header(body, xxhash.xxh3_64_intdigest(body), "here")


@given(st.integers(0, 200))
def test_truncated_headers_are_refused(length: int) -> None:
    raw = encode_header(sample())[:length]
    with pytest.raises(BadPack):
        decode(raw)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"data_bytes": -1}, "data_bytes"),
        ({"leaf_bytes": 0}, "leaf_bytes"),
        ({"leaf_bytes": 5000}, "leaf_bytes"),
        ({"leaf_sums": b"\0"}, "checksums"),
        ({"blocks": ()}, "no blocks"),
    ],
)
def test_inconsistent_headers_are_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(BadPack, match=why):
        check_header(msgspec.structs.replace(sample(), **change), "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float12"}, "float12"),
        ({"block": 99}, "block 99"),
        ({"block": -1}, "block -1"),
        ({"offset": -256}, "is in block"),
        ({"offset": 1 << 40}, "does not fit"),
        ({"nbytes": 3}, "not those of its shape"),
        ({"shape": (64, -100)}, "is in block"),
        ({"strides": (1,)}, "not those of its shape"),
        ({"name": "layers.1.w"}, "two tensors"),
        ({"aliases": ("layers.1.w",)}, "two tensors"),
    ],
)
def test_impossible_tensors_are_refused(change: dict[str, object], why: str) -> None:
    header = sample()
    first: TensorEntry = msgspec.structs.replace(header.tensors[0], **change)
    with pytest.raises(BadPack, match=why):
        check_header(msgspec.structs.replace(header, tensors=(first, *header.tensors[1:])), "here")


def test_overlapping_or_unaligned_blocks_are_refused() -> None:
    header = sample()
    for offset in (0, header.blocks[1].offset + 256):
        moved = msgspec.structs.replace(header.blocks[1], offset=offset)
        with pytest.raises(BadPack, match="overlaps"):
            check_header(msgspec.structs.replace(header, blocks=(header.blocks[0], moved, *header.blocks[2:])), "here")


def test_block_past_the_end_is_refused() -> None:
    header = sample()
    long = msgspec.structs.replace(header.blocks[-1], nbytes=1 << 40)
    with pytest.raises(BadPack, match="ends at"):
        check_header(msgspec.structs.replace(header, blocks=(*header.blocks[:-1], long)), "here")


def test_bytes_of_strided_and_sub_byte_tensors() -> None:
    assert expected_bytes("float32", (3, 4), (1, 3)) == 48  # a transposed view covers the same bytes
    assert expected_bytes("float32", (3, 4), (8, 1)) == 4 * (2 * 8 + 3 + 1)  # rows of a wider matrix
    assert expected_bytes("float32", (3,), (1, 2)) == -1
    assert expected_bytes("float4", (3,), ()) == 2
    assert expected_bytes("float32", (0, 4), (4, 1)) == 0


@given(tensors)
def test_leaves_cover_every_block(plans: list[TensorPlan]) -> None:
    header = layout_header(KEY, plan_blocks(plans), leaf_bytes=4096)
    for index, block in enumerate(header.blocks):
        leaves = header.block_leaves(index)
        if block.nbytes:
            assert header.leaf_range(leaves[0])[0] <= block.offset
            assert header.leaf_range(leaves[-1])[1] >= block.offset + block.nbytes
            assert all(block.name in header.blocks_in_leaf(leaf) for leaf in leaves)
