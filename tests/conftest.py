"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from steelyard.testing.pool import WorkerPool

settings.register_profile(
    "steelyard", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steelyard")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Workloads and validation tables that live beside the repository; absent elsewhere."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no shared data beside the repository ({path.name}/ is absent)")
    return path


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four gloo workers, started once for all tests that need several ranks."""
    with WorkerPool(4) as workers:
        yield workers
