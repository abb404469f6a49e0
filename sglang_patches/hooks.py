"""How a patch is declared, applied through SGLang's plugin framework, and checked.

SGLang logs and swallows what goes wrong in a plugin, so the checks here are made before anything is registered
(:func:`verify_targets`) and after everything was applied (:func:`verify_applied`), and raise :class:`PatchError`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from prism.core.errors import PrismError
from sglang_patches.stale_bindings import StaleBindings

FITS: Final = {"sglang": "0.5.16"}
"""Exact versions the patches were written against and tested with."""


class HookKind(StrEnum):
    """As SGLang's ``HookType``."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class PatchError(PrismError):
    """SGLang is not what the patches were written for: a version, target or signature differs, or a hook is missing."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One patched place of SGLang.

    ``parameters`` are the names the target's signature must have, in order (a class: those of its ``__init__``).
    """

    target: str
    kind: HookKind
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    why: str


def verify_versions() -> None:
    """Raises :class:`PatchError` when an installed version is not the pinned one."""
    for package, wanted in FITS.items():
        found = importlib.metadata.version(package)
        if found != wanted:
            raise PatchError(f"{package} {found} is installed; Prism's patches fit {wanted}. Run `make install`.")


def verify_targets(hooks: Sequence[Hook]) -> None:
    """Raises :class:`PatchError` naming every target that is missing or whose signature changed."""
    problems = []
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{hook.target}: missing ({error})")
            continue
        callee = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
        found = tuple(inspect.signature(callee).parameters)
        if found != hook.parameters:
            problems.append(f"{hook.target}: takes {found}, the patch was written for {hook.parameters}")
    if problems:
        raise PatchError("SGLang differs from what Prism patches:\n  " + "\n  ".join(problems))


def register(hooks: Sequence[Hook]) -> None:
    """Hand the hooks to SGLang's registry; SGLang applies them at the end of ``load_plugins``."""
    from sglang.srt.plugins import hook_registry

    for hook in hooks:
        hook_registry.HookRegistry.register(hook.target, hook.function, hook_registry.HookType(hook.kind.value))
    originals = [pkgutil.resolve_name(hook.target) for hook in hooks]
    hook_registry._propagate_patch = StaleBindings(originals, hook_registry._propagate_patch)


def verify_applied(hooks: Sequence[Hook]) -> None:
    """Raises :class:`PatchError` naming every hook that is not in force."""
    problems = []
    for hook in hooks:
        target = pkgutil.resolve_name(hook.target)
        applied = target is hook.function if isinstance(hook.function, type) else hasattr(target, "__wrapped__")
        if not applied:
            problems.append(f"{hook.target} ({hook.kind}: {hook.why})")
    if problems:
        raise PatchError("hooks were not applied to SGLang:\n  " + "\n  ".join(problems))
