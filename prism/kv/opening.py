"""The pool and the keepers of a machine, as its settings say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from prism import memory
from prism.core.settings import LongPromptPlace
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.kv.lent_shelf import Lender, LentShelf, long_borrower_name
from prism.kv.long_store import LongTiers
from prism.kv.machine_memory import spare_memory
from prism.kv.pacing import LenderPace
from prism.kv.pool_directory import claim_host_pool
from prism.kv.settings import DeclaredLinks, KvSettings, read_kv_settings
from prism.policy.moving import lent_rate

log = logging.getLogger(__name__)

_FLOPS: Final = {"host": 2e10, "cuda": 2e14}
"""Arithmetic a device does in a second, roughly: only the first guess of the prefill rate rests on it."""
_PARAMETER_BYTES: Final = 2


def open_host_pool(account_dir: Path) -> HostPool | None:
    """The pool of the machine whose devices have their accounts there; None when its settings keep nothing, or its
    shared memory is full."""
    settings = read_kv_settings(account_dir)
    if settings.host_bytes <= 0:
        return None
    try:
        return HostPool(claim_host_pool(account_dir), settings.host_bytes, spare_memory())
    except OSError as error:
        log.warning("KV is not kept outside of engines: %s", error)
        return None


def open_keeper(
    account_dir: Path,
    device: str,
    borrower: str,
    weights: str,
    weight_bytes: int,
    borrows: bool = True,
    prefill_tokens_per_s: float = 0.0,
) -> KvKeeper | None:
    """The keeper of an engine on ``device`` (``host:0``) for these weights, as the machine's settings say; ``borrower``
    is its name with those who lend (:func:`~prism.kv.lent_shelf.borrower_name`), ``prefill_tokens_per_s`` what its
    model's profile says (0: a guess by the size of its weights). None when nothing is kept, or when it
    is not known whose the weights are."""
    pool = open_host_pool(account_dir)
    if pool is None or not weights:
        return None
    settings = read_kv_settings(account_dir)
    links = settings.links.get(device, DeclaredLinks())
    guess = prefill_tokens_per_s or _FLOPS[device.partition(":")[0]] / (2 * max(1, weight_bytes // _PARAMETER_BYTES))
    lends = borrows and settings.lend_keep_fraction is not None and 0 < links.host < links.peer
    lent = LentShelf(_lenders(account_dir, device, borrower, settings, links.host)) if lends else None
    return KvKeeper(pool, weights, guess, links.host, lent, settings.leave_s)


def open_long_tiers(
    account_dir: Path, device: str, worker: str, model: str, borrows: bool = True, ranks: int = 1
) -> LongTiers | None:
    """Where the long prompts of the engine ``worker``, one of ``ranks``, on ``device`` may have KV; None: nowhere, they
    are refused. Others' memory only if it ``borrows``."""
    settings, pool = read_kv_settings(account_dir), open_host_pool(account_dir)
    if pool is None or settings.long_prompts is LongPromptPlace.REFUSE:
        return None
    links = settings.links.get(device, DeclaredLinks())
    lends = borrows and settings.long_prompts is LongPromptPlace.LENT and settings.lend_keep_fraction is not None
    borrower = long_borrower_name(worker, model)
    shelf = LentShelf(_lenders(account_dir, device, borrower, settings)) if lends else None
    return LongTiers(pool, shelf, links.host, model, ranks)


def _lenders(
    account_dir: Path, device: str, borrower: str, settings: KvSettings, faster_than: float = -1.0
) -> list[Lender]:
    """The other devices of the machine of this kind that are reached at more than ``faster_than`` bytes/s."""
    peer = settings.links.get(device, DeclaredLinks()).peer
    kind = device.partition(":")[0]
    names = sorted(f.name.removesuffix(".account").replace("-", ":") for f in account_dir.glob(f"{kind}-*.account"))
    made = []
    for name in names:
        lent = settings.lend_rate_fraction * settings.links.get(name, DeclaredLinks()).memory
        rate = lent_rate(peer, lent)
        if name != device and rate > faster_than:
            pace = LenderPace(peer, lent, account_dir / f"{name.replace(':', '-')}.pace")
            made.append(Lender(memory.open_device(name, account_dir=account_dir), borrower, rate, pace))
    return made
