"""``prism plan``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also list models that stay where they are.")
@click.option("--snapshot", is_flag=True, help="Print the state it would decide on, for `prism sim dry-run`.")
@output.json_option
@server_options
def command(client: AdminClient, everything: bool, snapshot: bool, as_json: bool) -> None:
    """Show what the cluster scheduler would do if it ran now, and why; and which weights are on their way to which
    machines. Changes nothing."""
    if snapshot:
        output.print_json(client.get("snapshot"))
        return
    plan = client.get("plan")
    if as_json:
        output.print_json(plan)
        return
    decisions = [d for d in plan["decisions"] if everything or d["action"] != "stay"]
    rows = [
        (
            decision["model"],
            decision["action"],
            ",".join(decision.get("current") or ()) or "-",
            ",".join(decision.get("target") or ()) or "-",
            output.reason(decision.get("reason")),
        )
        for decision in decisions
    ]
    output.print_table(
        ("MODEL", "ACTION", "FROM?1", "TO", "WHY~"), rows, "nothing to do: every model stays where it is"
    )
