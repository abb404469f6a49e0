"""``prism requests``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options


@click.command()
@click.option("--model", help="Only this model's.")
@output.json_option
@server_options
def command(client: AdminClient, model: str | None, as_json: bool) -> None:
    """List the requests that have not ended: state, where, how old they are, tokens so far."""
    requests = [r for r in client.get("requests")["requests"] if model in (None, r["model"])]
    if as_json:
        output.print_json(requests)
        return
    rows = [
        (
            request["id"],
            request["model"],
            request["state"],
            request.get("device") or "-",
            output.seconds(request.get("waited_s")),
            str(request.get("tokens", 0)),
        )
        for request in requests
    ]
    output.print_table(("REQUEST", "MODEL", "STATE", "DEVICE?1", "AGE>", "TOKENS>?2"), rows, "no request is open")
