"""What operators see: the catalog joined with what the controller, the agents and the front doors published."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prism.config.sections.model import ModelConfig
from prism.core.ids import ModelName, kind_and_index, local_name, node_of
from prism.core.views import InstanceState
from prism.server.front import Front
from prism.server.placements import MOST_USEFUL
from prism.server.usage import ModelUse, merged
from prism.store.values import Replica


async def models_view(front: Front, only: str | None = None) -> list[dict[str, Any]]:
    """Every model of the catalog (or ``only`` one), loaded or not. Where a model is comes from the placement, which is
    written at every change; the documents add numbers and may be a second old."""
    cluster = await document(front, "cluster")
    placed = await front.store.placement()
    use = (await merged(front.store, front.catalog.server.front_workers)).models
    seen = {model["name"]: model for model in cluster.get("models", ())}
    measured = _measured(cluster.get("instances", ()))
    arriving = {(a["model"], a["node"]): a for a in cluster.get("arriving", ())}
    remote = {(i["model"], i["generation"]): i.get("remote") for i in cluster.get("instances", ())}
    waiting = cluster.get("inactive", {})
    return [
        _model(
            model,
            _replicas(
                model.name, placed.get(ModelName(model.name), []), seen.get(model.name, {}), measured, arriving, remote
            ),
            _known(cluster, model.name, seen.get(model.name, {})),
            waiting.get(model.name, 0),
            use.get(model.name, ModelUse()),
            front.models.context_tokens(ModelName(model.name)),
        )
        for model in front.catalog.models
        if only in (None, model.name)
    ]


async def entry_view(front: Front, name: str) -> dict[str, Any]:
    """One model, or one adapter: what its base has, and where the adapter itself is in device memory."""
    base = front.catalog.served_by(name)
    await front.models.learn([front.catalog.model(base)])
    [found] = await models_view(front, base)
    adapter = front.catalog.adapters_by_name.get(name)
    if adapter is None:
        return {**found, "adapters": [each.name for each in front.catalog.adapters_of(front.catalog.model(base))]}
    cluster = await document(front, "cluster")
    use = (await merged(front.store, front.catalog.server.front_workers)).models.get(adapter.name, ModelUse())
    reports = [r for r in cluster.get("instances", ()) if r["model"] == base and adapter.name in r["adapters"]]
    return {
        **found,
        "name": adapter.name,
        "aliases": list(adapter.aliases),
        "base": base,
        "path": adapter.adapter,
        "resident": sorted({device for report in reports for device in report["devices"]}),
        "slo": {"ttft_s": float(adapter.slo.ttft_s), "tpot_s": float(adapter.slo.tpot_s)},
        "ttft_attainment": _share(use.ttft_met, use.ttft_missed),
        "tpot_attainment": _share(use.tpot_met, use.tpot_missed),
        "last_used_s": use.last_used_s or None,
        "failure": cluster.get("broken", {}).get(adapter.name, "") or found["failure"],
    }


def _known(cluster: dict[str, Any], name: str, seen: dict[str, Any]) -> dict[str, Any]:
    """What the controller says of a model: its scheduler's view, where its weights are, what is wrong with it."""
    failure = seen.get("failure") or cluster.get("broken", {}).get(name, "")
    death = cluster.get("deaths", {}).get(name)
    return {**seen, "failure": failure, "held": cluster.get("held", {}).get(name, {}), "last_death": death}


def _model(
    model: ModelConfig,
    replicas: list[dict[str, Any]],
    seen: dict[str, Any],
    inactive: int,
    use: ModelUse,
    context_tokens: int | None,
) -> dict[str, Any]:
    states = [replica["state"] for replica in replicas]
    state = next((s.value for s in MOST_USEFUL if s in states), "inactive")
    if state == "inactive" and (inactive or seen.get("failure")):
        state = "failed" if seen.get("failure") else InstanceState.WAITING.value
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "path": model.path,
        "state": state,
        "pinned": bool(seen.get("pinned", model.pinned)),
        "tp": model.tp,
        "slo": {"ttft_s": float(model.slo.ttft_s), "tpot_s": float(model.slo.tpot_s)},
        "context_tokens": context_tokens,
        "weight_bytes": seen.get("weight_bytes"),
        "kv_bytes": sum(replica["kv_bytes"] for replica in replicas),
        "running": sum(replica["running"] for replica in replicas),
        "waiting": inactive + sum(replica["waiting"] for replica in replicas),
        "ttft_attainment": _share(use.ttft_met, use.ttft_missed),
        "tpot_attainment": _share(use.tpot_met, use.tpot_missed),
        "last_used_s": time.time() if any(replica["running"] for replica in replicas) else use.last_used_s or None,
        "rate_per_s": seen.get("rate_per_s", 0.0),
        "failure": seen.get("failure", ""),
        "last_death": seen["last_death"],
        "held": seen["held"],
        "replicas": replicas,
    }


