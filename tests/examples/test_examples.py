"""The examples run as their first lines say, and print what is saved beside them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = re.compile(r"-?\d+\.\d+")


def run(name: str, tmp_path: Path, ranks: int | None) -> list[str]:
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("01_trainer_two_ranks.py", 2), ("02_trl_packing.py", 2), ("03_own_loop.py", 2), ("04_read_a_plan.py", None)],
)
def test_example_prints_what_is_saved(name: str, ranks: int | None, tmp_path: Path) -> None:
    saved = (EXAMPLES / "output" / name).with_suffix(".txt").read_text().splitlines()
    # Frameworks print lines of their own; ours are compared, with their figures to three digits.
    first = saved[0].split(" ")[0]
    printed = run(name, tmp_path, ranks)
    printed = printed[next(i for i, line in enumerate(printed) if line.startswith(first)) :][: len(saved)]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in saved]
    figures, expected = ([float(n) for line in lines for n in NUMBER.findall(line)] for lines in (printed, saved))
    assert figures == pytest.approx(expected, abs=5e-3)


def test_every_example_has_saved_output() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts and scripts == {path.stem for path in (EXAMPLES / "output").glob("*.txt")}
