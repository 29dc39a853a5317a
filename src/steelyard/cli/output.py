"""Where a command writes: people's text, or with `--json` one object on stdout and everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from steelyard.cli.standard_output import StandardOutput
from steelyard.settings import ProcessSettings


class Output:
    """`console` is for people; `result` is for programs and does nothing unless JSON was asked for."""

    def __init__(self, console: Console, json_stream: Any) -> None:
        self.console = console
        self._json_stream = json_stream

    def result(self, values: Mapping[str, Any]) -> None:
        """Print the command's one JSON object. Numbers that are not finite become null: JSON has none."""
        if self._json_stream is not None:
            self._json_stream.write(json.dumps(_plain(values), allow_nan=False) + "\n")
            self._json_stream.flush()


@contextlib.contextmanager
def command_output(*, as_json: bool) -> Iterator[Output]:
    """With `as_json`, whatever anybody prints until the end of the block goes to stderr, the object alone to stdout."""
    settings = ProcessSettings.from_environment()
    stdout: Any = StandardOutput(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        console = Console(
            file=sys.stderr if as_json else stdout,
            width=settings.columns,
            no_color=not settings.color,
            highlight=False,
            soft_wrap=False,
        )
        yield Output(console, stdout if as_json else None)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy numbers and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
