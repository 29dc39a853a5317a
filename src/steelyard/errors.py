"""The exceptions callers may catch.

A message says what was given, what was expected and what to change. The command line turns a
`SteelyardError` into one line and an exit code; anything else is a bug of ours and keeps its traceback.
"""


def first_line(error: BaseException) -> str:
    """What `error` says, without the lines that follow: libraries append stacks of their own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class SteelyardError(Exception):
    """Base of every error we raise on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(SteelyardError, ValueError):
    """The caller asked for something that cannot be right: a wrong key, shape, path or combination."""

    exit_code = 2


class PlanError(SteelyardError):
    """No plan satisfies the constraints (for example a memory cap that cannot hold one row)."""


class DataError(SteelyardError):
    """Documents could not be read: names the path, the record and the number of failures so far."""


class PeerError(SteelyardError):
    """A rank did not take part in a transfer in time: names the ranks that are missing, and where."""


class CheckpointError(SteelyardError):
    """A checkpoint could not be written or read; the previous one is untouched."""
