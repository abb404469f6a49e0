"""The pool and the keepers of a machine, as its settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prism import memory
from prism.core.settings import LongPromptPlace
from prism.kv.host_pool import HostPool, claim_host_pool
from prism.kv.keeper import KvKeeper
from prism.kv.lent_shelf import Lender, LentShelf
from prism.kv.long_store import LongTiers
from prism.kv.settings import DeclaredLinks, read_kv_settings

_FLOPS: Final = {"host": 2e10, "cuda": 2e14}
"""Arithmetic a device does in a second, roughly: only the first guess of the prefill rate rests on it."""
_PARAMETER_BYTES: Final = 2


def open_host_pool(account_dir: Path) -> HostPool | None:
    """The pool of the machine whose devices have their accounts there; None when its settings keep nothing."""
    settings = read_kv_settings(account_dir)
    return HostPool(claim_host_pool(account_dir), settings.host_bytes) if settings.host_bytes > 0 else None


def open_keeper(
    account_dir: Path, device: str, borrower: str, weights: str, weight_bytes: int, borrows: bool = True
) -> KvKeeper | None:
    """The keeper of an engine on ``device`` (``host:0``) for these weights, as the machine's settings say; ``borrower``
    is its name with those who lend (:func:`~prism.kv.lent_shelf.borrower_name`). None when nothing is kept, or when it
    is not known whose the weights are."""
    pool = open_host_pool(account_dir)
    if pool is None or not weights:
        return None
    settings = read_kv_settings(account_dir)
    links = settings.links.get(device, DeclaredLinks())
    guess = _FLOPS[device.partition(":")[0]] / (2 * max(1, weight_bytes // _PARAMETER_BYTES))
    lends = borrows and settings.lend_keep_fraction is not None and 0 < links.host < links.peer
    lent = LentShelf(_lenders(account_dir, device, borrower, links.peer)) if lends else None
    return KvKeeper(pool, weights, guess, links.host, lent)


def open_long_tiers(account_dir: Path, device: str, borrower: str, borrows: bool = True) -> LongTiers | None:
    """Where the long prompts of an engine on ``device`` may have KV; None: nowhere, they are refused. ``borrower`` is
    what lenders know it by, if it ``borrows``."""
    settings, pool = read_kv_settings(account_dir), open_host_pool(account_dir)
    if pool is None or settings.long_prompts is LongPromptPlace.REFUSE:
        return None
    links = settings.links.get(device, DeclaredLinks())
    lends = borrows and settings.long_prompts is LongPromptPlace.LENT and settings.lend_keep_fraction is not None
    shelf = LentShelf(_lenders(account_dir, device, borrower, links.peer)) if lends else None
    return LongTiers(pool, shelf, links.host)


def _lenders(account_dir: Path, device: str, borrower: str, bytes_per_s: float) -> list[Lender]:
    """The other devices of the machine of this kind."""
    kind = device.partition(":")[0]
    names = sorted(f.name.removesuffix(".account").replace("-", ":") for f in account_dir.glob(f"{kind}-*.account"))
    others = [memory.open_device(name, account_dir=account_dir) for name in names if name != device]
    return [Lender(other, borrower, bytes_per_s) for other in others]
