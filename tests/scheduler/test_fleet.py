"""The fleet's books against a recount of what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId
from prism.scheduler.fleet import Fleet
from tests.scheduler.exchange import node_devices

FOR_S = 30.0
SPECS = node_devices("n", 4, 80 << 30)

happenings = st.lists(
    st.tuples(st.sampled_from(["keep", "lose", "join"]), st.integers(0, len(SPECS) - 1), st.floats(0.0, 20.0)),
    max_size=40,
)


@given(happenings)
def test_a_device_is_kept_free_for_so_long_after_the_last_time_unless_it_was_lost(
    happened: list[tuple[str, int, float]],
) -> None:
    fleet, now_s = Fleet(), 0.0
    fleet.add_devices(SPECS)
    kept_s: dict[DeviceId, float] = {}
    for what, index, later_s in happened:
        now_s += later_s
        id = SPECS[index].id
        if what == "keep" and id in fleet.devices:
            fleet.keep_free(id, now_s)
            kept_s[id] = now_s
        elif what == "lose":
            fleet.remove_devices([id])
            kept_s.pop(id, None)
        elif what == "join":
            fleet.add_devices([SPECS[index]])
            kept_s.pop(id, None)
        assert set(fleet.kept_free(FOR_S, now_s)) == {id for id, at_s in kept_s.items() if now_s - at_s < FOR_S}
