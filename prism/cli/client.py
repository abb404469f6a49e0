"""The admin API, as the verbs use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

import click
import httpx

from prism.cli.errors import CliError, Exit
from prism.config.state import DEFAULT_STATE_DIR, StateDir

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_URL = "http://127.0.0.1:8000"
COMMAND_TIMEOUT_S = 900.0
"""Longest wait for a load: a large model from a slow disk."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls to one server. Every failure is a :class:`CliError` that says what to do."""

    url: str
    key: str | None
    timeout_s: float = 30.0
    transport: httpx.BaseTransport | None = None
    """What carries the calls; None: the network."""

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """The JSON object at ``/admin/PATH``."""
        return self._call("GET", path, params=query)

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """Ask for something; waits until it is done."""
        return self._call("POST", path, json=body, timeout=COMMAND_TIMEOUT_S)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        options.setdefault("timeout", self.timeout_s)
        try:
            # Certificates take longer to read than most servers take to answer.
            with httpx.Client(
                headers=headers, transport=self.transport, verify=self.url.lower().startswith("https")
            ) as http:
                reply = http.request(method, f"{self.url.rstrip('/')}/admin/{path}", **options)
        except httpx.TimeoutException as error:
            raise CliError(f"the server at {self.url} did not answer in time", Exit.UNREACHABLE) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            hint = "is it running? (prism-serve CATALOG.yaml; --url or --state-dir say where)"
            raise CliError(f"no server answers at {self.url} ({error}); {hint}", Exit.UNREACHABLE) from error
        return _body(reply, self.url)


def model_path(name: str, *more: str) -> str:
    """``models/NAME/...`` with the name quoted, its slashes too: ``../x`` must not lead to another path."""
    return "/".join(("models", quote(name, safe=""), *more))


def server_options(command: Callable[Concatenate[AdminClient, P], R]) -> Callable[..., R]:
    """Give a verb ``--url``, ``--key`` and ``--state-dir`` and pass it the client as its first argument."""

    @click.option("--url", envvar="PRISM_URL", help="Server to talk to.  [default: the one of --state-dir]")
    @click.option("--key", envvar="PRISM_ADMIN_KEY", help="Admin key.  [default: admin.key in --state-dir]")
    @click.option(
        "--state-dir",
        envvar="PRISM_STATE_DIR",
        help=f"The server's state.  [default: {DEFAULT_STATE_DIR}]",
    )
    @wraps(command)
    def wrapped(*args: Any, url: str | None, key: str | None, state_dir: str | None, **kwargs: Any) -> R:
        return command(connect(url, key, state_dir), *args, **kwargs)

    return wrapped


def connect(url: str | None, key: str | None, state_dir: str | None) -> AdminClient:
    """The client for what the options and the state directory say: ``url``, else the server of ``state_dir``, else
    that of ``./state``, else :data:`DEFAULT_URL`. A ``state_dir`` that was named and has no running server is a
    :class:`CliError`: another address could be another server's. Reads no network."""
    state = StateDir.at(state_dir or DEFAULT_STATE_DIR)
    server = state.read_server()
    if url is None and server is None and state_dir is not None:
        raise CliError(
            f"no server runs with the state directory {state.root}: there is no {state.server_file.name} in it; start "
            f"one (prism-serve CATALOG.yaml --state-dir {state_dir}) or name a server with --url",
            Exit.UNREACHABLE,
        )
    if key is None and state.admin_key_file.is_file():
        key = state.admin_key()
    return AdminClient(url or str((server or {}).get("url", DEFAULT_URL)), key)


def _body(reply: httpx.Response, url: str) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        body = None
    if reply.is_success and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if reply.status_code in (401, 403):
        hint = "give the admin key with --key, PRISM_ADMIN_KEY, or --state-dir"
        raise CliError(f"{str(message or 'the server refused the key').rstrip('.')}; {hint}", Exit.UNAUTHORIZED)
    if message is None and reply.status_code == 500:
        raise CliError("the server failed; `prism logs --level error` has the reason")
    if message is None:
        raise CliError(f"{url} answered {reply.status_code}, which is no answer of a Prism server", Exit.UNREACHABLE)
    raise CliError(str(message))
