"""Everything that comes from outside a call: the process's environment and TOML configuration files.

This is the only module that reads environment variables. A configuration is a frozen dataclass whose fields are
numbers, text, paths, choices, tuples and further dataclasses; `load_toml` fills one from a file and says in one line
what is wrong with it, and `config_reference_markdown` writes its documentation from the same source: the string
literal below each field.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import os
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from steelyard.errors import UsageError

ConfigT = TypeVar("ConfigT")
Keys: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a file: ("data", "sources", 0, "path")."""


@dataclass(frozen=True)
class ProcessSettings:
    """What the environment says about this process. Names in capitals are the variables.

    Attributes:
        rank, world_size, local_rank, local_world_size: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as `torchrun`
            sets them; a process that runs alone is rank 0 of 1.
        master_addr, master_port: MASTER_ADDR, MASTER_PORT: where the ranks meet, or None.
        launched: whether RANK and WORLD_SIZE are set, i.e. somebody has already started the ranks.
        restart_count: TORCHELASTIC_RESTART_COUNT: how often `torchrun` has restarted the ranks.
        threads: OMP_NUM_THREADS, or None.
        columns: COLUMNS: width of the terminal in characters, or None.
        color: False if NO_COLOR is set and not empty, or TERM is `dumb`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launched: bool = False
    restart_count: int = 0
    threads: int | None = None
    columns: int | None = None
    color: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ProcessSettings:
        """Read the variables of `environ` (None: of this process).

        Raises:
            UsageError: a variable is not the number it should be, or the ranks do not agree with the world size.
        """
        environ = os.environ if environ is None else environ

        def number(name: str) -> int | None:
            value = environ.get(name, "").strip()
            if not value:
                return None
            if not re.fullmatch(r"\d+", value):
                raise UsageError(f"environment: {name}={value!r}, expected a whole number >= 0")
            return int(value)

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        if (rank is None) != (world_size is None):
            missing, given = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
            raise UsageError(f"environment: {given} is set without {missing}; set both (torchrun does) or neither")
        if rank is not None and world_size is not None and rank >= world_size:
            raise UsageError(f"environment: RANK={rank} with WORLD_SIZE={world_size}, expected a rank below it")
        return cls(
            rank=rank or 0,
            world_size=1 if world_size is None else world_size,
            local_rank=number("LOCAL_RANK") or 0,
            local_world_size=number("LOCAL_WORLD_SIZE") or 1,
            master_addr=environ.get("MASTER_ADDR") or None,
            master_port=number("MASTER_PORT"),
            launched=rank is not None,
            restart_count=number("TORCHELASTIC_RESTART_COUNT") or 0,
            threads=number("OMP_NUM_THREADS"),
            # Terminals set odd widths at times; a width is no reason to stop.
            columns=int(environ["COLUMNS"]) if re.fullmatch(r"[1-9]\d*", environ.get("COLUMNS", "")) else None,
            color=not environ.get("NO_COLOR") and environ.get("TERM") != "dumb",
        )


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment for a process it starts, with `changes`; None removes a variable."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@contextlib.contextmanager
def terminal_columns(columns: int) -> Iterator[None]:
    """While open, libraries that ask for the terminal's width are told `columns`."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


# ---- TOML to dataclasses -------------------------------------------------------------------------------------------


