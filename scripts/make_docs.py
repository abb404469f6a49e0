"""Write what is generated: schema, engine arguments, tables of keys, metrics and commands, the Grafana dashboard.

    python scripts/make_docs.py [--check]

In a document only what stands between ``<!-- generated:NAME -->`` and ``<!-- end -->`` is replaced. ``--check`` writes
nothing and fails when something is not up to date.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prism.cli.main import VERBS, main  # noqa: E402
from prism.config.schema import catalog_schema  # noqa: E402
from prism.obs.definition import MetricDef, MetricKind  # noqa: E402
from prism.obs.names import METRICS  # noqa: E402

HELP_WIDTH = 100


def catalog_keys() -> str:
    """One table per section of the catalog, under the key that holds it."""
    schema = catalog_schema()
    names = section_names(schema)
    tables = [section_table("Top level", schema, schema["$defs"], names)]
    tables += [section_table(title, schema["$defs"][name], schema["$defs"], names) for name, title in names.items()]
    return "\n".join(tables)


def section_names(schema: dict[str, Any]) -> dict[str, str]:
    """Section -> the key under which a reader meets it first, in that order."""
    found: dict[str, str] = {}

    def visit(properties: dict[str, Any]) -> None:
        for key, rule in properties.items():
            for name in re.findall(r"#/\$defs/(\w+)", json.dumps(rule)):
                if name not in found and "properties" in schema["$defs"][name]:
                    found[name] = key
                    visit(schema["$defs"][name]["properties"])

    visit(schema["properties"])
    return found


def section_table(title: str, part: dict[str, Any], defs: dict[str, Any], names: dict[str, str]) -> str:
    lines = [
        f"### {title}",
        "",
        str(part.get("description", "")),
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    required = part.get("required", [])
    for key, rule in part["properties"].items():
        default = "required" if key in required else f"`{json.dumps(rule['default'])}`" if "default" in rule else ""
        lines.append(
            f"| `{key}` | {value_text(rule, defs, names)} | {default} | {rule['description']} |".replace("\\", "\\\\")
        )
    return "\n".join(lines) + "\n"


def value_text(rule: dict[str, Any], defs: dict[str, Any], names: dict[str, str]) -> str:
    """What may be written: a type, choices, or the section."""
    if rule.get("title") in ("duration", "size"):
        return str(rule["title"])
    if "$ref" in rule:
        name = rule["$ref"].removeprefix("#/$defs/")
        return f"[{names[name]}](#{names[name]})" if name in names else value_text(defs[name], defs, names)
    if "enum" in rule:
        return ", ".join(f"`{choice}`" for choice in sorted(rule["enum"]))
    if "anyOf" in rule:
        return " or ".join(value_text(option, defs, names) for option in rule["anyOf"])
    if rule["type"] == "array":
        return f"list of {value_text(rule['items'], defs, names)}"
    kinds = {"object": "mapping", "string": "text", "boolean": "`true`, `false`", "null": "`null`"}
    bounds = "".join(f" {sign} {rule[key]}" for key, sign in (("minimum", ">="), ("maximum", "<=")) if key in rule)
    return str(kinds.get(rule["type"], rule["type"])) + bounds


def metrics_table() -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.kind.value} | {', '.join(m.labels) or '-'} | {m.help} |" for m in METRICS]
    return "\n".join(lines) + "\n"


def metrics_queries() -> str:
    return "\n".join(f"{m.help}\n\n```promql\n{m.promql}\n```\n" for m in METRICS if m.promql)


def commands() -> str:
    """The help of every verb, its sub-commands included."""
    names = main.context_settings["help_option_names"]
    root = click.Context(
        main, info_name="prism", help_option_names=names, max_content_width=HELP_WIDTH, terminal_width=HELP_WIDTH
    )
    parts = [help_block("prism", main.get_help(root))]
    for name in VERBS:
        command = main.get_command(root, name)
        assert command is not None
        parts += command_blocks(command, name, root)
    return "\n".join(parts)


def command_blocks(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(
        command, info_name=name, parent=parent, max_content_width=HELP_WIDTH, terminal_width=HELP_WIDTH
    )
    yield help_block(context.command_path, command.get_help(context))
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from command_blocks(found, sub, context)


def help_block(title: str, text: str) -> str:
    body = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return f"## {title}\n\n```text\n{body}\n```\n"


def dashboard() -> str:
    """A Grafana dashboard with a panel for every metric that has a query."""
    panels = [panel(i, metric) for i, metric in enumerate(m for m in METRICS if m.promql)]
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    board = {
        "title": "Prism",
        "uid": "prism",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource]},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def panel(number: int, metric: MetricDef) -> dict[str, Any]:
    labels = re.findall(r"by \(([^)]*)\)", metric.promql)
    shown = [label.strip() for label in (labels[0].split(",") if labels else metric.labels) if label.strip() != "le"]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": metric.name.removeprefix("prism_").removesuffix("_total").replace("_", " "),
        "description": metric.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 8, "w": 8, "x": number % 3 * 8, "y": number // 3 * 8},
        "fieldConfig": {"defaults": {"unit": unit_of(metric)}, "overrides": []},
        "targets": [
            {"expr": metric.promql, "legendFormat": " ".join(f"{{{{{label}}}}}" for label in shown), "refId": "A"}
        ],
    }


def unit_of(metric: MetricDef) -> str:
    """Grafana's unit of what the panel's query returns."""
    if " / " in metric.promql and metric.kind is not MetricKind.HISTOGRAM:
        return "percentunit"
    if "_bytes" in metric.name:
        return "bytes"
    return "s" if metric.kind is MetricKind.HISTOGRAM else "short"


def sglang_source(*path: str) -> ast.Module:
    """A file of the pinned SGLang, parsed: importing it takes seconds."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return ast.parse(Path(spec.submodule_search_locations[0], "srt", *path).read_text("utf-8"))


