"""How the engines of one machine are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The settings of an :class:`prism.engine.pool.EnginePool`."""

    run_dir: Path
    """Sockets; keep its path short."""
    account_dir: Path
    """The devices' accounts."""
    store_dir: Path | None = None
    """The packed weights; None: every activation reads the model's files."""
    zygote_socket: Path | None = None
    """None: the pool runs a zygote of its own and ends it when it closes."""
    parked_per_device: int = 1
    """0: each activation starts its own worker."""
    max_per_device: int = 8
    """Most workers of a device, and so most instances on it."""
    start_timeout_s: float = 180.0
    threads: int = 1
    """Threads that compute on a virtual device."""
    parked_bytes: int = 0
    """What a worker without a model is granted of its device beside weights and KV (:mod:`prism.engine.outside`)."""
    active_bytes: int = 0
    """The same for one with a model; its torch is held to it."""
    kept_models: int = 2
    """Recently used models whose engine a worker keeps built."""
    load_helpers: int = 0
    """Most other devices over whose links a device loads (:mod:`prism.engine.load_helpers`)."""
    overlap: bool | None = None
    """Whether engines prepare a step while the device computes the one before; None: on GPUs."""
    log_dir: Path | None = None
    secret_file: Path | None = None
    """The fleet's secret, for front doors on other machines."""
