"""Every table fits a terminal of 80 columns without breaking a name."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from prism.cli import mem, output, ps
from prism.cli.table import Column, fitted
from tests.cli.conftest import COLD, DEVICE, MODEL, FakeServer

Run = Callable[..., Result]
NAME = "meta-llama/Llama-3.1-8B-Instruct"
QUOTED = "/admin/models/meta-llama%2FLlama-3.1-8B-Instruct"
DECISION = {"at_s": 1.0, "do": "Activate", "devices": ["local/cuda:0"], "reason": {"code": "demand", "waiting": 3}}
REQUEST = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "model": "demo-stablelm",
    "state": "streaming",
    "device": "local/host:0",
    "waited_s": 0.25,
    "tokens": 700,
}
LONG: dict[str, Any] = {**MODEL, "name": NAME, "failure": "the folder /models/x does not exist " * 3}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", 80)


def test_columns_beyond_the_ninth_rank_have_one_too() -> None:
    assert Column.of("LENT>?10") == Column("LENT", prose=False, right=True, rank=10)
    titles = [Column.of(name).title for name in (*mem.COLUMNS, *ps.COLUMNS)]
    assert not [title for title in titles if set(title) & set("~>?")]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["ps"], [NAME, "local/host:0", "ready", "3.0 GiB"]),
        (["ls"], [f"{NAME} (pinned)", "ready"]),
        (["show", NAME], [NAME, "local/host:0", "Activate"]),
        (["top", "--once"], [NAME, "local/host:0", "#++"]),
        (["requests"], [str(REQUEST["id"]), "streaming", "250ms"]),
        (["plan", "--all"], [NAME, "move"]),
    ],
)
def test_verbs(server: FakeServer, prism: Run, arguments: list[str], kept: list[str]) -> None:
    server.answers["GET /admin/models"] = {"models": [LONG, COLD]}
    server.answers[f"GET {QUOTED}"] = {**LONG, "decisions": [DECISION]}
    server.answers["GET /admin/devices"] = {"devices": [DEVICE]}
    server.answers["GET /admin/requests"] = {"requests": [REQUEST]}
    move = {"model": NAME, "action": "move", "current": ["local/cuda:0"], "target": ["local/cuda:1"]}
    server.answers["GET /admin/plan"] = {"decisions": [{**move, "reason": {"code": "migration", "gain": 0.25}}]}
    shown = prism(*arguments)
    assert shown.exit_code == 0, shown.output
    table = [line for line in shown.output.splitlines() if not line.startswith(f"{NAME}: ")]
    assert max(map(len, table)) <= 80
    for text in kept:
        assert text in shown.output, shown.output


def rendered(width: int, columns: list[str], rows: list[list[str]]) -> list[str]:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(fitted(columns, rows, width))
    return [line.rstrip() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_what_matters_less_is_left_out_first_and_named() -> None:
    columns, row = ["NAME", "A>?2", "B>?1", "WHY~"], ["n" * 20, "1" * 8, "2" * 8, "a long reason " * 4]
    assert rendered(120, columns, [row])[0].split() == ["NAME", "A", "B", "WHY"]
    lines = rendered(50, columns, [row])
    assert lines[0].split() == ["NAME", "A", "WHY"]
    assert lines[-1] == "(left out for want of width: B; --json has all)"
    assert rendered(42, columns, [row])[0].split() == ["NAME", "WHY"]


def test_what_fits_nowhere_is_folded_and_not_cut() -> None:
    lines = rendered(20, ["NAME", "B"], [["n" * 30, "b"]])
    assert "".join(lines).count("n") == 30
