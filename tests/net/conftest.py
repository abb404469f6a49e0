"""Tests here need network namespaces (root, iproute2) and are skipped, with the reason, where there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.net.cluster import Cluster
from tests.net.netns import Hosts, why_not


@pytest.fixture(scope="session")
def namespaces() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def cluster(namespaces: None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Eight hosts on 400 Mbit/s links; a test's ``hosts`` marker argument changes that."""
    options = getattr(request, "param", {})
    with Hosts(**{"count": 8, "mbit": 400.0, **options}) as hosts, Cluster(hosts) as running:
        yield running
