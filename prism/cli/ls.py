"""``prism ls``"""

from __future__ import annotations

from typing import Final

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options

STATES: Final = ("ready", "loading", "draining", "waiting", "failed", "inactive")
"""What the server calls the states of a model (:mod:`prism.server.views`)."""


@click.command()
@click.option("--state", type=click.Choice(STATES), help="Only models in this state.")
@output.json_option
@server_options
def command(client: AdminClient, state: str | None, as_json: bool) -> None:
    """List the catalog's models, cold ones too, and their states."""
    models = [model for model in client.get("models")["models"] if state in (None, model["state"])]
    if as_json:
        output.print_json(models)
        return
    rows = [
        (
            model["name"] + (" (pinned)" if model.get("pinned") else ""),
            model["state"],
            output.seconds(model["slo"]["ttft_s"]),
            output.seconds(model["slo"]["tpot_s"]),
            str(model.get("tp", 1)),
            output.size(model.get("weight_bytes")),
            ", ".join(model.get("aliases", ())),
            str(model.get("failure") or ""),
        )
        for model in models
    ]
    output.print_table(
        ("MODEL", "STATE", "TTFT>?5", "TPOT>?4", "TP>?1", "WEIGHTS>?3", "ALIASES?2", "~"), rows, "no models"
    )
