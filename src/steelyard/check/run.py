"""Runs the checks: starts processes, hands them the request, and judges what they measured."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from steelyard.check import measure
from steelyard.check.report import CheckReport, RankMeasure, ReferenceMeasure, judge, processes
from steelyard.check.request import CheckRequest
from steelyard.errors import PeerError, UsageError
from steelyard.runtime.worker_pool import RemoteError, WorkerPool

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what begins, how many stages are done, and how many there are."""

_TIMEOUT_S = 3600.0
_GRACE_S = 5.0


def run_checks(
    request: CheckRequest,
    *,
    progress: Progress = lambda what, done, stages: None,
    pool: WorkerPool | None = None,
    debug: bool = False,
) -> CheckReport:
    """Check a model on 1, 2, … CPU processes.

    Args:
        progress: called before each stage.
        pool: processes that run already, at least as many as the request needs; None: they are started and ended.
        debug: print where errors in the processes came from.

    Raises:
        UsageError: the model, the user's function or the documents cannot be checked; says what to change.
        NotCheckedError: a process failed or was killed.
    """
    most = request.ranks[-1]
    owned: AbstractContextManager[WorkerPool] = (
        WorkerPool(most, group_timeout_s=300.0) if pool is None else nullcontext(pool)
    )
    stages = 1 + len(request.ranks)
    with owned as workers, tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "gradients.pt")

        def run(what: str, done: int, function: Callable[..., Any], ranks: int) -> list[Any]:
            progress(what, done, stages)
            outcomes = workers.run_all(function, ranks, request, path, timeout_s=_TIMEOUT_S, grace_s=_GRACE_S)
            _raise_failures(outcomes, ranks, debug)
            return outcomes

        reference: ReferenceMeasure = run("documents one by one", 0, measure.reference_on_worker, 1)[0]
        by_ranks: dict[int, Sequence[RankMeasure]] = {}
        for done, ranks in enumerate(request.ranks, start=1):
            by_ranks[ranks] = run(f"on {processes(ranks)}", done, measure.rank_on_worker, ranks)
            _check_weights(reference, by_ranks[ranks], ranks)
    return judge(request, reference, by_ranks)


def _check_weights(reference: ReferenceMeasure, measures: Sequence[RankMeasure], ranks: int) -> None:
    if not math.isfinite(reference.fingerprint):
        raise UsageError("the model has weights that are inf or nan: there is nothing to compare; check what builds it")
    for rank, found in enumerate(measures):
        if found.fingerprint != reference.fingerprint:
            raise UsageError(
                f"the model has other weights on rank {rank} of {ranks} than in one process: the function that builds "
                "it must make the same ones each time; seed its random numbers"
            )


class NotCheckedError(PeerError):
    """The checks did not come to their end. Exit code 2: 1 says that a check failed."""

    exit_code = 2


_CAUSES = {"ProcessDied": 1, "GaveUp": 2, "PeerError": 2}
"""Which failure to name: first of a rank that failed by itself, then one that was killed, then those that waited."""


def _raise_failures(outcomes: Sequence[Any], ranks: int, debug: bool) -> None:
    """Raise what went wrong in a worker, in one line."""
    failed = [(rank, o) for rank, o in enumerate(outcomes) if isinstance(o, (measure.Failed, RemoteError))]
    if not failed:
        return
    rank, cause = min(failed, key=lambda f: _CAUSES.get(f[1].type_name, 0))
    if debug:
        print(cause.text, file=sys.stderr)
    message = cause.message if isinstance(cause, measure.Failed) else _message_of(cause)
    if cause.type_name == "UsageError":
        raise UsageError(message if ranks == 1 else f"rank {rank} of {ranks}: {message}")
    where = "in one process" if ranks == 1 else f"on rank {rank} of {ranks}"
    raise NotCheckedError(f"checking failed {where}: {cause.type_name}: {message}; --debug shows where")


def _message_of(error: RemoteError) -> str:
    """What the exception said: the end of its traceback."""
    _, found, message = error.text.rpartition(f"{error.type_name}: ")
    return message.strip() if found else error.text.strip().splitlines()[-1]
