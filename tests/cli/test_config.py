"""``prism config``"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from prism.config.schema import shipped_schema
from tests.config.test_model_files import CONFIG, write_safetensors

Run = Callable[..., Result]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text("models:\n  - {name: a, path: nowhere}\n")
    return file


def test_check(catalog: Path, prism: Run) -> None:
    shown = prism("config", "check", str(catalog))
    assert shown.exit_code == 0
    assert "1 models" in shown.output and "--files" in shown.output
    assert json.loads(prism("config", "check", "--json", str(catalog)).output)["ok"]


def test_check_of_a_broken_catalog(catalog: Path, prism: Run) -> None:
    catalog.write_text("models:\n  - {name: a, path: b}\npolcy: 1\n")
    shown = prism("config", "check", str(catalog))
    assert shown.exit_code == 1
    assert f"{catalog}:3: polcy: is not a known key" in shown.output
    found = json.loads(prism("config", "check", "--json", str(catalog)).output)
    assert not found["ok"]
    assert found["problems"][0]["where"] == f"{catalog}:3"
    assert "policy" in found["problems"][0]["choices"]


def test_check_of_model_files(catalog: Path, prism: Run) -> None:
    shown = prism("config", "check", "--files", str(catalog))
    assert shown.exit_code == 1
    assert "does not exist" in shown.output


def test_check_of_files_reports_all_problems_although_a_variable_is_not_set(catalog: Path, prism: Run) -> None:
    catalog.write_text(
        "keys: [{name: k, key: '${env:PRISM_TEST_UNSET}'}]\ndevices: [{id: host:0, memory: 8MiB}]\n"
        "models:\n  - {name: a, path: nowhere}\n  - {name: b, path: nowhere, reasoning_parser: qwen33}\n"
    )
    shown = prism("config", "check", "--files", str(catalog))
    assert shown.exit_code == 1
    for text in ("PRISM_TEST_UNSET is not set", "qwen3", "does not exist"):
        assert text in shown.output
    found = json.loads(prism("config", "check", "--files", "--json", str(catalog)).output)
    assert len(found["problems"]) == 2 and len(found["files"]) == 2


def test_check_of_files_finds_a_model_larger_than_every_device(catalog: Path, prism: Run) -> None:
    folder = catalog.parent / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"a": ("F32", [5 << 20])})
    catalog.write_text(
        "devices: [{id: host:0, memory: 8MiB}, {id: host:1, memory: 4MiB}]\n"
        "models: [{name: a, path: m, engine_args: {dtype: float32}}]\n"
    )
    shown = prism("config", "check", "--files", str(catalog))
    assert shown.exit_code == 1
    assert "needs 20MiB" in shown.output and "the largest device has 8MiB" in shown.output


def test_check_of_files_says_what_nothing_here_runs_and_what_would(catalog: Path, prism: Run) -> None:
    classes = {"a": "LlamaForCausalLM", "b": "Llama4ForCausalLM", "c": "FalconForCausalLM", "d": "NobodysForCausalLM"}
    for name, architecture in classes.items():
        folder = catalog.parent / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture]}))
        (folder / "tokenizer.json").write_text("{}")
        write_safetensors(folder / "model.safetensors", {"a": ("F32", [4])})
    models = ", ".join(f"{{name: {name}, path: {name}}}" for name in classes)
    catalog.write_text(f"devices: [{{id: host:0, memory: 64MiB}}]\nmodels: [{models}]\n")
    found = json.loads(prism("config", "check", "--files", "--json", str(catalog)).output)
    errors = {row["model"]: row["error"] for row in found["files"]}
    assert errors["a"] == "" and "Llama-4 on GPUs only" in errors["b"]
    assert "Falcon on no device" in errors["c"] and "SGLang has no NobodysForCausalLM" in errors["d"]
    assert all("what would serve it: " in errors[name] for name in "bcd")


def test_schema(prism: Run) -> None:
    assert json.loads(prism("config", "schema").output) == shipped_schema()


def test_diff(catalog: Path, tmp_path: Path, prism: Run) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("models:\n  - {name: a, path: elsewhere}\n  - {name: b, path: b}\nserver: {port: 1}\n")
    assert "+b, ~a(path); needs a restart: server.port" in prism("config", "diff", str(catalog), str(new)).output
    found = json.loads(prism("config", "diff", "--json", str(catalog), str(new)).output)
    assert (found["added"], found["reactivate"], found["needs_restart"]) == (["b"], ["a"], ["server.port"])
    new.write_text("models: 3\n")
    broken = prism("config", "diff", str(catalog), str(new))
    assert broken.exit_code == 1
    assert "must be a list" in broken.output
