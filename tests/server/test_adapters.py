"""Requests name adapters as they name models, and go to the queue of their base."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism.config.catalog import load_catalog
from prism.engine.api import Work
from prism.engine.fake import FakeSpeed
from prism.wire.adapters import AdapterRef
from prism.wire.commands import AdminCommand
from tests.config.test_adapters import write_adapter
from tests.config.test_model_files import write_safetensors
from tests.server.conftest import LETTERS
from tests.server.live import ADMIN_KEY, LiveFront
from tests.server.tiny import make_model

AUTH = {"authorization": f"Bearer {ADMIN_KEY}"}
DIMS = {"q_proj": (32, 32), "v_proj": (32, 16)}
"""Of the tiny model."""
CATALOG = """
devices: [{id: "host:0", memory: 1GiB}]
models:
  - {name: base, path: tiny, lora: {max_rank: 4}}
  - {name: style, base: base, adapter: style, aliases: [chic], slo: {ttft: 7s}}
  - {name: steep, base: base, adapter: steep}
  - {name: lost, base: base, adapter: nowhere}
  - {name: vectors, path: tiny, kind: embed}
  - {name: vectors-style, base: vectors, adapter: style}
"""


SPEEDS = {"base": FakeSpeed(vocab=LETTERS), "vectors": FakeSpeed()}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveFront]:
    """A front door of its own, with a base and adapters."""
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    tiny = make_model(folder / "tiny")
    write_safetensors(tiny / "model.safetensors", {"a": ("F32", [4, 4])})
    write_adapter(folder / "style", layers=(0, 1), dims=DIMS)
    write_adapter(folder / "steep", rank=8, layers=(0, 1), dims=DIMS)
    (folder / "c.yaml").write_text(CATALOG)
    with LiveFront(load_catalog(folder / "c.yaml"), folder, SPEEDS) as front:
        yield front
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def works(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What the base's engine was handed."""
    seen: list[Work] = []
    handle = live.node.handles["base"]
    submit = handle.submit
    monkeypatch.setattr(handle, "submit", lambda work: (seen.append(work), submit(work))[1])
    return seen


def ask(live: LiveFront, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "hello", "max_tokens": 3}
    answer = live.http.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


def test_the_adapter_travels_with_the_request(live: LiveFront, works: list[Work]) -> None:
    from prism.engine.sglang_codec import decode_request

    for model in ("base", "style", "chic"):
        status, answer = ask(live, model)
        assert status == 200 and answer["model"] == model
    carried = [decode_request(work.payload).lora_id for work in works]
    assert carried[0] is None and carried[1] == carried[2]
    ref = AdapterRef.of(carried[1])
    assert (ref.name, ref.folder) == ("style", str(live.folder / "style"))


def test_adapters_of_models_that_embed(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    from prism.engine.sglang_codec import decode_request

    seen: list[Work] = []
    handle = live.node.handles["vectors"]
    submit = handle.submit
    monkeypatch.setattr(handle, "submit", lambda work: (seen.append(work), submit(work))[1])
    for model in ("vectors", "vectors-style"):
        made = live.client().embeddings.create(model=model, input=["one", "two"])
        assert made.model == model and len(made.data) == 2
    carried = [decode_request(work.payload).lora_id for work in seen]
    assert carried[:2] == [None, None] and carried[2] == carried[3]
    assert AdapterRef.of(carried[2]).name == "vectors-style"
    status, answer = ask(live, "vectors-style")
    assert (status, answer["error"]["code"]) == (400, "unsupported_model_kind")


def test_objectives_and_metrics_are_the_adapters_own(live: LiveFront) -> None:
    assert ask(live, "style")[0] == 200
    metrics = live.http.get("/metrics").text
    assert 'prism_requests_total{device="host:0",model="style",outcome="ok"}' in metrics.replace("local/", "")


@pytest.mark.parametrize(("model", "said"), [("steep", "rank 8"), ("lost", "does not exist")])
def test_an_adapter_that_cannot_be_served(live: LiveFront, model: str, said: str) -> None:
    status, answer = ask(live, model)
    assert (status, answer["error"]["code"]) == (503, "model_unavailable")
    assert said in answer["error"]["message"]
    assert ask(live, "base")[0] == 200


def test_an_unknown_adapter_is_an_unknown_model(live: LiveFront) -> None:
    status, answer = ask(live, "stile")
    assert status == 404 and "'style'" in answer["error"]["message"]


def test_models_list(live: LiveFront) -> None:
    rows = {row["id"]: row for row in live.http.get("/v1/models").json()["data"]}
    assert list(rows) == ["base", "vectors", "style", "steep", "lost", "vectors-style"]
    assert (rows["vectors-style"]["parent"], rows["vectors-style"]["kind"]) == ("vectors", "embed")
    assert (rows["style"]["parent"], rows["style"]["root"], rows["base"]["parent"]) == ("base", "base", None)
    assert rows["style"]["state"] == "ready" and rows["style"]["context_length"] == rows["base"]["context_length"]
    assert live.http.get("/v1/models/chic").json()["id"] == "style"


def test_operators(live: LiveFront, commands: list[AdminCommand]) -> None:
    found = live.http.get("/admin/models/chic", headers=AUTH).json()
    assert (found["name"], found["base"], found["slo"]["ttft_s"]) == ("style", "base", 7.0)
    assert found["config"]["adapter"] == "style" and found["resident"] == []
    assert live.http.get("/admin/models/base", headers=AUTH).json()["adapters"] == ["style", "steep", "lost"]
    live.http.post("/admin/models/style/unload", json={}, headers=AUTH)
    live.http.post("/admin/models/style/load", json={}, headers=AUTH)
    assert [(c.verb, c.model, c.adapter) for c in commands] == [("unload", "base", "style"), ("load", "base", "")]
    refused = live.http.post("/admin/models/style/pin", headers=AUTH)
    assert refused.status_code == 400 and "'base'" in refused.json()["error"]["message"]


def test_where_an_adapter_is(live: LiveFront) -> None:
    instance = {"model": "base", "generation": 1, "devices": ["local/host:0"], "state": "ready", "adapters": ["style"]}
    live.run(live.store.put_doc("cluster", json.dumps({"instances": [instance]})))
    assert live.http.get("/admin/models/style", headers=AUTH).json()["resident"] == ["local/host:0"]
    assert live.http.get("/admin/models/steep", headers=AUTH).json()["resident"] == []
    live.run(live.store.put_doc("cluster", "{}"))
