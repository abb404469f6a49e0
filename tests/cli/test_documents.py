"""Commands, catalogs and links in the documents work."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from prism.cli.main import main
from prism.config.load import load_text
from prism.core.reasons import ReasonCode

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / name for name in ("catalog.md", "metrics.md", "cli.md", "runbook.md")]


def commands(file: Path) -> list[str]:
    """Lines ``$ prism ...`` of console blocks and inline `` `prism ...` `` code."""
    text = file.read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ prism ")]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return lines + re.findall(r"`(prism [a-z][^`]*)`", prose)


@pytest.mark.parametrize(("file", "line"), [(file.name, line) for file in DOCUMENTS for line in commands(file)])
def test_commands_exist_with_their_options(file: str, line: str) -> None:
    words = line.split()[1:]
    command: click.Command = main
    context = click.Context(main, info_name="prism")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words.pop(0))
        assert found is not None, f"{file}: {line}"
        command = found
        context = click.Context(command, parent=context, resilient_parsing=True)
    command.make_parser(context).parse_args(words)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", file.read_text()):
        assert target.startswith("http") or (file.parent / target).exists(), f"{file.name}: {target}"


def test_the_catalogs_in_the_documentation_load() -> None:
    text = (ROOT / "docs" / "catalog.md").read_text()
    examples = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "models:" in block]
    assert examples
    for example in examples:
        load_text(example.encode(), "catalog.md", {})


def test_reasons_in_the_runbook_exist() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    known = {code.value for code in ReasonCode}
    for reason in (
        "no_feasible_device",
        "activation_failed",
        "no_room",
        "late_rejected",
        "queue_full",
        "make_room",
        "move_does_not_pay",
    ):
        assert reason in known
        assert f"`{reason}`" in text