def load_toml(cls: type[ConfigT], path: str | Path, overrides: Mapping[str, object] | None = None) -> ConfigT:
    """Fill the frozen dataclass `cls` from a TOML file.

    Fields may be bool, int, float, str, Path (as written: relative to the working directory), Literal, `X | None`,
    tuples, lists, dicts with text keys, and further dataclasses: a table, or an array of tables for a tuple of them.

    Args:
        overrides: values that replace those of the file, by dotted key: {"optimizer.learning_rate": 1e-3}.

    Raises:
        UsageError: the file is missing or no TOML; a key is unknown, missing or of the wrong type; the dataclass
            itself refuses the values. Names the file, the key and its line, and the nearest name that exists.
    """
    path = Path(path)
    text = _read_text(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    source = _Source(path, text, frozenset(overrides or ()))
    for dotted, value in (overrides or {}).items():
        _set_dotted(table, dotted, value)
    config: ConfigT = _to_dataclass(cls, table, (), source)
    return config


def to_toml(config: Any) -> str:
    """The TOML text from which `load_toml` makes an equal dataclass; None is left out (so it must be the default)."""
    return "\n".join(_toml_lines(config, ())).strip("\n") + "\n"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    lowered = {k.lower().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def nearest_sibling(path: Path) -> str:
    """' (did you mean …?)' if the folder of a missing file holds one of a similar name, else ''."""
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        missing = next((p for p in reversed(path.parents) if not p.exists()), path.parent)
        return f" (there is no folder {missing})"
    close = nearest(path.name, names)
    return f" (did you mean {path.parent / close}?)" if close else ""


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected a TOML file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no configuration file {path}{nearest_sibling(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({error})") from error


def _set_dotted(table: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    inner: Any = table
    for name in parents:
        if isinstance(inner, list) and name.isdigit() and int(name) < len(inner):
            inner = inner[int(name)]
        elif isinstance(inner, dict):
            inner = inner.setdefault(name, {})
        else:
            raise UsageError(f"cannot set {dotted!r}: there is no table {name!r} to set it in")
    if not isinstance(inner, dict):
        raise UsageError(f"cannot set {dotted!r}: {'.'.join(parents)} is not a table")
    inner[last] = value


@dataclass(frozen=True)
class _Source:
    """The file that values come from; knows where in it each one stands."""

    path: Path
    text: str
    overridden: frozenset[str]

    def place(self, keys: Keys) -> str:
        """' (line 12)', ' (override)', or '' where the place is not known."""
        if ".".join(map(str, keys)) in self.overridden:
            return " (override)"
        line = self._line(keys)
        return f" (line {line})" if line else ""

    def section(self, keys: Keys) -> str:
        """'[data.sources]' of the table that `keys` names; 'the top level' for the file itself."""
        names = [k for k in keys if isinstance(k, str)]
        if not names:
            return "the top level"
        count = next((f" number {k + 1}" for k in reversed(keys) if isinstance(k, int)), "")
        return f"[{'.'.join(names)}]{count}"

    def _line(self, keys: Keys) -> int | None:
        """Line of the longest beginning of `keys` that is written out: an inline table counts as its first line."""
        best, best_length = None, 0
        table: Keys = ()
        elements: dict[Keys, int] = {}  # of each array of tables, the number of its latest element
        for number, line in enumerate(self.text.split("\n"), start=1):
            if header := re.match(r"\s*(\[\[?)([^\[\]]+)\]", line):
                *parents, last = _dotted_parts(header[2]) or ("",)
                table = ()
                for name in parents:  # `[a.b]` below `[[a]]` belongs to the latest element of `a`
                    table = (*table, name)
                    table = (*table, elements[table]) if table in elements else table
                table = (*table, last)
                if header[1] == "[[":
                    elements[table] = elements.get(table, -1) + 1
                    table = (*table, elements[table])
                found = table
            elif assignment := re.match(r"\s*([\w\-.\"' ]+?)\s*=", line):
                found = (*table, *_dotted_parts(assignment[1]))
            else:
                continue
            if len(found) > best_length and keys[: len(found)] == found:
                best, best_length = number, len(found)
        return best


def _dotted_parts(text: str) -> tuple[str, ...]:
    return tuple(a or b or c for a, b, c in re.findall(r"\"([^\"]*)\"|'([^']*)'|([\w\-]+)", text))


def _to_dataclass(cls: Any, table: Any, keys: Keys, source: _Source) -> Any:
    section = source.section(keys)
    if not isinstance(table, dict):
        raise UsageError(f"{source.path}: {section}{source.place(keys)} is {_toml(table)}; expected a table")
    hints = _hints(cls)
    for key in table:
        if key not in hints:
            raise UsageError(
                f"{source.path}: unknown key {_toml(key)} in {section}{source.place((*keys, key))}; "
                f"{_unknown_key_advice(key, cls, hints)}"
            )
    values: dict[str, Any] = {}
    for f in _init_fields(cls):
        if f.name in table:
            values[f.name] = _convert(hints[f.name], table[f.name], (*keys, f.name), source)
        elif f.default_factory is hints[f.name]:  # a table left out is an empty one: it may lack keys of its own
            values[f.name] = _to_dataclass(hints[f.name], {}, (*keys, f.name), source)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            meaning = field_help(cls).get(f.name)
            raise UsageError(
                f"{source.path}: {section}{source.place(keys)} lacks the key {_toml(f.name)}"
                + (f": {_first_sentence(meaning)}" if meaning else f" ({type_text(hints[f.name])})")
            )
    try:
        return cls(**values)
    except ValueError as error:
        where = f"{section}{source.place(keys)}: " if keys else ""
        raise UsageError(f"{source.path}: {where}{error}") from error


def _unknown_key_advice(key: str, cls: Any, hints: Mapping[str, Any]) -> str:
    if close := nearest(key, list(hints)):
        return f"did you mean {_toml(close)}?"
    # A right key in the wrong table is the other common slip.
    for section, owner in sections(cls):
        if section and key in _hints(owner):
            return f"did you mean the key of [{section}] below it?"
    return f"known keys: {', '.join(hints)}"


def _convert(hint: Any, value: Any, keys: Keys, source: _Source) -> Any:
    """`value` as the type `hint`, or a UsageError that names the key, the value and what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, keys, source)
    if dataclasses.is_dataclass(hint):
        return _to_dataclass(hint, value, keys, source)
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        if origin is list or args[-1] is Ellipsis:
            return origin(_convert(args[0], v, (*keys, i), source) for i, v in enumerate(value))
        if len(args) == len(value):
            return tuple(_convert(a, v, (*keys, i), source) for i, (a, v) in enumerate(zip(args, value, strict=True)))
    elif origin is dict and isinstance(value, dict):
        return {k: _convert(args[1], v, (*keys, k), source) for k, v in value.items()}
    elif origin is Literal and any(type(value) is type(a) and value == a for a in args):
        return value
    elif hint is float and type(value) in (int, float) and has_range(value):
        return float(value)
    elif hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint is Any or (
        hint in (bool, int, str) and type(value) is hint and has_range(value)
    ):  # true is no whole number
        return value
    close = nearest(value, [str(a) for a in args]) if origin is Literal and isinstance(value, str) else None
    raise UsageError(
        f"{source.path}: {_key_text(keys)} = {_toml(value)} in {source.section(keys[:-1])}{source.place(keys)}; "
        f"expected {type_text(hint)}{_range_text(hint, value)}" + (f"; did you mean {_toml(close)}?" if close else "")
    )


def has_range(value: object) -> bool:
    """False for a number that no setting can have: inf, nan, and a whole number of more than TOML's 64 bits."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _range_text(hint: Any, value: Any) -> str:
    """What a number of the right type is outside of."""
    if hint is float and type(value) in (int, float):
        return " that is finite"
    return " of at most 64 bits" if hint is int and type(value) is int else ""


def _convert_union(members: tuple[Any, ...], value: Any, keys: Keys, source: _Source) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(m for m in members if m is not type(None))
    if len(members) == 1:
        return _convert(members[0], value, keys, source)
    for member in members:
        try:
            return _convert(member, value, keys, source)
        except UsageError:
            continue
    raise UsageError(
        f"{source.path}: {_key_text(keys)} = {_toml(value)} in {source.section(keys[:-1])}{source.place(keys)}; "
        f"expected {' or '.join(type_text(m) for m in members)}"
    )


def _key_text(keys: Keys) -> str:
    last = keys[-1]
    return f"{keys[-2]}[{last}]" if isinstance(last, int) else last


def _toml(value: Any) -> str:
    """A value as it would be written in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # the one JSON lets through
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml_lines(config: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Values of one table first, as TOML asks for, then its tables and arrays of tables."""
    tables: list[tuple[str, Any]] = []
    for f in _init_fields(type(config)):
        value = getattr(config, f.name)
        of_tables = isinstance(value, (list, tuple)) and len(value) > 0 and dataclasses.is_dataclass(value[0])
        if dataclasses.is_dataclass(value) or of_tables:
            tables.append((f.name, value))
        elif value is not None:
            yield f"{f.name} = {_toml(value)}"
    for name, value in tables:
        dotted = ".".join((*keys, name))
        for item in value if isinstance(value, (list, tuple)) else (value,):
            yield ""
            yield f"[[{dotted}]]" if isinstance(value, (list, tuple)) else f"[{dotted}]"
            yield from _toml_lines(item, (*keys, name))


# ---- Documentation from the dataclasses ----------------------------------------------------------------------------


def config_reference_markdown(cls: type[Any]) -> str:
    """The reference of a configuration as Markdown: a table of key, type, default and meaning for each TOML table."""
    parts: list[str] = []
    for section, owner in sections(cls):
        parts.append(f"## `[{section}]`" if section else "## Top level")
        doc = inspect.getdoc(owner) or ""
        if doc and not doc.startswith(f"{owner.__name__}("):  # what dataclass writes where there is none
            parts.append(doc.split("\n\n")[0].replace("\n", " "))
        hints, meanings = _hints(owner), field_help(owner)
        rows = []
        for f in _init_fields(owner):
            if _table_class(hints[f.name]) is None:
                cells = (f"`{f.name}`", type_text(hints[f.name]), _default_text(f), meanings.get(f.name, ""))
                rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        if rows:
            parts.append("\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def sections(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, dataclass) of every TOML table of a configuration, outermost ('') first."""
    yield prefix, cls
    for name, hint in _hints(cls).items():
        if (inner := _table_class(hint)) is not None:
            yield from sections(inner, f"{prefix}.{name}" if prefix else name)


@functools.cache
def field_help(cls: type[Any]) -> dict[str, str]:
    """The string literal below each field, in one line, by field name; inherited fields included."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError):  # made at run time: it has no source to read
            continue
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for above, below in itertools.pairwise(body):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[above.target.id] = " ".join(below.value.value.split())
    return found


def type_text(hint: Any) -> str:
    """A type in words: 'whole number', 'text', '"packed" or "balanced"'."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(a) for a in args if a is not type(None))
    if origin is Literal:
        return " or ".join(_toml(a) for a in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"list of {len(args)}: {', '.join(type_text(a) for a in args)}"
    if origin in (tuple, list):
        return "array of tables" if dataclasses.is_dataclass(args[0]) else f"list of {type_text(args[0])}"
    if origin is dict:
        return f"table of {type_text(args[1])}"
    if dataclasses.is_dataclass(hint):
        return "table"
    words = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "unset" if field.default is None else f"`{_toml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_toml(field.default_factory())}`"
    return "**required**"


def _table_class(hint: Any) -> Any:
    """The dataclass of a field that is written as a table or as an array of tables, else None."""
    if dataclasses.is_dataclass(hint):
        return hint
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple, list):
        return next((inner for a in typing.get_args(hint) if (inner := _table_class(a)) is not None), None)
    return None


def _init_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _hints(cls: Any) -> dict[str, Any]:
    """Types of the fields that a file may set, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in _init_fields(cls)}


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")
