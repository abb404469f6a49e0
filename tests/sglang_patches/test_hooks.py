"""A changed SGLang is noticed at process start, by name; and every hook that is declared fits the installed one."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator

import pytest

from prism.engine import boot, cuda_stub
from sglang_patches import hooks
from sglang_patches.hooks import Hook, HookKind, PatchError


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module with something to hook."""
    made = types.ModuleType("prism_test_target")
    exec("class Thing:\n    def run(self, a, b): return a\n\ndef make(x): return x\n", made.__dict__)
    sys.modules["prism_test_target"] = made
    yield made
    del sys.modules["prism_test_target"]


def hook(target: str, *parameters: str) -> Hook:
    return Hook(target, HookKind.BEFORE, lambda *a: None, parameters, "a test")


def test_fitting_targets_pass(module: types.ModuleType) -> None:
    hooks.verify_targets([hook("prism_test_target.Thing.run", "self", "a", "b"), hook("prism_test_target.make", "x")])


def test_missing_and_changed_targets_are_all_named(module: types.ModuleType) -> None:
    with pytest.raises(PatchError) as caught:
        hooks.verify_targets(
            [
                hook("prism_test_target.Thing.gone", "self"),
                hook("prism_test_target.Thing.run", "self", "a"),
                hook("prism_test_nowhere.make", "x"),
            ]
        )
    message = str(caught.value)
    assert "Thing.gone" in message
    assert "prism_test_nowhere" in message
    assert "('self', 'a', 'b')" in message


def test_hooks_that_are_not_in_force_are_named(module: types.ModuleType) -> None:
    with pytest.raises(PatchError, match=r"Thing\.run"):
        hooks.verify_applied([hook("prism_test_target.Thing.run", "self", "a", "b")])


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "FITS", {"sglang": "0.0.1"})
    with pytest.raises(PatchError, match=r"0\.0\.1"):
        hooks.verify_versions()


@pytest.mark.engine
def test_every_declared_hook_fits_the_installed_sglang() -> None:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang_patches

        sglang_patches.check()
        declared = sglang_patches.all_hooks()
    targets = [h.target for h in declared]
    shared = {target.rpartition(".")[2] for target in targets if targets.count(target) > 1}
    both = {"run_batch", "process_batch_result", "abort_request", "is_fully_idle"}
    assert shared == both, "prompts larger than a device beside room and remote layers"
    assert all(h.kind is HookKind.AROUND for h in declared if targets.count(h.target) > 1), "each calls the other"
    assert all(h.why for h in sglang_patches.all_hooks())
