from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import steelyard
from steelyard.cli.main import COMMANDS, main
from steelyard.errors import DataError, UsageError

Outcome = Callable[[], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome], None]:
    """Makes `steelyard version` do something else."""

    def replace(outcome: Outcome) -> None:
        real_import = importlib.import_module

        def import_module(name: str) -> object:
            if name == "steelyard.cli.version":
                return SimpleNamespace(run=lambda argv, *, debug: outcome())
            return real_import(name)

        monkeypatch.setattr(importlib, "import_module", import_module)

    return replace


def raises(error: BaseException) -> Outcome:
    def outcome() -> int:
        raise error

    return outcome


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for each in COMMANDS:
        assert " ".join(each.words) in out
    assert main(["data", "--help"]) == 0
    assert capsys.readouterr().out == out


def test_nothing_is_wrong_usage_with_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: steelyard" in captured.err


def test_version_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"steelyard {steelyard.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["vresion"], "unknown command 'vresion'; did you mean 'version'?"),
        (["stats"], "unknown command 'stats'; did you mean 'data stats'?"),
        (["qqqq"], f"unknown command 'qqqq'; expected one of {', '.join(' '.join(c.words) for c in COMMANDS)}"),
        (["data"], "incomplete or unknown command 'data'; expected steelyard data stats"),
        (["data", "stat"], "incomplete or unknown command 'data stat'; expected steelyard data stats"),
        (["--frob"], "unknown option --frob before the command; write steelyard COMMAND --frob"),
        (["version", "--jsn"], "unknown flag --jsn; did you mean --json?"),
        (["version", "extra"], "unknown argument extra; see steelyard version --help"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err == f"steelyard: error: {message}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("too few\nranks"), 2, "steelyard: error: too few ranks"),
        (DataError("bad file"), 1, "steelyard: error: bad file"),
        (OSError(28, "No space left on device", "x.bin"), 1,
         "steelyard: error: [Errno 28] No space left on device: 'x.bin'"),
        (KeyboardInterrupt(), 130, "steelyard: interrupted"),
    ],
)  # fmt: skip
def test_failures_are_one_line(
    command: Callable[[Outcome], None],
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raises(error))
    assert main(["version"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_debug_adds_the_traceback(command: Callable[[Outcome], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raises(UsageError("wrong")))
    assert main(["version", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("steelyard: error: wrong\n")


def test_a_fault_of_ours_keeps_its_traceback(
    command: Callable[[Outcome], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raises(ZeroDivisionError("x")))
    assert main(["version"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("ZeroDivisionError above is a fault of Steelyard's; please report it\n")


def test_exit_code_of_the_command_is_returned(command: Callable[[Outcome], None]) -> None:
    command(lambda: 1)
    assert main(["version"]) == 1


ENVIRONMENT = {
    **os.environ,
    "PYTHONUNBUFFERED": "",
    "PYTHONPATH": str(Path(steelyard.__file__).parents[1]),
    "COLUMNS": "100",
}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from steelyard.cli.main import main; code = main(['--help']); "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'tyro', 'rich', 'matplotlib'}), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_output_survives_a_stream_that_cannot_show_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    done = subprocess.run(
        [sys.executable, "-m", "steelyard", "data", "stats", str(tmp_path)],
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"########" in done.stdout


def test_closed_streams_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `>&-` leaves them. With the second one closed, what is printed to it must not come out of the first."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["wrong"]) == 2
    assert written.getvalue() == ""


@pytest.mark.parametrize("argv", [["version"], ["--help"]])  # printed by rich, printed by us
def test_a_closed_pipe_is_quiet(argv: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "steelyard", *argv],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()
