"""The root command: lazy, helpful, documented."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

from prism import __version__
from prism.cli import diagnosis, output
from prism.cli.main import VERBS, main
from prism.memory.gpus import Gpu, GpuSet

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]


def test_every_verb_is_a_command() -> None:
    context = click.Context(main)
    for name in VERBS:
        command = main.get_command(context, name)
        assert isinstance(command, click.Command), name
        assert command.help, name


def test_operators_verbs_have_json() -> None:
    context = click.Context(main)
    for name, verb in VERBS.items():
        command = main.get_command(context, name)
        assert command is not None
        if verb.section in ("Models", "Operation") or name == "doctor":
            assert any("--json" in parameter.opts for parameter in command.params), name


def test_help_imports_no_verb() -> None:
    code = (
        "import sys; from prism.cli.main import main; main(['--help'], standalone_mode=False);"
        "assert not {'rich', 'httpx', 'torch', 'prism.cli.ps', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_what_undoes_a_verb_is_said_to_be_an_option(prism: Run) -> None:
    assert "`prism pin MODEL --off`" in prism("unpin", "a").output
    assert "`prism drain DEVICES --off`" in prism("undrain", "host:0").output


def test_unknown_verbs_name_near_ones(prism: Run) -> None:
    shown = prism("lod")
    assert shown.exit_code == 2
    assert "load" in shown.output
    assert prism("--version").output.strip().endswith(__version__)


def test_generated_documents_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + " (run scripts/make_docs.py)"


def test_documented_exit_codes() -> None:
    from prism.cli.errors import Exit

    text = (ROOT / "docs" / "cli.md").read_text()
    for code in Exit:
        assert f"| {code.value} |" in text


def test_doctor(prism: Run) -> None:
    shown = prism("doctor", "--json")
    found = json.loads(shown.output)
    assert shown.exit_code == (0 if found["ok"] else 1)
    by_name = {finding["what"]: finding for finding in found["findings"]}
    assert by_name["Python"]["status"] == "ok"
    assert {"C++ compiler", "sglang", "embedded Redis", "NVIDIA driver", "/dev/shm", "open files"} <= set(by_name)
    for finding in found["findings"]:
        assert finding["status"] in ("ok", "warn", "missing", "info")
        assert finding["status"] != "missing" or finding["remedy"], finding


def test_doctor_looks_at_a_catalog(tmp_path: Path, prism: Run) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: [{name: a, path: nowhere}]\n")
    shown = prism("doctor", "--catalog", str(file))
    assert shown.exit_code == 1
    assert "model a" in shown.output


@pytest.mark.parametrize(("content", "named"), [("1\n", True), ("0\n", False), (None, False)])
def test_doctor_names_autogroups_that_are_on(
    content: str | None, named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prism.cli import diagnosis
    from prism.obs import kernel

    setting = tmp_path / "sched_autogroup_enabled"
    if content is not None:
        setting.write_text(content)
    monkeypatch.setattr(kernel, "_AUTOGROUPS", setting)
    found = [finding for finding in diagnosis.examine() if finding.what == "scheduler autogroups"]
    assert bool(found) == named
    assert all(finding.status == "warn" and "sysctl" in finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes(value: int | None, text: str) -> None:
    assert output.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0004, "0ms"), (0.35, "350ms"), (1, "1.0s"), (200, "3m20s"), (7500, "2h05m"), (9e5, "10d")],
)
def test_times(value: float | None, text: str) -> None:
    assert output.seconds(value) == text
    assert output.ago(None) == "never"
    assert output.ago(100.0, now_s=160.0) == "1m00s ago"


def test_doctor_says_which_gpus_help_each_other_to_load() -> None:
    def gpu(index: int, *links: int) -> Gpu:
        return Gpu(index, f"GPU-{index}", "a GPU", 1, 0, (9, 0), None, links, "")

    joined = diagnosis._helpers(GpuSet((13, 0), (gpu(0, 1), gpu(1, 0), gpu(2))))
    assert (joined.status, joined.found) == ("ok", "help each other load: cuda:0, cuda:1")
    assert "own link only" in diagnosis._helpers(GpuSet((13, 0), (gpu(0), gpu(1)))).found
