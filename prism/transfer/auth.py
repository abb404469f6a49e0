"""Proving to each other that both ends know the fleet's secret, without sending it.

Each side picks a nonce; each proves itself with HMAC-SHA256 over both nonces and its own role, so that a proof can be
neither replayed on another connection nor sent back to its author.
"""

from __future__ import annotations

import hmac
import os
import socket
from typing import Final

from prism.transfer.errors import PeerError
from prism.transfer.frames import PROTOCOL_VERSION, Challenge, Declined, Greeting, Proof, Welcome, expect, send_frame

NONCE_BYTES: Final = 32
_LABEL: Final = b"prism-transfer-2"


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((_LABEL, role, client, server)), "sha256")


def prove_to_server(sock: socket.socket, secret: bytes, node: str) -> Welcome:
    """The puller's side. Raises :class:`PeerError` when the server does not know the secret or refuses ours."""
    mine = os.urandom(NONCE_BYTES)
    send_frame(sock, Greeting(node=node, nonce=mine, version=PROTOCOL_VERSION))
    challenge = expect(sock, Challenge)
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"server", mine, challenge.nonce)):
        raise PeerError("server", "does not know the fleet's secret")
    send_frame(sock, Proof(proof=_proof(secret, b"client", mine, challenge.nonce)))
    return expect(sock, Welcome)


def admit_client(sock: socket.socket, secret: bytes, node: str, networks: tuple[str, ...]) -> str:
    """The server's side; the client's node name. Raises :class:`PeerError` for a client without the secret,
    or of another version."""
    hello = expect(sock, Greeting)
    mine = os.urandom(NONCE_BYTES)
    send_frame(sock, Challenge(nonce=mine, proof=_proof(secret, b"server", hello.nonce, mine)))
    proof = expect(sock, Proof)
    if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(
        proof.proof, _proof(secret, b"client", hello.nonce, mine)
    ):
        send_frame(sock, Declined(reason="wrong secret"))
        raise PeerError(hello.node, "does not know the fleet's secret")
    if hello.version != PROTOCOL_VERSION:
        why = f"speaks version {hello.version} of the protocol, {node} speaks {PROTOCOL_VERSION}"
        send_frame(sock, Declined(reason=why))
        raise PeerError(hello.node, why)
    send_frame(sock, Welcome(node=node, networks=networks))
    return hello.node
