"""One process, one model after the other: what of SGLang may be constructed again, and what must be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind


class NoWatchdog:
    """In place of SGLang's watchdog thread, which would keep the scheduler of a deactivated model alive. The node agent
    watches its engines itself."""

    def feed(self) -> None:
        """SGLang's heartbeat; nobody listens."""


def no_watchdog(*_: Any, **__: Any) -> NoWatchdog:
    """Replaces ``create_scheduler_watchdog``."""
    return NoWatchdog()


def keep_groups(original: Callable[..., Any], **kwargs: Any) -> None:
    """Around ``_init_parallel_groups``: communicators are made once per process."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    if not parallel_state.model_parallel_is_initialized():
        original(**kwargs)
        return
    initialize_dp_attention(server_args=kwargs["server_args"], model_config=kwargs["model_config"])


_GROUP_PARAMETERS = (
    "backend",
    "dist_init_method",
    "server_args",
    "model_config",
    "gpu_id",
    "tp_rank",
    "tp_size",
    "pp_rank",
    "pp_size",
    "attn_dp_size",
    "attn_cp_size",
    "moe_ep_size",
    "moe_dp_size",
    "dcp_size",
)
HOOKS = (
    Hook(
        "sglang.srt.distributed.bootstrap._init_parallel_groups",
        HookKind.AROUND,
        keep_groups,
        _GROUP_PARAMETERS,
        "process groups outlive a model",
    ),
    Hook(
        "sglang.srt.managers.scheduler.create_scheduler_watchdog",
        HookKind.REPLACE,
        no_watchdog,
        ("scheduler", "watchdog_timeout", "soft"),
        "its thread pins the old scheduler",
    ),
)