def engine_fields() -> list[ast.AnnAssign]:
    """The fields of SGLang's ``ServerArgs``."""
    [found] = [
        n for n in sglang_source("server_args.py").body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs"
    ]
    return [n for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def engine_arguments() -> str:
    names = [ast.unparse(field.target) for field in engine_fields()]
    return json.dumps(sorted(name for name in names if not name.startswith("_")), indent=1) + "\n"


def engine_registries() -> str:
    """What the pinned SGLang knows by name: parsers, chat templates, and the choices of engine arguments."""
    found: dict[str, Any] = {
        "chat_template": conversation_templates(),
        "reasoning_parser": dict_keys(sglang_source("parser", "reasoning_parser.py"), "DetectorMap"),
        "tool_call_parser": dict_keys(sglang_source("function_call", "function_call_parser.py"), "ToolCallParserEnum"),
        "engine_args": dict(sorted(engine_choices())),
        "architectures": model_classes(),
        "pooled": sorted(strings(definition("is_generation_model"))),
        "cross_encoders": sorted(strings(assigned("_cross_encoding_pooler_archs"))),
        "multimodal": sorted(strings(assigned("multimodal_model_archs"))),
        "shares_head": classes_with("get_embed_and_head"),
        "shows_layers": classes_with("set_eagle3_layers_to_capture"),
        "window_hybrids": sorted(
            (strings(definition("is_hybrid_swa_model")) | strings(assigned("MIMO_V2_MODEL_ARCHS")))
            & set(model_classes())
        ),
        "wrapped": wrapped_classes(),
    }
    return json.dumps(found, indent=1) + "\n"


def dict_keys(module: ast.Module, name: str) -> list[str]:
    """The keys of the dict that a class of ``module`` assigns to ``name``."""
    assigned = [n for n in ast.walk(module) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name]
    [table] = [n.value for n in assigned if isinstance(n.value, ast.Dict)]
    return sorted(ast.literal_eval(key) for key in table.keys if key is not None)


def model_classes() -> list[str]:
    """The classes that SGLang's models announce (``EntryClass``)."""
    found: set[str] = set()
    for node in model_statements():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            found |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return sorted(found)


ANSWERING = r"^class (\w+For(?:CausalLM|ConditionalGeneration|\w+Classification))\("


def wrapped_classes() -> list[str]:
    """The classes of Transformers that SGLang runs with its own attention (``sglang.srt.models.transformers``) because
    it has none of that name."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    found: set[str] = set()
    for file in (Path(spec.origin).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text("utf-8")
        if "_supports_attention_backend = True" in text:
            found.update(re.findall(ANSWERING, text, re.M))
    return sorted(found - set(model_classes()))


@cache
def model_statements() -> list[ast.stmt]:
    """What stands at the top of the files of SGLang's models."""
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    files = (Path(spec.origin).parent / "srt" / "models").rglob("*.py")
    return [node for file in sorted(files) for node in ast.parse(file.read_text("utf-8-sig")).body]


def classes_with(method: str) -> list[str]:
    """The announced classes of SGLang's models that have the method, or a class above them has."""
    bases: dict[str, set[str]] = {}
    able: set[str] = set()
    for node in model_statements():
        if isinstance(node, ast.ClassDef):
            bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
            if any(isinstance(part, ast.FunctionDef) and part.name == method for part in node.body):
                able.add(node.name)
    while more := {name for name, above in bases.items() if above & able} - able:
        able |= more
    return sorted(able & set(model_classes()))


def definition(name: str) -> ast.AST:
    """A function of SGLang's model configuration."""
    module = sglang_source("configs", "model_config.py")
    return next(n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == name)


def assigned(name: str) -> ast.AST:
    """What SGLang's model configuration assigns to ``name``."""
    module = sglang_source("configs", "model_config.py")
    [value] = [n.value for n in module.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    return value


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def conversation_templates() -> list[str]:
    calls = [n for n in ast.walk(sglang_source("parser", "conversation.py")) if isinstance(n, ast.Call)]
    named = [k for n in calls if ast.unparse(n.func) == "Conversation" for k in n.keywords if k.arg == "name"]
    return sorted({str(k.value.value) for k in named if isinstance(k.value, ast.Constant)})


def engine_choices() -> Iterator[tuple[str, list[Any]]]:
    """Arguments that take one of some values which stand in their declaration."""
    for field in engine_fields():
        for keyword in (n for n in ast.walk(field.annotation) if isinstance(n, ast.keyword) and n.arg == "choices"):
            if isinstance(keyword.value, ast.List):
                yield ast.unparse(field.target), ast.literal_eval(keyword.value)


def with_blocks(file: Path, blocks: dict[str, Callable[[], str]]) -> str:
    """The document with its generated blocks made anew."""
    text = file.read_text("utf-8")
    for name, make in blocks.items():
        pattern = rf"(<!-- generated:{name} -->\n).*?(<!-- end -->)"
        made = make().replace("\\", r"\\")
        text, count = re.subn(pattern, rf"\1\n{made}\n\2", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{file} must have one block generated:{name}")
    return text


def outputs() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    docs = ROOT / "docs"
    return {
        ROOT / "prism/config/schema.json": json.dumps(catalog_schema(), indent=2, ensure_ascii=False) + "\n",
        ROOT / "prism/config/engine_args.json": engine_arguments(),
        ROOT / "prism/config/engine_names.json": engine_registries(),
        docs / "catalog.md": with_blocks(docs / "catalog.md", {"keys": catalog_keys}),
        docs / "metrics.md": with_blocks(docs / "metrics.md", {"table": metrics_table, "queries": metrics_queries}),
        docs / "cli.md": with_blocks(docs / "cli.md", {"commands": commands}),
        docs / "grafana-dashboard.json": dashboard(),
    }


if __name__ == "__main__":
    stale = [file for file, text in outputs().items() if not file.exists() or file.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        raise SystemExit(f"not up to date: {', '.join(str(f.relative_to(ROOT)) for f in stale)}" if stale else 0)
    for file in stale:
        file.write_text(outputs()[file], "utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
