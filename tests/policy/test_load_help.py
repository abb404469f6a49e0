"""Shares of a load over several links, against the physical limit; and who helps whom."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from prism.policy.load_help import LoadWay, share_helpers, takes_next

MIB = 1 << 20
rates = st.floats(0.01, 100.0)


def load(chunks: int, own: float, helpers: list[float], slots: int) -> tuple[float, list[int]]:
    """Plays a load in chunks of one unit: when it ends, and what each way (the own link first) has brought. A way that
    takes nothing now asks again whenever something is in place anywhere."""
    speed = [own, *helpers]
    pending = [0] * len(speed)
    brought = [0] * len(speed)
    ready_s: list[list[float]] = [[] for _ in speed]
    now_s, left, end_s = 0.0, chunks, 0.0

    def way(i: int) -> LoadWay:
        return LoadWay(brought[i] / ready_s_last[i] if brought[i] else 0.0, pending[i])

    ready_s_last = [0.0] * len(speed)
    while left or any(pending):
        for i in range(len(speed)):
            while left and pending[i] < (2 if i == 0 else slots):
                others = [way(j) for j in range(len(speed)) if j != i]
                if i and not takes_next(1, left, way(i), others):
                    break
                start_s = max(now_s, ready_s[i][-1] if ready_s[i] else 0.0)
                ready_s[i].append(start_s + 1 / speed[i])
                pending[i] += 1
                left -= 1
        now_s, i = min((times[0], i) for i, times in enumerate(ready_s) if times)
        ready_s[i].pop(0)
        pending[i] -= 1
        brought[i] += 1
        ready_s_last[i] = end_s = now_s
    return end_s, brought


@given(st.integers(1, 300), rates, st.lists(rates, max_size=4), st.integers(1, 8))
@example(100, 1.0, [1.0, 1.0, 1.0], 4)
def test_everything_comes_and_about_as_soon_as_all_links_together_can(
    chunks: int, own: float, helpers: list[float], slots: int
) -> None:
    end_s, brought = load(chunks, own, helpers, slots)
    assert sum(brought) == chunks
    alone_s, limit_s = chunks / own, chunks / (own + sum(helpers))
    used = [speed for speed, count in zip([own, *helpers], brought, strict=True) if count]
    assert limit_s * 0.999 <= end_s
    # Each way may end later than the others by what it had taken: its first chunk was taken without knowing its rate.
    assert end_s <= alone_s + max(1 / speed for speed in used) + 2 / own
    if all(own / 4 <= speed <= 4 * own for speed in helpers):
        assert end_s <= limit_s + (slots + 3) * max(1 / speed for speed in used)


@given(
    st.integers(1, 100), st.integers(1, 1000), rates, st.integers(0, 50), st.lists(st.tuples(rates, st.integers(0, 50)))
)
def test_a_faster_way_takes_what_a_slower_one_takes(
    nbytes: int, left: int, rate: float, pending: int, others: list[tuple[float, int]]
) -> None:
    ways = [LoadWay(*other) for other in others]
    if takes_next(nbytes, left, LoadWay(rate, pending), ways):
        assert takes_next(nbytes, left, LoadWay(2 * rate, pending), ways)
        assert takes_next(nbytes, left + nbytes, LoadWay(rate, pending), ways)


def test_a_way_that_was_never_measured_takes_one_chunk_and_no_last_one() -> None:
    own = [LoadWay(10.0, 2)]
    assert takes_next(1, 2, LoadWay(0.0, 0), own)
    assert not takes_next(1, 1, LoadWay(0.0, 0), own)
    assert not takes_next(1, 9, LoadWay(0.0, 1), own)


names = st.sampled_from([f"gpu{i}" for i in range(8)])


@given(
    st.lists(names, unique=True, min_size=1),
    st.lists(names, unique=True),
    st.dictionaries(names, st.frozensets(names)),
    st.integers(0, 4),
)
def test_helpers_are_shared_fairly_and_none_twice(
    loading: list[str], idle: list[str], reached: dict[str, frozenset[str]], most: int
) -> None:
    shared = share_helpers(loading, idle, reached, most)
    given_ = [helper for helpers in shared.values() for helper in helpers]
    assert list(shared) == loading and len(given_) == len(set(given_)) and not set(given_) & set(loading)
    unused = set(idle) - set(given_) - set(loading)
    for target, helpers in shared.items():
        near = reached.get(target, frozenset())
        assert len(helpers) <= most and set(helpers) <= near & set(idle)
        assert len(helpers) == most or not unused & near, "a helper in reach was left over"
