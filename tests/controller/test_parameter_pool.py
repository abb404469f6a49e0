"""What the controller orders for the parameter pool: from where, how much at a time, how often, and for whom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry
from safetensors.numpy import save_file

from prism.config.catalog import load_catalog
from prism.controller.catalog_marks import CatalogMarks
from prism.controller.models import KnownModels
from prism.controller.nodes import FleetNodes
from prism.controller.parameter_pool import AGAIN_S, FETCHES, REPEAT_S, FleetPool
from prism.obs import names
from prism.obs.metrics import Metrics, render
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.packs.format import RAW_LAYOUT
from prism.wire.commands import KeepCopies
from prism.wire.messages import AgentReport, decode, encode
from prism.wire.reports import DeviceStatus, PackReport

IMAGE = "sglang/tp1"
HOST_BYTES = 1000


def held(mark: str, *, memory: bool = False, layout: str = IMAGE, nbytes: int = 10) -> PackReport:
    return PackReport(model=mark, layout=layout, nbytes=nbytes, in_memory=memory)


def report(node: str, *packs: PackReport, incarnation: str = "one", weights: bool = True) -> AgentReport:
    device = DeviceStatus(id=f"{node}/host:0", kind="host", domain="", capacity_bytes=1000, free_bytes=600)
    return AgentReport(
        node=node,
        incarnation=incarnation,
        mailbox=f"tcp://{node}:1",
        devices=[device],
        instances=[],
        weights=f"{node}:2" if weights else "",
        packs=list(packs),
        host_bytes=HOST_BYTES,
    )


def pool_of(*reports: AgentReport) -> tuple[FleetNodes, FleetPool]:
    nodes = FleetNodes()
    for one in reports:
        nodes.report(one, 0.0)
    return nodes, FleetPool(nodes, Metrics(CollectorRegistry()))


def orders(pool: FleetPool, *marks: str, at_s: float = 0.0) -> dict[str, KeepCopies]:
    told = pool.look({mark: f"model {mark}" for mark in marks}, at_s)
    assert all(decode(encode(order)) == order for _, order in told)
    return {mailbox.removeprefix("tcp://").removesuffix(":1"): order for mailbox, order in told}


def test_what_is_on_a_disk_only_is_read_by_a_machine_that_has_it_or_sent() -> None:
    nodes, pool = pool_of(report("a", held("m")), report("b"))
    [order] = orders(pool, "m")["a"].fetch
    assert (order.mark, order.layout, order.nbytes, order.model) == ("m", IMAGE, 10, "model m")
    assert (order.source, order.address) == ("", ""), "from its own disk"
    nodes.report(report("a", held("m"), held("n")), 1.0)
    [order] = orders(pool, "m", "n", at_s=1.0)["b"].fetch
    assert (order.mark, order.source, order.address) == ("n", "a", "a:2")


def test_a_copy_in_memory_stays_where_it_is_and_is_kept() -> None:
    _, pool = pool_of(report("a"), report("b", held("m", memory=True)))
    told = orders(pool, "m")
    assert told["b"].keep == [("m", IMAGE)] and not told["b"].fetch and not told["a"].fetch
    assert orders(pool, "m", at_s=REPEAT_S - 1) == {}, "nothing is new"
    assert orders(pool, "m", at_s=REPEAT_S).keys() == {"a", "b"}, "a message may have been lost"


def test_an_image_stands_for_the_files_and_a_stranger_for_nothing() -> None:
    raw = held("m", memory=True, layout=RAW_LAYOUT)
    _, pool = pool_of(report("a", raw, held("m", memory=True)), report("b", held("other", memory=True)))
    told = orders(pool, "m")
    assert told["a"].keep == [("m", IMAGE)] and told["b"].keep == []
    _, pool = pool_of(report("a", raw), report("b"))
    assert orders(pool, "m")["a"].keep == [("m", RAW_LAYOUT)]


def test_a_few_at_a_time_and_again_after_a_while() -> None:
    _, pool = pool_of(report("a", *(held(f"m{i}") for i in range(9))), report("b"))
    marks = [f"m{i}" for i in range(9)]
    first = orders(pool, *marks)
    assert [len(order.fetch) for order in first.values()] == [FETCHES, FETCHES]
    assert orders(pool, *marks, at_s=AGAIN_S / 2) == {}
    again = orders(pool, *marks, at_s=AGAIN_S)
    assert not {o.mark for o in first["a"].fetch} & {o.mark for o in again["a"].fetch}, "others get their turn"


def test_a_death_is_repaired_from_who_has_it_and_the_dead_keeps_nothing() -> None:
    nodes, pool = pool_of(
        report("a", held("m", memory=True)), report("b", held("n", memory=True), held("m")), report("c")
    )
    orders(pool, "m", "n")
    nodes.report(report("a", incarnation="two"), 1.0)  # its memory is gone
    told = orders(pool, "m", "n", at_s=1.0)
    [order] = [o for t in told.values() for o in t.fetch]
    assert order.mark == "m" and told["a"].keep == []
    home = next(node for node, t in told.items() if t.fetch)
    assert order.source == ("" if home == "b" else "b")


def test_one_machine_alone_and_machines_without_a_server_take_no_part() -> None:
    _, pool = pool_of(report("a", held("m")), report("b", weights=False))
    assert orders(pool, "m") == {}
    assert [m["node"] for m in pool.view()["machines"]] == ["a"]


def test_what_operators_see() -> None:
    _, pool = pool_of(report("a", held("m", memory=True)), report("b", held("m", memory=True), held("n", nbytes=5000)))
    orders(pool, "m", "n")
    shown = pool.view()
    assert [(e["model"], e["home"], e["copies"]) for e in shown["entries"]] == [
        ("model m", "a", ["a", "b"]),
        ("model n", None, []),
    ]
    assert shown["machines"] == [
        {"node": "a", "pool_bytes": 10, "host_bytes": 10},
        {"node": "b", "pool_bytes": 0, "host_bytes": 10},
    ]
    text = render(pool._metrics).decode()
    for state, count in (("home", 1), ("coming", 0), ("no_room", 1)):
        assert f'{names.POOL_PACKS.name}{{state="{state}"}} {count}.0' in text


def test_models_that_nobody_asked_for_have_names_too(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "a test"}')
    save_file({"w": np.ones((4, 4), dtype=np.float32)}, tmp_path / "one" / "model.safetensors")
    listed = "".join(f"  - {{name: {n}, path: {p}}}\n" for n, p in PATHS.items())
    (tmp_path / "catalog.yaml").write_text(f"models:\n{listed}")
    marks = CatalogMarks(KnownModels(load_catalog(tmp_path / "catalog.yaml")))
    mark = fingerprint(tmp_path / "one")
    asyncio.run(marks.look({mark}))
    assert marks.names() == {mark: "one"}
    assert marks.names() is marks.names()


PATHS = {"one": "one", "two": "two", "gone": "./gone", "far": "org/far"}