def _replicas(
    model: str,
    placed: list[Replica],
    seen: dict[str, Any],
    measured: dict[tuple[str, int], Counter[str]],
    arriving: dict[tuple[str, str], dict[str, Any]],
    remote: dict[tuple[str, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    known = {instance["generation"]: instance for instance in seen.get("instances", ())}
    unordered = [i for i in known.values() if i["state"] == InstanceState.WAITING]
    rows = [(r.generation, r.devices, r.state.value, r.since_s, r.reason) for r in placed]
    there = {r.generation for r in placed}
    rows += [
        (i["generation"], i["devices"], i["state"], i["since_s"], "") for i in unordered if i["generation"] not in there
    ]
    return [
        {
            "devices": list(devices),
            "state": state,
            "generation": generation,
            "since_s": since_s,
            **_load(len(devices), known.get(generation, {}), measured.get((model, generation), Counter())),
            "arriving": arriving.get((model, node_of(devices[0]))),
            "remote": remote.get((model, generation)),
            "reason": reason,
        }
        for generation, devices, state, since_s, reason in rows
    ]


def _measured(reports: Iterable[dict[str, Any]]) -> dict[tuple[str, int], Counter[str]]:
    """What the agents said of each instance, over all its devices and machines."""
    measured: dict[tuple[str, int], Counter[str]] = {}
    for report in reports:
        counts = measured.setdefault((report["model"], report["generation"]), Counter())
        for key in ("running", "waiting", "served", "borrowed_bytes", "long_host_bytes", "long_lent_bytes"):
            counts[key] += report.get(key, 0)
        for key in ("weight_bytes", "kv_bytes"):
            counts[key] += report.get(key, 0) * len(report["devices"])
    return measured


def _load(ranks: int, known: dict[str, Any], measured: Counter[str]) -> dict[str, int]:
    """What a replica holds and does: as its agents measured it, else as the scheduler counts it."""
    counted = {"served": 0, **{key: known.get(key, 0) for key in ("running", "waiting")}}
    counted["kv_bytes"] = known.get("kv_bytes", 0) * ranks
    return {"weight_bytes": measured["weight_bytes"], **counted, **measured}


def _share(met: int, missed: int) -> float | None:
    return met / (met + missed) if met + missed else None


async def devices_view(front: Front) -> list[dict[str, Any]]:
    """Every device that is up, with what its models hold."""
    cluster = await document(front, "cluster")
    return [_device(device, cluster) for device in cluster.get("devices", ())]


def _device(device: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    here = [i for i in cluster.get("instances", ()) if device["id"] in i["devices"]]
    states = [i["state"] for i in here]
    shared = device["capacity_bytes"] - device["weight_bytes"]
    kv_bytes = sum(i.get("kv_bytes", 0) for i in here)
    weight_bytes = sum(i.get("weight_bytes", 0) for i in here)
    used_bytes = device["capacity_bytes"] - device["free_bytes"]
    return {
        "id": device["id"],
        "node": device["node"],
        "kind": kind_and_index(local_name(device["id"]))[0],
        "capacity_bytes": device["capacity_bytes"],
        "free_bytes": device["free_bytes"],
        # What a model that is being loaded will need is not there yet while it waits for its neighbours' memory.
        "weight_bytes": min(weight_bytes, max(0, used_bytes - kv_bytes)),
        "kv_bytes": kv_bytes,
        "draining": device["draining"],
        "fault": cluster.get("faults", {}).get(device["id"], ""),
        "pace": cluster.get("paces", {}).get(device["id"], ""),
        "engines": {
            "active": states.count(InstanceState.READY),
            "starting": states.count(InstanceState.LOADING),
        },
        "kvpr": device["weighted_rate"] / shared if shared > 0 else None,
    }


def config_view(front: Front, name: str) -> dict[str, Any]:
    """The model's section of the catalog, defaults filled in."""
    return front.catalog.describe(name)


async def document(front: Front, name: str) -> dict[str, Any]:
    """A published document; empty when nobody published it yet."""
    text = await front.store.doc(name)
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}
