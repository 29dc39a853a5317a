"""The entry point: finds the command, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A command's module is imported only when it runs, so that
`steelyard --help` answers at once and a broken optional dependency breaks only the command that needs it.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import steelyard
from steelyard.cli.standard_output import writing_stdout
from steelyard.errors import SteelyardError, UsageError
from steelyard.settings import nearest


@dataclass(frozen=True)
class Command:
    """The words that call a command, the module whose `run(argv, debug=...) -> int` it is, and what it does."""

    words: tuple[str, ...]
    module: str
    summary: str
    usage: str = ""


COMMANDS = (
    Command(("demo",), "steelyard.cli.demo", "train a small model on this machine, packed against balanced"),
    Command(("train",), "steelyard.cli.train", "train on your documents", "CONFIG.toml [--KEY VALUE ...]"),
    Command(("check",), "steelyard.cli.check", "your model, the same numbers on any number of processes", "[MODEL]"),
    Command(("plan",), "steelyard.cli.plan", "what planning makes of a workload or of your documents", "WORKLOAD"),
    Command(("simulate",), "steelyard.cli.simulate", "time and memory of a step, before it runs", "CONFIG.toml"),
    Command(("advise",), "steelyard.cli.advise", "the best configurations for a model and a cluster", "CONFIG.toml"),
    Command(("validate",), "steelyard.cli.validate", "the simulator against published measurements"),
    Command(("calibrate",), "steelyard.cli.calibrate", "measure this machine for the simulator"),
    Command(("data", "stats"), "steelyard.cli.data_stats", "document lengths and the imbalance they cause", "PATH"),
    Command(("version",), "steelyard.cli.version", "versions of Steelyard and of what it runs on"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `steelyard` with the arguments (None: of this process) and return its exit code. Raises nothing."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name or a sign that it cannot show must not end a run
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    try:
        code = _dispatch(arguments, debug)
        with writing_stdout():
            sys.stdout.flush()
        return code
    except SystemExit as request:  # `--help` of a command ends this way
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    except KeyboardInterrupt:
        print("steelyard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _leave_closed_stdout()
        return 1
    except (SteelyardError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"steelyard: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code if isinstance(error, SteelyardError) else 1
    except Exception as error:
        traceback.print_exc()
        print(
            f"steelyard: error: {type(error).__name__} above is a fault of Steelyard's; please report it",
            file=sys.stderr,
        )
        return 1


def help_text() -> str:
    """What `steelyard --help` prints."""
    rows = [(" ".join((*c.words, c.usage)).strip(), c.summary) for c in COMMANDS]
    width = max(len(call) for call, _ in rows)
    return "\n".join(
        [
            "usage: steelyard COMMAND ...",
            "",
            "Long-context language-model training in which nobody waits.",
            "",
            "commands:",
            *(f"  {call:<{width}}  {summary}" for call, summary in rows),
            "",
            "options:",
            f"  {'-h, --help':<{width}}  show this text, or a command's own: steelyard COMMAND --help",
            f"  {'--version':<{width}}  print the version",
            f"  {'--debug':<{width}}  with an error, print where it came from (any command)",
            f"  {'--json':<{width}}  one JSON object on stdout, everything else on stderr (any command)",
            "",
            "exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted",
        ]
    )


def _dispatch(arguments: list[str], debug: bool) -> int:
    if not arguments:
        print(help_text(), file=sys.stderr)
        return 2
    groups = {c.words[0] for c in COMMANDS if len(c.words) > 1}
    if arguments[0] in ("-h", "--help", "help") or (arguments[0] in groups and arguments[1:] in (["-h"], ["--help"])):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(f"steelyard {steelyard.__version__}")
        return 0
    command = _find_command(arguments)
    run: Callable[..., int] = importlib.import_module(command.module).run
    return run(arguments[len(command.words) :], debug=debug)


def _find_command(arguments: Sequence[str]) -> Command:
    for command in COMMANDS:
        if tuple(arguments[: len(command.words)]) == command.words:
            return command
    first = arguments[0]
    if first.startswith("-"):
        raise UsageError(f"unknown option {first} before the command; write steelyard COMMAND {first}")
    second_words = [c.words[1] for c in COMMANDS if c.words[0] == first and len(c.words) > 1]
    if second_words:
        given = " ".join(arguments[:2]) if len(arguments) > 1 else first
        choices = " or ".join(f"steelyard {first} {word}" for word in second_words)
        raise UsageError(f"incomplete or unknown command {given!r}; expected {choices}")
    close = nearest(" ".join(arguments[:2]), [" ".join(c.words) for c in COMMANDS if len(c.words) == 2])
    close = close or nearest(first, [c.words[0] for c in COMMANDS])
    names = ", ".join(" ".join(c.words) for c in COMMANDS)
    raise UsageError(
        f"unknown command {first!r}; " + (f"did you mean {close!r}?" if close else f"expected one of {names}")
    )


def _replace_closed_streams() -> None:
    """Of a process started with stdout or stderr closed (`>&-`): nobody reads them, which is no reason to fail.

    Left as they are (None), what is printed to one would go to the other, or to a file that got its number.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _leave_closed_stdout() -> None:
    """The reader is gone (`steelyard ... | head`): let the flush at exit go nowhere instead of failing."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no real file, so there is nothing to save
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


if __name__ == "__main__":
    sys.exit(main())
