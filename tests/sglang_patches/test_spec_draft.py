"""Two models' K and V in one slot: neither touches the other's, and together they are all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prism import memory
from sglang_patches.kv_guard import UnsupportedModel
from sglang_patches.spec_draft import ModelRows, joint_layout, widen_table
from tests.engine.rig import codec

PAGE_BYTES = 1 << 16
OWN = ModelRows(layers=3, heads=2, k_dim=16, v_dim=16, dtype=torch.float32)
GUESSER = ModelRows(layers=1, heads=3, k_dim=24, v_dim=8, dtype=torch.float32)


def test_rows_of_two_models_share_slots(tmp_path: Path) -> None:
    device = memory.open_device("host:0", 64 * PAGE_BYTES, account_dir=tmp_path, page_bytes=PAGE_BYTES)
    owner = device.register("guesses")
    pool = owner.arena(64 * PAGE_BYTES).divide(joint_layout(OWN, GUESSER), max_tokens=300, lease_bytes=0)
    assert pool.slot_bytes == OWN.token_bytes + GUESSER.token_bytes == 3 * 2 * 32 * 4 + 3 * 32 * 4
    pool.ensure(40)
    slots = torch.from_numpy(pool.alloc(40))
    views = [OWN.views(pool, 0), GUESSER.views(pool, pool.slot_bytes - GUESSER.token_bytes)]
    tensors = [tensor for k, v in views for tensor in (*k, *v)]
    assert [len(k) for k, _ in views] == [3, 1] and [len(v) for _, v in views] == [3, 1]
    for number, tensor in enumerate(tensors, 1):
        tensor[slots] = float(number)
    for number, tensor in enumerate(tensors, 1):
        assert bool((tensor[slots] == number).all()), number
    written = sum(tensor[slots].numel() * 4 for tensor in tensors)
    assert written == 40 * pool.slot_bytes, "nothing of a slot is left over"
    pool.close()


def test_both_models_keep_one_type() -> None:
    other = ModelRows(layers=1, heads=2, k_dim=16, v_dim=16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="both in one type"):
        joint_layout(OWN, other)


@pytest.mark.engine
@pytest.mark.parametrize(("steps", "branches", "tokens"), [(None, None, 8), (5, 4, 8), (3, 1, 4)])
def test_the_table_has_a_place_for_guesses_behind_the_longest_sequence(
    steps: int | None, branches: int | None, tokens: int
) -> None:
    """SGLang's has four more than a step checks; a step takes slots for this one and the next."""
    codec()  # SGLang can be imported
    algorithm = "NGRAM" if steps is None else "EAGLE"
    arguments = SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_num_steps=steps,
        speculative_eagle_topk=branches,
        max_speculative_num_draft_tokens=tokens,
        page_size=1,
    )
    taken = 2 * max(tokens, (steps or 1) * (branches or 1))
    assert widen_table(lambda _: 4 + tokens, arguments) >= taken
    plain = SimpleNamespace(**{**vars(arguments), "speculative_algorithm": None})
    assert widen_table(lambda _: 4, plain) == 4
