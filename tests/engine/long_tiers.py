"""What long prompts have outside of their device, in tests with host memory alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prism.core.settings import LongPromptPlace
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import KvSettings, write_kv_settings

BOUND: Final = 64 << 20
PAGES: Final = 6
"""Of KV that the device gives: 192 tokens of the wide model."""


@contextmanager
def host_tiers(accounts: Path) -> Iterator[HostPool]:
    """Engines that begin from now on serve such prompts."""
    write_kv_settings(accounts, KvSettings(host_bytes=BOUND, long_prompts=LongPromptPlace.HOST))
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


def claimed(tiers: HostPool) -> int:
    """Bytes that are not pieces kept for anybody."""
    use = tiers.use()
    return use.booked_bytes - use.file_bytes
