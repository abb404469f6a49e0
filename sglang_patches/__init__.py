"""Prism's plugin for SGLang (entry point group ``sglang.srt.plugins``): one module per subsystem that is hooked.

Outside Prism's own processes (``PRISM_ENGINE=1``) the plugin does nothing, so that SGLang started from the same
environment is stock SGLang.
"""

from __future__ import annotations

import os

from sglang_patches.hooks import Hook


def all_hooks() -> tuple[Hook, ...]:
    """Every hook, by subsystem. Importing them imports SGLang."""
    from sglang_patches import (
        channels,
        gpus,
        grammar,
        graphs,
        kv_allocator,
        kv_guard,
        kv_mla,
        kv_move,
        kv_placement,
        kv_pool,
        kv_states,
        kv_window,
        long_steps,
        lora,
        olmo3,
        pooling,
        quantised,
        remote_steps,
        remote_under_way,
        reuse,
        room,
        sampling,
        scheduling,
        spec_branches,
        spec_draft,
        spec_host,
        spec_memory,
        spec_sampling,
        streams,
        weights,
        windows,
    )

    modules = (
        channels,
        kv_guard,
        kv_pool,
        kv_mla,
        kv_window,
        windows,
        kv_states,
        kv_allocator,
        kv_placement,
        kv_move,
        scheduling,
        pooling,
        quantised,
        sampling,
        grammar,
        reuse,
        room,
        streams,
        weights,
        graphs,
        gpus,
        lora,
        olmo3,
        spec_host,
        spec_branches,
        spec_draft,
        spec_memory,
        spec_sampling,
        remote_steps,
        remote_under_way,
        long_steps,
    )
    return tuple(hook for module in modules for hook in module.HOOKS)


def check() -> None:
    """Before loading: raises :class:`PatchError` unless the installed SGLang is the one the hooks were written for."""
    from sglang_patches.hooks import verify_targets, verify_versions

    verify_versions()
    verify_targets(all_hooks())


def install() -> None:
    """The entry point: hands the hooks to SGLang, which applies them."""
    from sglang_patches.hooks import register

    if os.environ.get("PRISM_ENGINE") == "1":
        register(all_hooks())


def check_applied() -> None:
    """Raises :class:`PatchError` naming each hook that is not in force. Call after SGLang's ``load_plugins``."""
    from sglang_patches.hooks import verify_applied

    verify_applied(all_hooks())
