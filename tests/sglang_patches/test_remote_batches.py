"""Parts of a prefill are prefills, and together they are all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.remote_batches import BatchPart


@st.composite
def prefills(draw: st.DrawFn) -> BatchPart:
    """Requests with prefixes, of which no two slots or ids are alike."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5))
    tokens = sum(extend for _, extend in sizes)
    return BatchPart(
        rows=draw(st.permutations(range(len(sizes)))),
        seq_lens=[prefix + extend for prefix, extend in sizes],
        out_slots=list(range(100, 100 + tokens)),
        positions=[position for prefix, extend in sizes for position in range(prefix, prefix + extend)],
        token_ids=list(range(500, 500 + tokens)),
        prefix_lens=[prefix for prefix, _ in sizes],
        extend_lens=[extend for _, extend in sizes],
        mrope=[list(range(first, first + tokens)) for first in draw(st.sampled_from([(), (0, 10, 20)]))],
    )


def seen_by_token(part: BatchPart) -> list[tuple[int, int, int, int]]:
    """Row, position, slot and id of each token, where its own numbers say it is in its request."""
    found = []
    at = 0
    for row, length, prefix, extend in zip(part.rows, part.seq_lens, part.prefix_lens, part.extend_lens, strict=True):
        assert extend > 0 and prefix + extend == length
        for position in range(prefix, length):
            assert part.positions[at] == position
            found.append((row, position, part.out_slots[at], part.token_ids[at]))
            at += 1
    assert at == len(part.token_ids) == len(part.out_slots) == len(part.positions)
    return found


@given(prefills(), st.data())
def test_parts_are_whole_prefills_in_order(whole: BatchPart, data: st.DataObject) -> None:
    tokens = len(whole.token_ids)
    ends = sorted(data.draw(st.sets(st.integers(1, tokens - 1)))) if tokens > 1 else []
    counts = [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]
    parts = list(whole.cut(counts))
    assert [len(part.token_ids) for part in parts] == counts
    assert [token for part in parts for token in seen_by_token(part)] == seen_by_token(whole)
    assert not any(part.decodes for part in parts)
    for i, positions in enumerate(whole.mrope):
        assert [at for part in parts for at in part.mrope[i]] == positions
    assert all(len(part.mrope) == len(whole.mrope) for part in parts)
