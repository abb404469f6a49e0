"""``prism show``"""

from __future__ import annotations

from typing import Any

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path, server_options
from prism.cli.ps import COLUMNS, echo_faults, last_used, model_rows

LAST_DECISIONS = 10


@click.command()
@click.argument("model")
@output.json_option
@server_options
def command(client: AdminClient, model: str, as_json: bool) -> None:
    """Show everything about MODEL: objectives, replicas, and the last decisions about it with their reasons."""
    found = client.get(model_path(model))
    if as_json:
        output.print_json(found)
        return
    parts = [output.table(("", "~"), facts(found))]
    if found.get("replicas"):
        parts.append(output.table(COLUMNS, model_rows(found), title="\nReplicas"))
    if found.get("decisions"):
        rows = [decision_row(decision) for decision in found["decisions"][:LAST_DECISIONS]]
        parts.append(output.table(("WHEN", "WHAT", "DEVICES", "WHY~"), rows, title="\nDecisions"))
    output.show(*parts)
    echo_faults(client)


def facts(model: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of a model, as (name, value)."""
    listed = [
        ("model", model["name"]),
        ("aliases", ", ".join(model.get("aliases", ())) or "-"),
        ("path", str(model.get("path", "-"))),
        ("state", model["state"] + (" (pinned)" if model.get("pinned") else "")),
        ("TTFT objective", objective(model, "ttft")),
        ("TPOT objective", objective(model, "tpot")),
        ("context", f"{model.get('context_tokens') or '-'} tokens"),
        ("weights", output.size(model.get("weight_bytes"))),
        ("tensor parallel", str(model.get("tp", 1))),
        ("rate", f"{model.get('rate_per_s') or 0:.3g}/s"),
        ("last used", last_used(model)),
    ]
    if where := held(model):
        listed.insert(8, ("weights at", where))
    if "base" in model:
        listed[2:2] = [("adapter of", model["base"]), ("in device memory", ", ".join(model["resident"]) or "nowhere")]
    if model.get("adapters"):
        listed.append(("adapters", ", ".join(model["adapters"])))
    if model.get("failure"):
        listed.append(("failure", str(model["failure"])))
    if death := model.get("last_death"):
        listed.append(("last death", f"{output.ago(death['at_s'])} on {death['node']}: {death['reason']}"))
    return listed


def held(model: dict[str, Any]) -> str:
    """``b (disk), local (memory)``: machines of a fleet that have the weights."""
    return ", ".join(f"{node} ({tier})" for node, tier in sorted((model.get("held") or {}).items()))


def objective(model: dict[str, Any], name: str) -> str:
    """``2.0s, met 99.1%``"""
    return f"{output.seconds(model['slo'][name + '_s'])}, met {output.share(model.get(name + '_attainment'))}"


def decision_row(decision: dict[str, Any]) -> tuple[str, str, str, str]:
    """One line of the decision log as (when, what, devices, why)."""
    devices = decision.get("devices") or ()
    return (
        output.ago(decision.get("at_s")),
        str(decision.get("do", "")),
        ",".join(map(str, devices)),
        output.reason(decision.get("reason")),
    )
