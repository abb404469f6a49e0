"""What single transfers tell of links, each way."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.links import SAME, estimate_links

F, S = 1e9, 1e8


def rates(out: dict[str, float], into: dict[str, float], *pairs: str) -> dict[tuple[str, str], float]:
    """What transfers between ``pairs`` ("ab": from a to b) reach over these links; all others have rate F."""
    return {(s, d): min(out.get(s, F), into.get(d, F)) for s, d in pairs}


def test_nothing_was_measured() -> None:
    known = estimate_links({})
    assert (known.links, known.typical) == ({}, None)


def test_one_slow_transfer_is_no_difference_between_nodes() -> None:
    known = estimate_links({("a", "b"): S})
    assert known.links == {"a": NodeLink(S, S), "b": NodeLink(S, S)} and known.typical == S


def test_a_slow_receiver_is_told_from_a_slow_sender() -> None:
    known = estimate_links(rates({}, {"c": S}, "ab", "ac", "bc"))
    assert known.links["c"] == NodeLink(F, S)
    assert known.links["a"] == known.links["b"] == NodeLink(F, F), "b has sent to c only, and is not blamed"
    known = estimate_links(rates({"c": S}, {}, "ab", "ca", "cb"))
    assert known.links["c"] == NodeLink(S, F)
    assert known.links["a"] == known.links["b"] == NodeLink(F, F)


def test_noise_is_one_speed() -> None:
    known = estimate_links({("a", "b"): 1.0e9, ("a", "c"): 0.8e9, ("b", "c"): 1.3e9, ("c", "a"): 0.9e9})
    assert len(set(known.links.values())) == 1


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from((S, F, 4 * F)), min_size=6, max_size=6),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from((S, F, 4 * F)), min_size=6, max_size=6),
)
def test_with_every_pair_measured_no_transfer_is_promised_less_than_it_reached(
    out: dict[str, float], into: dict[str, float]
) -> None:
    measured = {(s, d): min(out[s], into[d]) for s, d in itertools.permutations("abcdef", 2)}
    links = estimate_links(measured).links
    for (s, d), rate in measured.items():
        assert min(links[s].out_bytes_s, links[d].in_bytes_s) >= rate * SAME
