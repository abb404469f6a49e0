"""Devices for the memory tests: host memory, the CUDA code path on a fake driver, and on a GPU the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prism import memory
from tests.memory.drivers import CUDA, FAKE, HOST, Bed, FakeCuda, build_fake, why_no_gpu

MIB = 1 << 20


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcuda, compiled once."""
    return build_fake(tmp_path_factory.mktemp("fake-cuda"))


@pytest.fixture
def fake(fake_library: Path) -> Iterator[FakeCuda]:
    """The fake driver's controls, reset; fails the test if a rule of the driver was broken."""
    controls = FakeCuda(fake_library)
    controls.reset()
    yield controls
    controls.reset_injection()
    assert controls.violations() == 0, controls.last_broken_rule()


@pytest.fixture(params=[HOST, FAKE, pytest.param(CUDA, marks=pytest.mark.gpu)])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Bed:
    """A device of 64 pages with its driver, whatever that is."""
    library = request.getfixturevalue("fake_library") if request.param == FAKE else None
    if request.param == FAKE:
        request.getfixturevalue("fake")
    if request.param == CUDA and (reason := why_no_gpu()):
        pytest.skip(reason)
    return Bed.open(request.param, tmp_path, library)


@pytest.fixture
def device(tmp_path: Path) -> memory.Device:
    """A host device of 1 MiB in pages of 4 KiB: cheap to fill, so tests of the books can be many."""
    return memory.open_device("host:0", MIB, account_dir=tmp_path, page_bytes=4096)
