"""Settings shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from steelyard.testing.pool import WorkerPool

settings.register_profile(
    "steelyard", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steelyard")

TESTS = Path(__file__).resolve().parent
ON_THE_POOL = (
    "tests/balance/", "tests/check/", "tests/cli/test_check.py", "tests/integrations/", "tests/multiprocess/",
)  # fmt: skip
BY_THEMSELVES = "tests/integrations/test_transformers_frameworks.py"
"""Folders and files whose tests run on the pool's workers; and a long one among them that starts its own processes."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in two processes (`pytest -n 2`), say which stay together, whatever `--dist` says.

    What runs on the pool stays in one of them, so that there is one pool; everything else goes by file, whose fixtures
    are then made once. Both halves take about as long. (`--dist loadgroup` would need a mark on every test, and
    pytest-xdist 3.8 loses the marks under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByPool(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "the pool" if file.startswith(ON_THE_POOL) and file != BY_THEMSELVES else file

    return ByPool(config, log)


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """A hang-up is a signal here and in processes started now, also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Workloads and validation tables that live beside the repository; absent elsewhere."""
    path = TESTS.parents[1] / "shared"
    if not path.is_dir():
        pytest.skip(f"no shared data beside the repository ({path.name}/ is absent)")
    return path


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four gloo workers, started once for all tests that need several ranks."""
    with WorkerPool(4) as workers:
        yield workers
