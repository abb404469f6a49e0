"""``prism ps``"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options
from prism.core.ids import DeviceId, local_name, node_of

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
    columns: tuple[str, ...] = COLUMNS
    rows = [row for model in models for row in model_rows(model)]
    if any(replica.get("remote") for model in models for replica in model.get("replicas", ())):
        columns = (*COLUMNS, "LAYERS")
        shown = [layers(replica) for model in models for replica in model.get("replicas") or [{}]]
        rows = [(*row, text) for row, text in zip(rows, shown, strict=True)]
    output.print_table(columns, rows, "no model is loaded")
    for model in models:
        for replica in model.get("replicas", ()):
            if words := long_prompts(replica):
                click.echo(f"{model['name']}: prompts larger than {','.join(replica['devices'])} have {words}")
        if model.get("failure"):
            click.echo(f"{model['name']}: {model['failure']}")
    echo_faults(client)


def echo_faults(client: AdminClient) -> None:
    """One line for each device that no engine starts on, and for each whose speed is declared."""
    devices = client.get("devices")["devices"]
    for device in devices:
        if device.get("pace"):
            click.echo(f"{device['id']} plays a device, its times are declared: {device['pace']}")
    for device in devices:
        if device.get("fault"):
            click.echo(f"{device['id']} is out of service: {device['fault']}")


def weights(replica: dict[str, Any]) -> str:
    """Its size, or how much of it has come from other machines and how fast."""
    arriving = replica.get("arriving")
    if replica["state"] != "loading" or not arriving or arriving.get("took_s") is not None:
        return output.size(replica.get("weight_bytes"))
    return f"{output.size(arriving['bytes_done'])} of {output.size(arriving['bytes_all'])}"


def layers(replica: dict[str, Any]) -> str:
    """``3/32 over host:0``: those that are there, and who runs the others; ``32/32 for host:1``: whose it runs, too.
    Those of other machines are named with these: ``3/32 over b/host:0``."""
    remote = replica.get("remote")
    if not remote:
        return "-"
    words = [f"{remote['held_layers']}/{remote['layers']}"]
    for word, devices in (("over", remote["peers"]), ("for", remote["leaders"])):
        words += [f"{word} {beside(replica['devices'][0], devices)}"] if devices else []
    return " ".join(words)


def beside(device: str, others: Iterable[str]) -> str:
    """``others`` as one reads them next to ``device``: those of its machine without the machine's name."""
    here, devices = node_of(DeviceId(device)), map(DeviceId, others)
    return ",".join(local_name(d) if node_of(d) == here else d for d in devices)


def long_prompts(replica: dict[str, Any]) -> str:
    """Where KV of prompts larger than the device is: ``32.0 MiB in host memory, 8.0 MiB lent``; nowhere: empty."""
    host, lent = replica.get("long_host_bytes") or 0, replica.get("long_lent_bytes") or 0
    words = [f"{output.size(host)} in host memory"] if host else []
    return ", ".join([*words, f"{output.size(lent)} lent"] if lent else words)


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
