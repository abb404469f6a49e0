"""What an installation is given besides the programs: a systemd unit, a licence, completion in the shell."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from prism.cli import config, serve
from prism.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / "examples" / "prism.service")
    return parser


def parsed(command: click.Command, words: list[str]) -> dict[str, object]:
    """The options of ``words`` as the program would read them."""
    context = click.Context(command, resilient_parsing=True)
    return command.make_parser(context).parse_args(words)[0]


def test_the_systemd_unit_runs_what_there_is(unit: configparser.RawConfigParser) -> None:
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts
    options = parsed(serve.command, words)
    assert options["state_dir"] == "/var/lib/prism" == f"/var/lib/{service['StateDirectory']}"
    assert service["Environment"] == f"PRISM_STATE_DIR={options['state_dir']}", "the verbs find the server"
    program, group, verb, *words = shlex.split(service["ExecStartPre"])
    assert (Path(program).name, group, verb) == ("prism", "config", "check")
    assert parsed(config.check, words)["catalog"] == options["catalog"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert "examples/prism.service" in (ROOT / "docs" / "runbook.md").read_text()


def test_the_unit_waits_longer_than_the_server_drains(unit: configparser.RawConfigParser) -> None:
    from prism.config.sections.server import ServerConfig
    from prism.supervisor.machine import STOP_S

    assert int(unit["Service"]["TimeoutStopSec"]) > ServerConfig().drain_timeout_s + 3 * STOP_S


def test_the_licence_is_whole_and_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_as_documented(shell: str) -> None:
    assert f"_PRISM_COMPLETE={shell}_source prism" in (ROOT / "docs" / "cli.md").read_text()
    code = "from prism.cli.main import main; main(prog_name='prism')"
    environment = {**os.environ, "_PRISM_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "_PRISM_COMPLETE" in done.stdout, done.stderr


def test_verbs_options_and_choices_are_completed() -> None:
    complete = ShellComplete(main, {}, "prism", "_PRISM_COMPLETE")
    assert [item.value for item in complete.get_completions([], "dra")] == ["drain"]
    assert "--state-dir" in [item.value for item in complete.get_completions(["ls"], "--st")]
    assert [item.value for item in complete.get_completions(["ls", "--state"], "fa")] == ["failed"]
    assert CliRunner().invoke(main, ["ls", "--help"]).exit_code == 0
