"""The fleet's secret: one text that every machine of a fleet holds, and everything that is derived from it.

Each use gets its own key (HMAC-SHA256 of a label), so that what one of them gives away says nothing about the others:
the key pairs of mailboxes between machines (CURVE), the password of the embedded store, the key with which weight
servers prove themselves, and a check value by which a machine notices that it was given another fleet's secret.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from prism.core.errors import InvalidValue

ENVIRONMENT: Final = "PRISM_FLEET_SECRET"
LEAST_CHARACTERS: Final = 20
_LABEL: Final = b"prism-fleet-1|"


@dataclass(frozen=True, slots=True)
class MailKeys:
    """Z85 key pairs of all mailboxes of one fleet: ``inbox`` is what an inbox is, ``sender`` what writes to it."""

    inbox_public: bytes
    inbox_secret: bytes = field(repr=False)
    sender_public: bytes
    sender_secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FleetSecret:
    """Made by :func:`read_secret` or :func:`make_secret`; raises :class:`InvalidValue` for one that is too short."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.text) < LEAST_CHARACTERS:
            why = f"is too short, a secret has at least {LEAST_CHARACTERS} characters"
            raise InvalidValue("fleet secret", f"{len(self.text)} characters", why)

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self.text.encode(), _LABEL + purpose, "sha256")

    @property
    def store_password(self) -> str:
        return self._derived(b"store").hex()

    @property
    def weights(self) -> bytes:
        return self._derived(b"weights")

    def mail_keys(self) -> MailKeys:
        import zmq  # not needed by those who only look at the store
        from zmq.utils import z85

        inbox, sender = (z85.encode(self._derived(role)) for role in (b"inbox", b"sender"))
        return MailKeys(zmq.curve_public(inbox), inbox, zmq.curve_public(sender), sender)

    def check_value(self) -> str:
        """A value that only this secret gives and that does not give the secret away; it may stand in the store."""
        return base64.urlsafe_b64encode(self._derived(b"check")).decode()


def read_secret(file: Path | None) -> FleetSecret:
    """The secret in ``file``, else in the environment variable :data:`ENVIRONMENT`. Raises :class:`InvalidValue`."""
    if file is not None:
        try:
            return FleetSecret(file.read_text("utf-8").strip())
        except OSError as error:
            raise InvalidValue("secret-file", str(file), f"cannot be read: {error.strerror or error}") from error
    if text := os.environ.get(ENVIRONMENT, "").strip():
        return FleetSecret(text)
    raise InvalidValue("fleet secret", "", "is missing", ("--secret-file FILE", f"{ENVIRONMENT}=..."))


def make_secret(file: Path, text: str = "") -> FleetSecret:
    """The secret in ``file``, written there on first use (``text``, else a random one), readable by its owner only."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_secret(file)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write((text or secrets.token_urlsafe(32)) + "\n")
    return read_secret(file)


def with_password(url: str, secret: FleetSecret) -> str:
    """``url`` of a fleet's store; one over the network that names no password gets the derived one, which is what the
    embedded server asks for."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.password is not None:
        return url
    user = quote(parts.username or "", safe="")
    return urlunsplit(parts._replace(netloc=f"{user}:{secret.store_password}@{parts.netloc.rpartition('@')[2]}"))


def without_password(url: str) -> str:
    """``url`` as it may be shown."""
    parts = urlsplit(url)
    if "@" not in parts.netloc and "password=" not in parts.query:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
