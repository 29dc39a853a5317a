from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = "[cluster]\nnodes = 1\n[run]\nchunk_tokens = 1024\n[documents]\nlength = 512\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without room")
@pytest.mark.parametrize("flag", [["--json"], []])
def test_standard_output_without_room_is_named(flag: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    call = [sys.executable, "-m", "steelyard.cli.main", "simulate", str(tmp_path / "c.toml"), *flag]
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert last.startswith("steelyard: error: standard output cannot be written: No space left")
    assert "Exception ignored" not in found.stderr
