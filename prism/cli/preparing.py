"""Compiling ahead what engines compile at their first use: a server of one's own answers once with every model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from prism.cli.diagnosis import Finding
from prism.config.catalog import Catalog
from prism.config.errors import ModelFilesError
from prism.config.model_files import local_folder
from prism.config.units import written
from prism.core.errors import PrismError
from prism.engine.kernels import compiled_kernels

START_S: Final = 600.0
ANSWER_S: Final = 1800.0
"""A large model from a slow disk, and its kernels."""
STOP_S: Final = 60.0
PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 40
WAYS: Final = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1})
"""Greedy and seeded sampling have kernels of their own."""


class CannotPrepare(PrismError):
    """The server did not come up; the message has its last words."""


@dataclass(frozen=True, slots=True)
class PrivateServer:
    """Answers at ``url``."""

    url: str

    def ask(self, model: str) -> None:
        """A short answer in each of :data:`WAYS`. Raises :class:`CannotPrepare`."""
        for way in WAYS:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, **way}
            try:
                reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S)
            except httpx.HTTPError as error:
                raise CannotPrepare(f"no answer: {error}") from error
            if reply.status_code != 200:
                raise CannotPrepare(_reason(reply))


Serve = Callable[[Path, Path], Any]
"""A server of the catalog in a file, with its state in a folder, as a context: gives something that can be asked."""


def prepare(catalog: Catalog, serve: Serve | None = None) -> Iterator[Finding]:
    """One finding per model, as it ends. The models' own settings, devices and engines are the catalog's; its keys,
    store and address are not used."""
    with tempfile.TemporaryDirectory(prefix="prism-p-") as folder:
        file = Path(folder) / "catalog.yaml"
        document, missing = private_catalog(catalog)
        file.write_text(json.dumps(document))
        yield from missing
        if not document["models"]:
            return
        with (serve or private_server)(file, Path(folder) / "state") as server:
            for model in document["models"]:
                yield _prepare_one(server, model["name"])


def _prepare_one(server: Any, name: str) -> Finding:
    before, start_s = compiled_kernels(), time.monotonic()
    try:
        server.ask(name)
    except CannotPrepare as error:
        return Finding(f"kernels of {name}", "missing", "not prepared", str(error))
    new, seconds = len(compiled_kernels() - before), time.monotonic() - start_s
    return Finding(f"kernels of {name}", "ok", f"{new} compiled, {seconds:.0f} s with the answers")


def private_catalog(catalog: Catalog) -> tuple[dict[str, Any], list[Finding]]:
    """The catalog for nobody but us, as its file would have it, and models that are left out of it, since their files
    are not here."""
    models, missing = [], []
    for model in catalog.models:
        try:
            folder = local_folder(model.path, catalog.base)
        except ModelFilesError as error:
            missing.append(Finding(f"kernels of {model.name}", "missing", "not prepared", str(error)))
            continue
        described = {**catalog.describe(model.name), "pin": False}
        models.append({**described, "path": model.path if folder is None else str(folder)})
    document = {
        "models": models,
        "devices": _plain(catalog.devices),
        "virtual": _plain(catalog.virtual),
        "gpu_memory_fraction": catalog.gpu_memory_fraction,
        "engines": _plain(catalog.engines),
    }
    return document, missing


def _plain(section: object) -> Any:
    return msgspec.to_builtins(section, str_keys=True, enc_hook=written)


@contextmanager
def private_server(catalog: Path, state: Path) -> Iterator[PrivateServer]:
    """``prism-serve`` on a free port of this machine, for the length of the block. Raises :class:`CannotPrepare`."""
    state.mkdir()
    port = _free_port()
    command = [sys.executable, "-m", "prism.cli.main", "serve", str(catalog), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--state-dir", str(state)]
    log = state.with_name("log")
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    server = PrivateServer(f"http://127.0.0.1:{port}")
    try:
        _wait_until_up(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(server: PrivateServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):  # on loopback, without certificates, which take long to read
            if httpx.get(f"{server.url}/health", timeout=5.0, verify=False).status_code == 200:
                return
        time.sleep(0.2)
    words = log.read_text("utf-8", "replace").strip().splitlines()[-5:]
    ended = "ended" if process.poll() is not None else f"did not answer within {START_S:.0f} s"
    raise CannotPrepare(f"the server {ended}: {' | '.join(words)}")


def _reason(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
