"""Where the command line finds its server and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from prism.cli.client import DEFAULT_URL, AdminClient, connect
from prism.cli.errors import CliError, Exit
from prism.config.state import StateDir


def test_a_state_directory_that_was_named_and_has_no_server_is_an_error(
    tmp_path: Path, prism: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.1:8000 may be another server."""
    state = StateDir.at(tmp_path / "named")
    state.create()
    for given in ({"args": ("--state-dir", str(state.root))}, {"env": {"PRISM_STATE_DIR": str(state.root)}}):
        shown = prism("ls", *given.get("args", ()), env=given.get("env"))
        assert shown.exit_code == Exit.UNREACHABLE
        assert f"no server runs with the state directory {state.root}" in shown.output
        assert "server.json" in shown.output and "--url" in shown.output
    assert connect("http://x", None, str(state.root)) == AdminClient("http://x", None)
    monkeypatch.chdir(tmp_path)
    assert connect(None, None, None) == AdminClient(DEFAULT_URL, None), "the documented last choice"


def test_state_directory(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    state.create()
    key = state.admin_key()
    state.write_server("http://127.0.0.1:9", tmp_path / "c.yaml", 1.0)
    assert connect(None, None, str(tmp_path)) == AdminClient("http://127.0.0.1:9", key)
    assert connect("http://x", "k", str(tmp_path)) == AdminClient("http://x", "k")


@pytest.mark.parametrize(
    "failure", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("?")]
)
def test_no_answer(failure: Exception) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise failure

    client = AdminClient("http://server", None, transport=httpx.MockTransport(fail))
    with pytest.raises(CliError) as caught:
        client.get("models")
    assert caught.value.exit_code == Exit.UNREACHABLE


def test_a_url_that_is_none(prism: Callable[..., Result]) -> None:
    shown = prism("ls", "--url", "http://[::1")
    assert shown.exit_code == Exit.UNREACHABLE
    assert "Traceback" not in shown.output
