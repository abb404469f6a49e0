"""Which ways beside TCP this machine has to move bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from prism.transfer.one_sided import OneSidedNetwork

RDMA_DEVICES: Final = Path("/sys/class/infiniband")
logger = logging.getLogger(__name__)


def find_networks(node: str, devices: Path = RDMA_DEVICES) -> list[OneSidedNetwork]:
    """NIXL where it is installed and there is a network it is faster on than TCP; else nothing."""
    if not devices.is_dir() or not any(devices.iterdir()):
        return []
    try:
        from prism.transfer.nixl_network import NixlNetwork

        return [NixlNetwork(node)]
    except ImportError:
        logger.info("windows go over TCP: there is an RDMA device, but NIXL is not installed")
        return []
