"""One server per store: two on one Redis would take each other's requests and fight for its controller."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Final

from prism.config.state import StateDir
from prism.core.errors import PrismError
from prism.store.interface import Store

STATUS: Final = "status"
"""The document that a running server writes again and again."""
RUNS_S: Final = 10.0
"""One that was written within this time is of a running server."""


class StoreInUse(PrismError):
    """Another server runs on the store; the message says which, and what to do."""


def signed(status: dict[str, object], state: StateDir) -> str:
    """``status`` as it is written, with who writes it and when."""
    return json.dumps({**status, **_self(state), "at_s": time.time()})


async def check_alone(store: Store, state: StateDir, shown: str) -> None:
    """Raises :class:`StoreInUse` when another server than that of ``state`` (whose lock the caller has) writes to
    ``store``, which is called ``shown``."""
    text = await store.doc(STATUS)
    other: dict[str, Any] = json.loads(text) if text else {}
    if time.time() - float(other.get("at_s", 0.0)) > RUNS_S:
        return
    if {key: other.get(key) for key in ("host", "state_dir")} == _self(state):
        return
    raise StoreInUse(
        f"{shown} is used by the server at {other.get('url')} (process {other.get('pid')} on {other.get('host')}, "
        f"state directory {other.get('state_dir')}); give each server a Redis or a database of its own "
        f"(redis://HOST:PORT/1), or wait {RUNS_S:.0f} s after the end of that one"
    )


def _self(state: StateDir) -> dict[str, str]:
    return {"host": socket.gethostname(), "state_dir": str(state.root)}
