"""Elastic device memory shared by many engines: the Python face of ``csrc/kvcached``. See ``docs/memory.md``."""

from prism.memory._kvcached import Fence, Pool, make_huge, stream_copy
from prism.memory.arena import Arena
from prism.memory.device import Device, default_account_dir, open_device
from prism.memory.groups import GroupKind, KvGroup
from prism.memory.layout import KvLayout, state_layout
from prism.memory.outside import MemoryWatch, NvmlMeter
from prism.memory.owner import Owner
from prism.memory.region import ImportedRegion, WeightRegion
from prism.memory.stats import Audit, DeviceStats, OwnerStats
from prism.memory.table3 import alloc_kv, alloc_kvcache, free_kv, free_kvcache
from prism.memory.tensors import cupy_views, numpy_views, row_views, torch_views

__all__ = [
    "Arena",
    "Audit",
    "Device",
    "DeviceStats",
    "Fence",
    "GroupKind",
    "ImportedRegion",
    "KvGroup",
    "KvLayout",
    "MemoryWatch",
    "NvmlMeter",
    "Owner",
    "OwnerStats",
    "Pool",
    "WeightRegion",
    "alloc_kv",
    "alloc_kvcache",
    "cupy_views",
    "default_account_dir",
    "free_kv",
    "free_kvcache",
    "make_huge",
    "numpy_views",
    "open_device",
    "row_views",
    "state_layout",
    "stream_copy",
    "torch_views",
]
