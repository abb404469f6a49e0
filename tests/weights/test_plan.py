"""Blocks follow the forward pass: embeddings, layers in order, head; a size limit cuts them between tensors."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.planner import PlanRequest, end_blocks, first_blocks
from prism.transfer.session import cut_pieces
from prism.weights.packs.blocks import TensorPlan, layout_header, plan_blocks, stage_of
from prism.weights.packs.format import PackKey
from prism.weights.store.disk_fill import end_parts, lead_first, lead_parts


def plans(*names: str, nbytes: int = 100) -> list[TensorPlan]:
    return [TensorPlan(name, "uint8", (nbytes,)) for name in names]


def test_order_of_blocks() -> None:
    made = plan_blocks(
        plans(
            "lm_head.weight",
            "model.layers.10.mlp.weight",
            "model.layers.2.mlp.weight",
            "model.norm.weight",
            "model.embed_tokens.weight",
            "model.layers.2.self_attn.weight",
        )
    )
    assert [b.name for b in made] == ["embeddings", "layer2", "layer10", "head"]
    assert [t.name for t in made[1].tensors] == ["model.layers.2.mlp.weight", "model.layers.2.self_attn.weight"]


def test_other_architectures_names() -> None:
    assert stage_of("transformer.h.3.attn.weight") == (4, "layer3")
    assert stage_of("transformer.wte.weight")[1] == "embeddings"
    assert stage_of("decoder.block.0.layer.1.weight")[1] == "layer0"
    assert stage_of("rotary_emb.cos_sin_cache")[1] == "embeddings"
    assert stage_of("model.norm.weight")[1] == "head"
    assert stage_of("vision_tower.vision_model.encoder.layers.7.mlp.fc1.weight") == (0, "embeddings")
    assert stage_of("visual.blocks.7.attn.proj.weight") == (0, "embeddings")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30), st.integers(256, 4000))
def test_block_size_is_kept_unless_one_tensor_is_larger(sizes: list[int], limit: int) -> None:
    tensors = [TensorPlan(f"layers.{i % 3}.t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]
    made = plan_blocks(tensors, limit)
    assert sorted(t.name for b in made for t in b.tensors) == sorted(t.name for t in tensors)
    for block, entry in zip(made, layout_header(PackKey("m"), made).blocks, strict=True):
        assert entry.nbytes <= limit or len(block.tensors) == 1


def test_small_packs_have_small_leaves() -> None:
    small = layout_header(PackKey("m"), plan_blocks(plans("a", nbytes=8 << 20)))
    large = layout_header(PackKey("m"), plan_blocks(plans("a", nbytes=1 << 30)))
    assert small.leaves >= 32
    assert large.leaf_bytes == 1 << 20


def test_a_copy_is_filled_with_embedding_first_layer_and_head_first() -> None:
    """An engine that has them can begin: others run its layers."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(3)), "lm_head.weight"]
    plans = [TensorPlan(name, "float32", (2, 1024)) for name in names]
    header = layout_header(PackKey("a" * 32), plan_blocks(plans), leaf_bytes=4096)
    assert lead_first(header) == [0, 1, 2, 3, 8, 9, 4, 5, 6, 7]
    assert lead_parts(header) == [(0.0, 0.2), (0.2, 0.4), (0.8, 1.0)]
    assert end_parts(header) == [(0.0, 0.2), (0.8, 1.0)], "without the first layer, which has what layers share"
    assert lead_first(header, (1, 2)) == [0, 1, 2, 3, 8, 9, 6, 7, 4, 5], "it loads beside another one"


@settings(deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=3, max_size=12), st.integers(1, 64))
def test_the_first_pieces_of_a_multicast_have_every_leaf_that_an_engine_begins_with(
    sizes: list[int], pieces: int
) -> None:
    """Leaves are dealt to pieces as a whole: the end of a block may lie in the piece behind its own fraction."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.w" for i in range(len(sizes) - 2)), "lm_head.weight"]
    tensors = [TensorPlan(name, "float32", (size,)) for name, size in zip(names, sizes, strict=True)]
    header = layout_header(PackKey("a" * 32), plan_blocks(tensors), leaf_bytes=4096)
    first, ends = tuple(lead_parts(header)), tuple(end_parts(header))
    request = PlanRequest(("a", "b"), ("c", "d"), 1 << 20, first=first, ends=ends)
    at_once, late = first_blocks(first, pieces), end_blocks(request, pieces)
    for names, pieces_there in (
        (("embeddings", "layer0", "head"), at_once),
        (("layer0",), [piece for piece in at_once if piece not in late]),
    ):
        brought = {leaf for piece in pieces_there for leaf in cut_pieces(header.cut, pieces)[piece]}
        needed = (b for b in header.blocks if b.name in names)
        assert brought >= {leaf for b in needed for leaf in header.cut.holding(b.offset, b.offset + b.nbytes)}
