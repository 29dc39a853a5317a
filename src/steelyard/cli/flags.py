"""Command-line flags over frozen dataclasses: tyro parses and writes the help; its error boxes become our one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro

from steelyard.errors import UsageError
from steelyard.settings import has_range, nearest, terminal_columns

FlagsT = TypeVar("FlagsT")

Flatten = tyro.conf.arg(name="")
"""Metadata of a dataclass field whose own fields become flags without its name before them."""

Switch: TypeAlias = tyro.conf.FlagCreatePairsOff[bool]
"""A flag that is off unless given, without a `--no-` twin."""

_SWITCH = typing.get_args(Switch)[1]
_POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]


def parse_flags(
    cls: type[FlagsT], argv: Sequence[str], *, prog: str, description: str, default: FlagsT | None = None
) -> FlagsT:
    """Fill `cls` from the arguments of a command.

    Args:
        default: values of the flags that are not given; needed where a field has no default and is no flag of one
            value (a tuple of dataclasses).

    Raises:
        UsageError: a flag is unknown, missing or of the wrong type; names the nearest flag that exists.
        SystemExit: with code 0, after `--help`.
    """
    given: dict[str, Any] = {"prog": prog, "description": description, "config": (tyro.conf.AvoidSubcommands,)}
    if default is not None:
        given["default"] = default
    cli: Callable[..., FlagsT] = tyro.cli  # its overloads cannot say "with a default or without"
    if any(a in ("-h", "--help") for a in argv):
        cli(cls, args=["--help"], **given)
    _refuse_unknown(argv, sorted(flag_names(cls, default)), prog)
    errors = io.StringIO()
    try:
        # Wide, so that no line of tyro's box is broken; a path must come out of it in one piece.
        with terminal_columns(100_000), contextlib.redirect_stderr(errors):
            flags = cli(cls, args=list(argv), **given)
    except SystemExit as request:
        raise UsageError(f"{_message_of(errors.getvalue())}; see {prog} --help") from request
    for name, value in _values(flags):
        if not has_range(value):
            expected = "a finite number" if isinstance(value, float) else "a whole number of at most 64 bits"
            raise UsageError(f"--{name} {value}: expected {expected}; see {prog} --help")
    return flags


def _values(flags: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of filled flags, with its flag's name."""
    if dataclasses.is_dataclass(flags):
        hints = typing.get_type_hints(type(flags), include_extras=True)
        for f in dataclasses.fields(flags):
            name = "" if Flatten in getattr(hints[f.name], "__metadata__", ()) else f.name.replace("_", "-")
            yield from _values(getattr(flags, f.name), f"{prefix}.{name}".strip("."))
    elif isinstance(flags, (tuple, list)):
        for i, item in enumerate(flags):
            yield from _values(item, f"{prefix}.{i}" if dataclasses.is_dataclass(item) else prefix)
    else:
        yield prefix, flags


