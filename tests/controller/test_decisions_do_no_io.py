"""What a decision needs to know of files is known before it is made."""

from __future__ import annotations

import builtins
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from prism.config.catalog import load_catalog
from prism.controller.distribution import WeightDistribution
from prism.controller.models import KnownModels
from prism.controller.nodes import FleetNodes
from prism.core.effects import Activate
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.specs import DeviceKind
from prism.wire.messages import AgentReport
from prism.wire.reports import DeviceStatus, PackReport

M = ModelName("m")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


@contextmanager
def no_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever looks at a file fails the test."""

    def forbidden(path: Any, *rest: Any, **more: Any) -> NoReturn:
        raise AssertionError(f"{path} was looked at in the path of a decision")

    with monkeypatch.context() as patched:
        for module, name in (
            (builtins, "open"),
            (io, "open"),
            (os, "open"),
            (os, "stat"),
            (os, "listdir"),
            (os, "scandir"),
        ):
            patched.setattr(module, name, forbidden)
        yield


@pytest.fixture
def models(tmp_path: Path) -> KnownModels:
    """A catalog of one model whose configuration names its element type."""
    (folder := tmp_path / "m").mkdir()
    save_file({"model.embed_tokens.weight": np.ones((16, 8), dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "catalog.yaml").write_text(f"models:\n  - name: m\n    path: {folder}\n")
    return KnownModels(load_catalog(tmp_path / "catalog.yaml"))


def report(node: str, packs: list[PackReport]) -> AgentReport:
    device = DeviceStatus(id=f"{node}/host:0", kind="host", domain="", capacity_bytes=1000, free_bytes=600)
    mailbox, weights = f"tcp://{node}:1", f"{node}:2"
    return AgentReport(
        node=node, incarnation="one", mailbox=mailbox, devices=[device], instances=[], weights=weights, packs=packs
    )


async def test_where_weights_come_from_is_decided_without_a_look_at_a_file(
    models: KnownModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    await models.introduce(M)
    images = {M: models.images(M)}
    [key] = images[M].by_kind[DeviceKind.HOST]
    assert key.model == models.mark(M) != "" and "bfloat16" in key.layout, "the configuration was read"
    nodes = FleetNodes()
    nodes.report(report("a", [PackReport(model=key.model, layout=key.layout, nbytes=1 << 20, in_memory=True)]), 0.0)
    nodes.report(report("b", []), 0.0)
    distribution = WeightDistribution(nodes)
    parts = whole_model([DeviceId("b/host:0")])
    order = Activate(InstanceKey(M, Generation(1)), parts, because(ReasonCode.OPERATOR))
    with no_files(monkeypatch):
        supplies, sends = distribution.supply([order], images, 0.0)
    assert len(supplies[order.key][NodeId("b")].plans) == 1 and len(sends) == 1
