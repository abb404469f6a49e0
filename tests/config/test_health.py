"""What could not be served is found from a model's files, before a request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.config.catalog import examine_catalog, load_catalog
from prism.config.engine_args import registries
from prism.config.errors import CatalogError
from prism.config.health import Hub, examine_model, too_large
from prism.config.templates import syntax_error
from tests.config.test_model_files import CONFIG, TENSORS, write_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that can be served."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", TENSORS)
    return folder


def problems(folder: Path, more: str = "") -> str:
    file = folder.parent / "c.yaml"
    file.write_text(f"models: [{{name: a, path: {folder.name}{more}}}]")
    return "; ".join(examine_model(load_catalog(file), "a").problems)


def test_a_good_model_has_no_problems(folder: Path) -> None:
    assert problems(folder) == ""
    assert problems(folder, ", chat_template: chatml") == ""


def test_a_missing_folder(folder: Path) -> None:
    assert "does not exist" in problems(folder.parent / "gone")


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in problems(folder)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "mine.jinja"])
def test_a_template_with_an_error_names_file_and_line(folder: Path, place: str) -> None:
    text = "{% for m in messages %}\n{{ m.content }"
    more = f", chat_template: m/{place}" if place == "mine.jinja" else ""
    (folder / place).write_text(text if place.endswith(".jinja") else json.dumps({"chat_template": text}))
    found = problems(folder, more)
    assert place in found and "line 2" in found


def test_an_unknown_template_names_those_there_are(folder: Path) -> None:
    found = problems(folder, ", chat_template: chatmll")
    assert "neither a file nor a template" in found and "chatml" in found


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{{ raise_exception('no') }}{{ tools | tojson }}{{ strftime_now('%Y') }}",
    ],
)
def test_templates_of_the_tokenizer_library_are_fine(template: str) -> None:
    assert syntax_error(template) is None


def test_hugging_face_is_asked_once_when_it_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[str] = []

    class Away:
        def model_info(self, path: str, **_: object) -> None:
            asked.append(path)
            raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Away)
    file = tmp_path / "c.yaml"
    file.write_text("models: [{name: a, path: org/a}, {name: b, path: org/b}]")
    hub, catalog = Hub(), load_catalog(file)
    found = [examine_model(catalog, name, hub).problems for name in "ab"]
    assert asked == ["org/a"]
    assert all("does not answer" in problem for (problem,) in found)


def test_a_model_larger_than_every_device(folder: Path) -> None:
    (folder.parent / "c.yaml").write_text("models: [{name: a, path: m, min_kv_memory: 1MiB}]")
    spec = load_catalog(folder.parent / "c.yaml").spec("a")
    assert too_large(spec, spec.weight_bytes + (1 << 20)) is None
    assert "the largest device has" in (too_large(spec, spec.weight_bytes + (1 << 20) - 1) or "")


@pytest.mark.parametrize(
    ("option", "choice"),
    [
        ("tool_call_parser: qwen52", "qwen25"),
        ("reasoning_parser: deepseek", "deepseek-r1"),
        ("engine_args: {dtype: flaot32}", "float32"),
        ("engine_args: {is_embedding: true}", "is decided by `kind`"),
        ("engine_args: {kv_cache_dtype: nvfp4}", "fp8_e4m3"),
        ("engine_args: {enable_unified_memory: true}", "choices: false"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_with_choices(tmp_path: Path, option: str, choice: str) -> None:
    (tmp_path / "c.yaml").write_text(f"models:\n- name: a\n  path: org/a\n  {option}\n")
    with pytest.raises(CatalogError) as caught:
        load_catalog(tmp_path / "c.yaml")
    [problem] = caught.value.problems
    assert choice in str(problem) and problem.where.endswith(":4")


def test_the_registries_are_sglangs() -> None:
    known = registries()
    assert {"qwen25", "llama3", "mistral"} <= set(known.tool_call_parser)
    assert {"qwen3", "deepseek-r1"} <= set(known.reasoning_parser)
    assert known.engine_args["dtype"] == ("auto", "half", "float16", "bfloat16", "float", "float32")


HIDDEN = """
keys: [{name: a, key: "${env:NOT_SET}"}]
server: {port: "${env:NO_PORT}", prot: 1}
models:
- {name: a, path: x, tool_call_parser: nonsense}
- {name: a, path: y}
"""


def test_a_variable_that_is_not_set_hides_no_other_problem(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HIDDEN)
    _, found = examine_catalog(file, {})
    assert [p.key for p in found] == ["keys[0].key", "server.port", "server.prot"]
    file.write_text(HIDDEN.replace(", prot: 1", ""))
    catalog, found = examine_catalog(file, {})
    assert [p.key for p in found] == ["keys[0].key", "server.port", "models[1].name", "models[0].tool_call_parser"]
    assert catalog is not None and [m.path for m in catalog.models] == ["x", "y"]
    with pytest.raises(CatalogError) as caught:
        load_catalog(file, {})
    assert len(caught.value.problems) == 4
