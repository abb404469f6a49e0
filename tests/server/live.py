"""A front door in a thread of the test process, on a unix socket, with fake engines behind an in-memory (or given)
store."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import uvicorn

from prism.config.catalog import Catalog
from prism.engine import cpu_operators, cuda_stub
from prism.engine.boot import prepare_environment
from prism.engine.fake import FakeSpeed
from prism.engine.fake_node import FakeNode
from prism.server.connections import BoundedProtocol
from prism.server.front import Front, make_front
from prism.store.interface import Store
from prism.wire.mailbox import Inbox
from prism.wire.message import Message
from tests.patience import PATIENCE_S

T = TypeVar("T")
ADMIN_KEY = "admin-key-for-tests"


def import_sglang() -> None:
    """SGLang's front side, once per process; its imports warn about missing hardware."""
    prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import prism.server.sglang_build  # noqa: F401

        cpu_operators.declare_missing()
    asyncio.set_event_loop_policy(None)  # SGLang installs its own


class LiveFront:
    """``with LiveFront(...) as live``: requests go to ``live.http`` or the clients of ``live.client()``."""

    def __init__(
        self, catalog: Catalog, folder: Path, models: Mapping[str, FakeSpeed], store: Store | None = None
    ) -> None:
        self.catalog, self.folder, self.models, self._given = catalog, folder, models, store
        self.socket = str(folder / "http.sock")
        self.front: Front
        self.node: FakeNode
        self.store: Store
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> LiveFront:
        import_sglang()
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        if self._failure is not None:
            raise self._failure
        self.http = self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """A coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def connect(self, timeout: httpx.Timeout | float = PATIENCE_S) -> httpx.Client:
        """A client with connections of its own."""
        transport = httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(transport=transport, base_url="http://prism", timeout=timeout)

    def tell(self, message: Message) -> None:
        """Puts ``message`` into the front door's mailbox, from the loop whose socket it is."""

        async def send() -> None:
            self.node.pool._outbox.send(self.front.broker.inbox.address, message)

        self.run(send())

    @contextlib.contextmanager
    def answering(self, model: str, text: str) -> Iterator[None]:
        """``model`` answers ``text`` (its token ids are bytes), and stops."""
        handle = self.node.handles[model]
        handle.answer = lambda prompt_ids: list(text.encode())
        try:
            yield
        finally:
            handle.answer = None

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url="http://prism/v1", http_client=self.http, **options)

    def async_client(self, limits: httpx.Limits | None = None) -> openai.AsyncOpenAI:
        transport = httpx.AsyncHTTPTransport(uds=self.socket, limits=limits or httpx.Limits())
        http = httpx.AsyncClient(transport=transport, timeout=PATIENCE_S)
        return openai.AsyncOpenAI(base_url="http://prism/v1", http_client=http, api_key="none", max_retries=0)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        from prism.server.app import create_app
        from prism.store.memory import MemoryStore

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.store = self._given or MemoryStore()
        self.node = FakeNode(self.store, f"ipc://{self.folder}/node", self.models)
        with Inbox(f"ipc://{self.folder}/front") as inbox:
            self.front = make_front(self.catalog, self.store, inbox, admin_key=ADMIN_KEY)
            tasks = [asyncio.create_task(self.node.run()), asyncio.create_task(self.front.run())]
            options = uvicorn.Config(
                create_app(self.front),
                uds=self.socket,
                http=BoundedProtocol,
                log_config=None,
                access_log=False,
                lifespan="off",
            )
            server = uvicorn.Server(options)
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            serving = asyncio.create_task(server.serve())
            await self.node.ready.wait()
            await self.front.placements.known.wait()
            while not server.started:
                await asyncio.sleep(0.01)
            self._ready.set()
            await self._stop.wait()
            await self.front.broker.close()
            server.should_exit = True
            await serving
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.aclose()