def flag_names(cls: Any, default: Any = None, prefix: str = "") -> Iterator[str]:
    """Every flag that `cls` has, as `--optimizer.learning-rate`; of a tuple of dataclasses those of its default."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(cls):
        hint, metadata = hints[f.name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *rest = typing.get_args(hint)
            metadata = tuple(rest)
        value = getattr(default, f.name, None)
        name = "" if Flatten in metadata else f.name.replace("_", "-")
        dotted = f"{prefix}.{name}".strip(".")
        if dataclasses.is_dataclass(hint) or dataclasses.is_dataclass(value):
            yield from flag_names(hint if dataclasses.is_dataclass(hint) else type(value), value, dotted)
        elif isinstance(value, (tuple, list)) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                yield from flag_names(type(item), item, f"{dotted}.{i}")
        elif _POSITIONAL not in metadata:
            yield f"--{dotted}"
            if hint is bool and _SWITCH not in metadata:
                head, _, last = dotted.rpartition(".")
                yield f"--{head}.no-{last}" if head else f"--no-{last}"


def check_picture(path: Path | None, flag: str = "--plot") -> None:
    """Refuse a picture that cannot be written, before anything is computed for it.

    Raises:
        UsageError: another ending than a picture's, a folder, one in a folder that does not exist, or a place where
            nothing can be written.
    """
    if path is not None and path.suffix not in PICTURES:
        raise UsageError(f"{flag} {path}: expected a file that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if path is not None and path.is_dir():
        raise UsageError(f"{flag} {path}: this is a folder; expected a file")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")
    if path is not None:
        check_writable(path, flag)


def check_folder(path: Path | None, flag: str = "--plot") -> None:
    """The same for a folder, which need not exist yet; nothing is made.

    Raises:
        UsageError: it is a file or would lie below one, or nothing can be written there.
    """
    if path is None:
        return
    existing = path
    while not os.path.exists(existing) and existing != existing.parent:  # noqa: PTH110 - Path.exists may raise
        existing = existing.parent
    if not os.path.isdir(existing):  # noqa: PTH112
        what = "it is a file" if existing == path else f"{existing} is a file"
        raise UsageError(f"{flag} {path}: {what}; expected a folder for pictures and report")
    check_writable(existing / "report.html", flag)


def check_writable(path: Path, flag: str) -> None:
    """Refuse a file that cannot be written, by trying: rights alone do not tell (read-only disks, /proc, root).

    Raises:
        UsageError: with what the system says about it.
    """
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        what = f"{path} cannot be written" if os.path.exists(path) else f"no file can be made in {path.parent}"  # noqa: PTH110
        raise UsageError(f"{flag}: {what} ({error.strerror}); expected a place that can be written") from error


PICTURES = (".png", ".svg", ".pdf")


def _refuse_unknown(argv: Sequence[str], known: Sequence[str], prog: str) -> None:
    """Unknown flags are found before tyro sees them: it would first complain of what they leave missing."""
    for argument in argv:
        if argument == "--":
            return
        flag = argument.partition("=")[0].replace("_", "-")
        if argument.startswith("--") and flag not in known:
            close = nearest(flag, known) or next((k for k in known if k.rpartition(".")[2] == flag.strip("-")), None)
            raise UsageError(f"unknown flag {flag}; " + (f"did you mean {close}?" if close else f"see {prog} --help"))


def _message_of(box: str) -> str:
    """The text of a tyro error box between its title and its first rule, in one line."""
    blocks: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if re.fullmatch(r"[─-]{3,}", text):
            blocks.append([])
        elif not text.startswith(("╭", "╰")):
            blocks[-1].extend(text.split())
    # Where stdout is not UTF-8 the box has no frame, and its title is a block of its own.
    words = blocks[0] if "╭" in box or len(blocks) == 1 else blocks[1]
    message = " ".join(words).removesuffix(".").removesuffix(" (required)").removesuffix(".")
    message = message or "the flags could not be read"
    for pattern, replacement in _PLAINER:
        message = re.sub(pattern, replacement, message)
    return message


_NEITHER = r"no type matching \S+ could be instantiated from \[('.*?')\]\..*"
_PLAINER = (
    (r"^Missing from [^:]*: (--\S+ \S+|[^-\s]\S*) ", r"missing \1: "),  # and what it is
    (r"^Missing from [^:]*: ", "missing "),
    (r"^Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 \2: expected a whole number"),
    (r"^Error parsing (\S+): could not convert string to float: (.*)", r"\1 \2: expected a number"),
    (r"^Error parsing [a-z_][\w.]*: ", ""),  # a dataclass refused its values, and says itself which
    (rf"^Error parsing (\S+): {_NEITHER}invalid literal for int\(\).*", r"\1 \2: expected a whole number"),
    (rf"^Error parsing (\S+): {_NEITHER}could not convert string to float.*", r"\1 \2: expected a number"),
    (r"^Error parsing (\S+): ", r"\1: "),
    (r"^Missing value for argument '(\S+)'\. Expected 1 values?", r"\1 has no value"),
    (r"^Unrecognized options: ", "unknown argument "),
)
"""tyro's and Python's words for what went wrong, and ours."""
