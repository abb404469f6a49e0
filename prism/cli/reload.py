"""``prism reload``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options


@click.command()
@output.json_option
@server_options
def command(client: AdminClient, as_json: bool) -> None:
    """Apply what changed in the server's catalog file; says what needs a restart. A broken file changes nothing."""
    reply = client.post("reload")
    if as_json:
        output.print_json(reply)
        return
    before = reply.get("applied_before")
    if before:  # the server looks at the file itself and was first
        click.echo(f"the file was taken over {output.ago(before['at_s'])} already: {before['summary']}")
    else:
        click.echo(str(reply.get("summary") or "nothing to apply"))
