"""Standard output whose errors say that it was that, and not a file of the command's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from steelyard.errors import SteelyardError


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """What fails inside is standard output; that its reader is gone (`| head`) stays a BrokenPipeError.

    Raises:
        SteelyardError: it cannot be written (a full disk behind `>`).
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SteelyardError(f"standard output cannot be written: {error.strerror}; send it elsewhere") from error


class StandardOutput:
    """A stream that writes and flushes as told above and is the given one otherwise."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with writing_stdout():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with writing_stdout():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
