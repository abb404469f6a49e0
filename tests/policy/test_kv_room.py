"""Who in use gives way to a neighbour's KV: against looking at every pair, and never for little."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import Generation, ModelName
from prism.core.instances import InstanceKey
from prism.policy.kv_room import KvTenant, outweighed


def tenant(
    name: str, running: int = 1, waiting: int = 0, kv: int = 10, frees: int = 100, may_leave: bool = True
) -> KvTenant:
    return KvTenant(InstanceKey(ModelName(name), Generation(1)), running, waiting, kv, frees, may_leave)


tenants = st.builds(
    tenant,
    st.just(""),
    st.integers(0, 50),
    st.integers(0, 500),
    st.integers(0, 300),
    st.integers(0, 400),
    st.booleans(),
)


def test_few_requests_give_way_to_many_that_could_run_in_their_place() -> None:
    hungry, small = tenant("a", 80, 300, kv=80, may_leave=False), tenant("b", 2, 3, frees=400)
    found = outweighed([hungry, small])
    assert found is not None
    assert (found.key, found.to, found.more) == (small.key, hungry.key, 300.0)
    assert outweighed([hungry, replace(small, may_leave=False)]) is None
    assert outweighed([hungry, replace(small, running=80)]) is None, "more than a quarter of them lose their place"
    assert outweighed([hungry, replace(small, frees_bytes=20)]) is None, "its memory is no room for so many"
    assert outweighed([replace(hungry, waiting=0), replace(small, waiting=0)]) is None, "nobody waits"
    assert outweighed([replace(hungry, waiting=19), small]) is None, "too few wait"


def test_of_two_the_one_with_fewer_requests_for_its_memory_leaves() -> None:
    hungry, light, heavy = tenant("a", 80, 300, kv=80), tenant("b", 1, frees=300), tenant("c", 9, frees=300)
    assert (found := outweighed([hungry, heavy, light])) is not None
    assert found.key == light.key


@given(st.lists(tenants, max_size=6))
def test_it_never_costs_more_than_a_quarter_of_what_it_gains(drawn: list[KvTenant]) -> None:
    here = [replace(t, key=InstanceKey(ModelName(f"m{i}"), Generation(1))) for i, t in enumerate(drawn)]
    by_key = {t.key: t for t in here}
    found = outweighed(here)
    if found is not None:
        goes, to = by_key[found.key], by_key[found.to]
        assert goes is not to
        assert goes.may_leave
        assert 4 * max(1, goes.running + goes.waiting) < found.more <= to.waiting
        assert to.waiting == max(t.waiting for t in here if t.running and t.kv_bytes)
    elif (fed := [t for t in here if t.running and t.kv_bytes]) and (most := max(fed, key=lambda t: t.waiting)).waiting:
        for t in here:
            more = min(most.waiting, t.frees_bytes * most.running / most.kv_bytes)
            assert t is most or not t.may_leave or more <= 4 * max(1, t.running + t.waiting)
