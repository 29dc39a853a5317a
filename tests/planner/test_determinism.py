"""Promise 5: the same lengths give the same plan on every rank, in every run, on every platform.

Two runs in one process share nearly everything that could make them differ. So plans are held against digests that were
written on another day, and made again in processes whose hashes of strings and threads of numpy differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import golden_plans
import pytest

import steelyard

RENEW = "if a policy was changed on purpose, run `python tests/planner/golden_plans.py --renew`"


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    digests: dict[str, str] = json.loads(golden_plans.DIGESTS.read_text(encoding="utf-8"))
    return digests


def test_plans_and_layouts_are_those_of_the_digests(expected: dict[str, str]) -> None:
    found = golden_plans.digests()
    assert len(set(found.values())) == len(found), "two cases give the same plan"
    assert found == expected, RENEW


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_plans_are_the_same_in_other_processes(expected: dict[str, str], seed: str) -> None:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "OMP_NUM_THREADS": "1" if seed == "0" else "2",
        "PYTHONPATH": str(Path(steelyard.__file__).parents[1]),
    }
    command = [sys.executable, str(Path(golden_plans.__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected, RENEW


def test_a_plan_depends_on_nothing_planned_before() -> None:
    """In another order, and a second time: caches would show."""
    cases = golden_plans.plans()
    forth = {name: golden_plans.digest(make().tasks) for name, make in cases.items()}
    back = {name: golden_plans.digest(cases[name]().tasks) for name in reversed(cases)}
    assert forth == back
