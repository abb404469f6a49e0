"""``prism ps``"""

from __future__ import annotations

from typing import Any

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options

COLUMNS = (
    "MODEL",
    "DEVICE",
    "STATE",
    "WEIGHTS>",
    "KV>?3",
    "BORROWED>?1",
    "RUN>",
    "WAIT>",
    "TTFT MET>?4",
    "LAST USED>?2",
)


@click.command()
@output.json_option
@server_options
def command(client: AdminClient, as_json: bool) -> None:
    """List the models that are loaded, loading or waited for: where, how much memory, how much work, how well.

    Those that cannot be served are listed too, with the reason.
    """
    models = [model for model in client.get("models")["models"] if is_live(model)]
    if as_json:
        output.print_json(models)
        return
    output.print_table(COLUMNS, [row for model in models for row in model_rows(model)], "no model is loaded")
    for model in models:
        if model.get("failure"):
            click.echo(f"{model['name']}: {model['failure']}")
    echo_faults(client)


def echo_faults(client: AdminClient) -> None:
    """One line for each device that no engine starts on."""
    for device in client.get("devices")["devices"]:
        if device.get("fault"):
            click.echo(f"{device['id']} is out of service: {device['fault']}")


def weights(replica: dict[str, Any]) -> str:
    """Its size, or how much of it has come from other machines and how fast."""
    arriving = replica.get("arriving")
    if replica["state"] != "loading" or not arriving or arriving.get("took_s") is not None:
        return output.size(replica.get("weight_bytes"))
    return f"{output.size(arriving['bytes_done'])} of {output.size(arriving['bytes_all'])}"


def is_live(model: dict[str, Any]) -> bool:
    """Whether a model holds memory, has work, or cannot be loaded."""
    failed = model.get("state") == "failed"
    return bool(failed or model.get("replicas") or model.get("waiting") or model.get("running"))


def last_used(model: dict[str, Any]) -> str:
    """How long ago a request of it ended; ``now`` while one runs."""
    return "now" if model.get("running") else output.ago(model.get("last_used_s"))


def model_rows(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per replica; one with a dash as device for a model that only has requests waiting."""
    common = (output.share(model.get("ttft_attainment")), last_used(model))
    if not model.get("replicas"):
        waiting = str(model.get("waiting", 0))
        return [(model["name"], "-", model["state"], "-", "-", "-", "0", waiting, *common)]
    return [
        (
            model["name"],
            ",".join(replica["devices"]),
            replica["state"],
            weights(replica),
            output.size(replica.get("kv_bytes")),
            output.size(replica.get("borrowed_bytes")),
            str(replica.get("running", 0)),
            str(replica.get("waiting", 0)),
            *common,
        )
        for replica in model["replicas"]
    ]
