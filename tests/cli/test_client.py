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


def test_state_directory(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    state.create()
    assert connect(None, None, str(tmp_path)) == AdminClient(DEFAULT_URL, None)
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
    shown = prism("ls", "--url", "http://[bad")
    assert shown.exit_code == Exit.UNREACHABLE
    assert "Traceback" not in shown.output
