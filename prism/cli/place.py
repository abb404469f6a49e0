"""``prism place``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism.cli import client, output
from prism.cli.errors import CliError
from prism.cli.profile import profile_options, profiles_of
from prism.config.units import parse_size_bytes
from prism.core.ids import DeviceId, kind_and_index, local_name

if TYPE_CHECKING:
    from prism.policy.lending_map import Lending, MemoryNeed
    from prism.sim.lending_program import LendingPlan

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("catalog", type=_FILE)
@click.option("--servers", type=click.IntRange(1), required=True, help="Servers of the planned fleet.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="Devices of each.")
@click.option("--burst", type=click.Choice(["2", "3", "5"]), default="3", show_default=True, help="To borrow for.")
@click.option("--lend-from", default="10GB", show_default=True, help="A model with so much free is a lender.")
@click.option("--limit-s", type=float, default=5.0, show_default=True, help="For the program's solver.")
@click.option("--load", is_flag=True, help="Load the models so on the running server's machines, in order of name.")
@click.option("--url", envvar="PRISM_URL", help="Server for --load.  [default: the one of --state-dir]")
@click.option("--key", envvar="PRISM_ADMIN_KEY", help="Its admin key.  [default: admin.key in --state-dir]")
@profile_options
@output.json_option
def command(
    catalog: Path,
    servers: int,
    gpus: int,
    burst: str,
    lend_from: str,
    limit_s: float,
    load: bool,
    url: str | None,
    key: str | None,
    as_json: bool,
    **question: Any,
) -> None:
    """Plan which models of CATALOG share a server, so that those with memory to spare stand beside those that lack it.

    One model to a device (or to as many as it has ranks). What each lends or borrows is its profile's; profiles that
    the state directory lacks are made first (see `prism profile`). The plan is printed with its reasons; --load makes
    it the running fleet's first placement.
    """
    from prism.config.catalog import load_catalog
    from prism.policy.lending_map import Servers, match_lenders
    from prism.sim.gpus import gpu
    from prism.sim.lending_program import plan_lending
    from prism.sim.models import catalog_specs

    specs = catalog_specs(load_catalog(catalog))
    lend_from_bytes = parse_size_bytes(lend_from, "--lend-from")
    profiles = profiles_of(specs, **question)
    needs = [p.need(s.tp, int(burst), lend_from_bytes) for p, s in zip(profiles, specs, strict=True)]
    fleet = Servers(servers, gpus, gpu(question["gpu"]).memory_bytes)
    plan = plan_lending(needs, fleet, limit_s)
    beside = [[n for n, at in zip(needs, plan.at, strict=True) if at == server] for server in range(servers)]
    pairs = [match_lenders(found) for found in beside]
    if as_json:
        output.print_json(_as_json(plan, beside, pairs))
    else:
        rows = [row for server in range(servers) for row in _rows(server, beside[server], pairs[server])]
        output.print_table(COLUMNS, rows, "the catalog has no models")
        click.echo(_summary(needs, plan, pairs))
    if load:
        _load(beside, gpus, client.connect(url, key, question["state_dir"]))


COLUMNS = ("SERVER>", "MODEL", "GPUS>", "FREE>", "LACKS>", "WITH")


def _rows(server: int, beside: Sequence[MemoryNeed], pairs: Sequence[Lending]) -> list[list[str]]:
    rows = []
    for need in beside:
        mine = [p for p in pairs if need.model in (p.borrower, p.lender)]
        others = [f"{p.lender} ({output.size(p.nbytes)})" for p in mine if p.borrower == need.model]
        others += [f"{p.borrower} ({output.size(p.nbytes)})" for p in mine if p.lender == need.model]
        free = output.size(need.spare_bytes) if need.sign > 0 else "-"
        lacks = output.size(-need.spare_bytes) if need.sign < 0 else "-"
        alone = "host memory" if need.sign < 0 else "-"
        rows.append([str(server), str(need.model), str(need.shards), free, lacks, ", ".join(others) or alone])
    return rows


def _summary(needs: Sequence[MemoryNeed], plan: LendingPlan, pairs: Sequence[Sequence[Lending]]) -> str:
    borrowing = sum(n.shards for n in needs if n.sign < 0)
    matched = sum(len(found) for found in pairs)
    lacked = sum(-n.spare_bytes * n.shards for n in needs if n.sign < 0)
    covered = sum(p.nbytes for found in pairs for p in found)
    share = f", {output.share(covered / lacked)} of the bytes" if lacked else ""
    return (
        f"{matched} of {borrowing} borrowing devices have a lender in their server{share}; imbalance "
        f"{output.size(plan.imbalance_bytes)}, no plan is below {output.size(plan.bound_bytes)} ({plan.solver})"
    )


def _as_json(
    plan: LendingPlan, beside: Sequence[Sequence[MemoryNeed]], pairs: Sequence[Sequence[Lending]]
) -> dict[str, Any]:
    return {
        "solver": plan.solver,
        "imbalance_bytes": plan.imbalance_bytes,
        "bound_bytes": plan.bound_bytes,
        "servers": [
            {"models": [asdict(need) for need in needs], "lending": [asdict(pair) for pair in found]}
            for needs, found in zip(beside, pairs, strict=True)
        ],
    }


def _load(beside: Sequence[Sequence[MemoryNeed]], gpus: int, fleet: client.AdminClient) -> None:
    """Server n of the plan is the n-th machine by name. Raises :class:`CliError` when the fleet is smaller than the
    plan."""
    machines: dict[str, list[str]] = {}
    for device in fleet.get("devices")["devices"]:
        machines.setdefault(device["node"], []).append(device["id"])
    fits = [sorted(devices, key=_index)[:gpus] for _, devices in sorted(machines.items()) if len(devices) >= gpus]
    if len(fits) < len(beside):
        raise CliError(f"the plan has {len(beside)} servers of {gpus} devices, the running fleet {len(fits)}")
    for devices, needs in zip(fits, beside, strict=False):
        left = iter(devices)
        for need in needs:
            where = [next(left) for _ in range(need.shards)]
            fleet.post(client.model_path(str(need.model), "load"), devices=where)
            click.echo(f"{need.model} is on {', '.join(where)}")


def _index(device: str) -> int:
    return kind_and_index(local_name(DeviceId(device)))[1]
