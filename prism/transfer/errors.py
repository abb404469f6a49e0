"""What can go wrong between machines. Messages name the peer or the window, and what it did."""

from __future__ import annotations

from prism.core.errors import PrismError


class TransferError(PrismError):
    """Base of all errors about moving bytes between machines."""


class PeerError(TransferError):
    """Another machine answered with something that is not the protocol, or refused."""

    def __init__(self, peer: str, why: str) -> None:
        self.peer, self.why = peer, why
        super().__init__(f"{peer}: {why}")


class SourceLost(TransferError):
    """Bytes that were on their way stopped coming: the process that filled shared memory is gone and nobody could take
    over, or every node that holds them is unreachable."""
