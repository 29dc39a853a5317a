"""Renews the example of docs/plan.md: `python docs/generate_plan.py` runs the page's command on the page's workload."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from steelyard.cli.main import main

TARGET = Path(__file__).parent / "plan.md"
PICTURE = TARGET.parent / "images/plan.png"
COMMAND = "python docs/generate_plan.py"
MARKED = re.compile(r"(<!-- plan-output:begin -->\n).*?(<!-- plan-output:end -->)", re.DOTALL)


def output_of(page: str, picture: Path | None = None) -> str:
    """What the first `steelyard plan workload.json` of the page prints for the first JSON block of the page."""
    workload = re.search(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command = re.search(r"^steelyard (plan workload\.json .*)$", page, re.MULTILINE)
    assert workload is not None and command is not None
    arguments = shlex.split(command[1])
    place = arguments.index("--plot")
    arguments[place : place + 2] = ["--plot", str(picture)] if picture is not None else []
    printed, before = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "workload.json").write_text(workload[1], encoding="utf-8")
        os.environ.update({"COLUMNS": "88", "NO_COLOR": "1"})
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(printed):
                code = main(arguments)
        finally:
            os.chdir(before)
    assert code == 0, printed.getvalue()
    lines = [line.rstrip() for line in printed.getvalue().splitlines() if not line.startswith("wrote ")]
    return "\n".join(lines).strip()


def renew() -> None:
    page = TARGET.read_text(encoding="utf-8")
    shown = output_of(page, PICTURE.resolve())
    TARGET.write_text(MARKED.sub(lambda found: f"{found[1]}```text\n{shown}\n```\n{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    renew()
