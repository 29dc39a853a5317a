"""What may be imported without torch: planning, data, pictures and the command line answer on any machine at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steelyard

TORCH_FREE = [
    "domain", "observe", "cost", "planner", "data", "plots", "simulate", "settings", "errors", "library", "cli",
]  # fmt: skip
SOURCE = Path(steelyard.__file__).parent


def modules_of(part: str) -> list[str]:
    paths = sorted((SOURCE / part).rglob("*.py")) if (SOURCE / part).is_dir() else [SOURCE / f"{part}.py"]
    names = [".".join(p.relative_to(SOURCE.parent).with_suffix("").parts) for p in paths]
    return [name.removesuffix(".__init__") for name in names]


def imported_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("part", TORCH_FREE)
def test_part_does_not_import_torch(part: str) -> None:
    modules = modules_of(part)
    assert modules
    found = imported_after("\n".join(f"import {name}" for name in modules))
    assert "steelyard" in found
    assert not found & {"torch", "transformers"}


def test_the_package_itself_imports_only_the_standard_library() -> None:
    assert not imported_after("import steelyard") & {"torch", "numpy", "matplotlib", "rich", "tyro"}


def test_the_check_itself_sees_torch() -> None:
    assert "torch" in imported_after("import steelyard.runtime.dispatch")
