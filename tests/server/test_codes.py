"""docs/api.md lists exactly the error codes that the code can send."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from prism.core.effects import Refuse, RefuseWaiting
from prism.wire.refusals import _CODES

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
MAKERS = {"ApiError": 1, "Refusal": 1, "Failed": None, "invalid": 2, "unavailable": 2, "_refuse": 2}
"""What makes an error -> where its code stands among the positional arguments."""
REFUSED_BY_SCHEDULERS = {
    "no_room", "no_feasible_device", "no_devices", "not_placed", "activation_failed",
}  # fmt: skip


def documented() -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| \d{3} \| (.+?) \|", text, re.M)
    return [code for row in rows for code in re.findall(r"`(\w+)`", row)]


def sent() -> set[str]:
    files = [*(ROOT / "prism/server").glob("*.py"), *(ROOT / "prism/node").glob("*.py")]
    files += [*(ROOT / "prism/controller").glob("*.py")]
    found = {code for file in files for code in _in(ast.parse(file.read_text()))}
    return found | {code for _, code in _CODES.values()} | REFUSED_BY_SCHEDULERS


def _in(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("invalid", "unavailable"):
            found |= {d.value for d in node.args.defaults if isinstance(d, ast.Constant) and isinstance(d.value, str)}
        if isinstance(node, ast.Dict):  # status -> code
            pairs = zip(node.keys, node.values, strict=True)
            found |= {v.value for k, v in pairs if isinstance(k, ast.Constant) and k.value in (404, 405)
                      and isinstance(v, ast.Constant)}  # fmt: skip
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in MAKERS:
            continue
        place = MAKERS[name]
        given = [k.value for k in node.keywords if k.arg == "code"]
        given += [node.args[place]] if place is not None and len(node.args) > place else []
        found |= {g.value for g in given if isinstance(g, ast.Constant) and isinstance(g.value, str)}
    return {code for code in found if CODE.fullmatch(code)}


def test_the_table_has_every_code_once_and_no_other() -> None:
    table = documented()
    assert len(table) == len(set(table)), "a code stands in two rows"
    assert set(table) == sent() - {"http_error"}, sorted(set(table) ^ (sent() - {"http_error"}))


def test_schedulers_refuse_with_known_reasons_only() -> None:
    """A new reason for a refusal needs a sentence and a row in the table."""
    sources = "".join(file.read_text() for file in (ROOT / "prism/scheduler").glob("*.py"))
    used = {match.lower() for match in re.findall(r"ReasonCode\.(\w+)", sources)}
    refusing = {"unknown_model", "queue_full", "prompt_too_large", "late_rejected", *REFUSED_BY_SCHEDULERS}
    assert refusing <= used
    assert {Refuse.__name__, RefuseWaiting.__name__} <= set(re.findall(r"Refuse\w*", sources))
