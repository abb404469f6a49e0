"""Who is calling, what they may use, and how much of it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from prism.config.catalog import Catalog
from prism.config.sections.server import KeyConfig
from prism.server.errors import forbidden, from_store, rate_limited, unauthorized
from prism.store.interface import Store
from prism.store.values import RateVerdict, StoreError


@dataclass(slots=True)
class Caller:
    """An authenticated client. ``key`` is None when the catalog has no keys."""

    key: KeyConfig | None
    headers: dict[str, str] = field(default_factory=dict)
    """``x-ratelimit-*``, filled by :meth:`Gate.admit`."""

    @property
    def name(self) -> str:
        return self.key.name if self.key is not None else ""


class Gate:
    """Checks keys and limits. Limits live in the store, so all front-door workers share them."""

    def __init__(self, catalog: Catalog, store: Store, admin_key: str) -> None:
        self.catalog = catalog
        self._store, self._admin_key = store, admin_key
        self._returning: set[asyncio.Task[None]] = set()

    def caller(self, headers: Headers) -> Caller:
        """Raises :class:`ApiError` (401) unless the API is open or the key is right."""
        secret = _secret(headers)
        if not self.catalog.keys:
            return Caller(None)
        if not secret:
            raise unauthorized("No API key was given. Send it as 'Authorization: Bearer KEY'.")
        key = self.catalog.key_for(secret)
        if key is None:
            if self._is_admin(secret):
                return Caller(None)
            raise unauthorized("The API key is not valid.")
        return Caller(key)

    def admin(self, headers: Headers) -> Caller:
        """Raises :class:`ApiError` (401, 403) unless the key is an admin key."""
        secret = _secret(headers)
        if not secret:
            raise unauthorized("Admin calls need a key: the one in the state directory, or one with 'admin: true'.")
        if self._is_admin(secret):
            return Caller(None)
        key = self.catalog.key_for(secret)
        if key is None:
            raise unauthorized("The admin key is not valid.")
        if not key.admin:
            raise forbidden(f"The key {key.name!r} may not use admin calls.")
        return Caller(key)

    def _is_admin(self, secret: str) -> bool:
        return bool(self._admin_key) and hmac.compare_digest(secret.encode(), self._admin_key.encode())

    def check_model(self, caller: Caller, name: str) -> None:
        """Raises :class:`ApiError` (403) when the caller's key does not reach the model."""
        if not self.catalog.may_use(caller.key, name):
            raise forbidden(f"The key {caller.name!r} may not use the model {name!r}.", "model")

    def limit_tokens(self, caller: Caller) -> int | None:
        """Most tokens that one request of ``caller`` may ever take; None: no limit."""
        return None if caller.key is None else caller.key.tokens_per_minute

    async def admit(self, caller: Caller, tokens: int) -> None:
        """Takes one request and ``tokens`` (prompt and the longest answer) from the key's limits. Raises
        :class:`ApiError` (429); nothing is taken then."""
        key = caller.key
        if key is None or (key.requests_per_minute is None and key.tokens_per_minute is None):
            return
        try:
            requests, used = await asyncio.gather(
                self._take(key, "requests", 1, key.requests_per_minute),
                self._take(key, "tokens", tokens, key.tokens_per_minute),
            )
        except StoreError as error:
            raise from_store(error) from error
        refused = None
        for what, verdict in (("requests", requests), ("tokens", used)):
            if verdict is not None:
                caller.headers |= _headers(what, verdict)
                if not verdict.allowed:
                    refused = rate_limited(what, verdict.limit, verdict.retry_after_s)
        if refused is not None:
            await self._give_back(key, requests, used, tokens)
            raise refused

    def settle(self, caller: Caller, unused_tokens: int) -> None:
        """Gives back, in the background, what the answer did not need."""
        key = caller.key
        if key is not None and key.tokens_per_minute is not None and unused_tokens > 0:
            task = asyncio.get_running_loop().create_task(self._return(key, unused_tokens))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _return(self, key: KeyConfig, tokens: int) -> None:
        with contextlib.suppress(StoreError):  # the bucket refills by itself
            await self._take(key, "tokens", -tokens, key.tokens_per_minute)

    async def _give_back(
        self, key: KeyConfig, requests: RateVerdict | None, used: RateVerdict | None, tokens: int
    ) -> None:
        if requests is not None and requests.allowed:
            await self._take(key, "requests", -1, key.requests_per_minute)
        if used is not None and used.allowed:
            await self._take(key, "tokens", -tokens, key.tokens_per_minute)

    async def _take(self, key: KeyConfig, what: str, amount: int, limit: int | None) -> RateVerdict | None:
        if limit is None:
            return None
        return await self._store.rate_take(f"{key.name}:{what}", amount, limit, time.time())


def _secret(headers: Headers) -> str:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _headers(what: str, verdict: RateVerdict) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(verdict.limit),
        f"x-ratelimit-remaining-{what}": str(verdict.remaining),
        f"x-ratelimit-reset-{what}": f"{verdict.reset_s:.3f}s",
    }
