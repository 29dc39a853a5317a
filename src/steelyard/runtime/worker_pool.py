"""A pool of gloo workers that runs functions handed to it.

Spawning four torch processes and joining them into a group takes 5 to 10 seconds. The pool starts once, at the first
call, and then takes one function after another: what `steelyard check` and `steelyard calibrate` run on several ranks,
and the tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any


class RemoteError(AssertionError):
    """A function failed in a worker; the message is the worker's traceback. `type_name` names its exception, `at_s` is
    when it was told (of `time.monotonic`)."""

    def __init__(self, rank: int, type_name: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {type_name}:\n{text}")
        self.rank, self.type_name, self.text = rank, type_name, text
        self.at_s = time.monotonic()


class WorkerPool:
    """`ranks` processes joined by gloo. Use it as a context manager, or call `close`.

    Args:
        ranks: number of processes.
        group_timeout_s: time-out of their process groups.
    """

    def __init__(self, ranks: int = 4, *, group_timeout_s: float = 60.0) -> None:
        self.ranks = ranks
        self.group_timeout_s = group_timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C nobody waits for what the workers are in the middle of.
        self.close(patience_s=0.0 if kind is not None and issubclass(kind, KeyboardInterrupt) else 2.0)

    def run(self, function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Run `function(rank, ranks, group, *args)` on the first `ranks` workers; their results in rank order.

        `function` must be defined at the top of a module. `group` is a gloo process group of those ranks. After a
        failure or a time-out the pool is restarted at the next call, since a group may be left half-way.

        Raises:
            RemoteError: the first failure; what others say later often follows from it.
            TimeoutError: a worker did not answer in time.
        """
        outcomes = self.run_all(function, ranks, *args, timeout_s=timeout_s)
        failures = [outcome for outcome in outcomes if isinstance(outcome, RemoteError)]
        if failures:
            raise min(failures, key=lambda failure: failure.at_s)
        return outcomes

    def run_all(
        self,
        function: Callable[..., Any],
        ranks: int,
        *args: Any,
        timeout_s: float = 120.0,
        grace_s: float | None = None,
    ) -> list[Any]:
        """As `run`, but a worker's failure is returned in its place instead of raised.

        After a failure, workers that have not answered within `grace_s` are given up (`type_name` "GaveUp"): they may
        wait in a collective for the one that failed. None: they are waited for until the time-out.
        """
        if not 1 <= ranks <= self.ranks:
            raise ValueError(f"ranks={ranks}, expected 1 … {self.ranks}, the size of the pool")
        self._ensure_started()
        job = (str(Path(function.__code__.co_filename).resolve()), function.__module__, function.__qualname__, args)
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, job))
        outcomes: list[Any] = [None] * ranks
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        failed = False
        deadline_s = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                self.close()
                if failed and grace_s is not None:
                    for rank in pending.values():
                        outcomes[rank] = RemoteError(rank, "GaveUp", "another rank had failed")
                    return outcomes
                raise TimeoutError(f"ranks {sorted(pending.values())} did not answer within {timeout_s:g} s")
            for pipe in (pipe for pipe in self._pipes if pipe in ready):
                rank = pending.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, ("ProcessDied", self._end_of(rank))
                except Exception as error:  # an answer that cannot be read here; later ones must not be taken for it
                    ok, value = False, (type(error).__name__, f"its answer cannot be read: {error}")
                outcomes[rank] = value if ok else RemoteError(rank, *value)
                if not ok and not failed and grace_s is not None:
                    deadline_s = min(deadline_s, time.monotonic() + grace_s)
                failed |= not ok
        if failed:
            self.close()
        return outcomes

    def _end_of(self, rank: int) -> str:
        """How a worker that closed its pipe ended."""
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = "" if code is None else f", killed by signal {-code}" if code < 0 else f", exit code {code}"
        return f"the worker process ended{how}"

    def close(self, patience_s: float = 2.0) -> None:
        """End the workers; those that have not ended by themselves in `patience_s` are killed."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(timeout=patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._rendezvous is not None:
            self._rendezvous.cleanup()
            self._rendezvous = None

    def _ensure_started(self) -> None:
        if self._processes:
            return
        self._rendezvous = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.ranks, theirs, str(Path(self._rendezvous.name) / "store"), self.group_timeout_s),
                daemon=True,
            )
            with _interrupts_ignored():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C, which reaches all of a terminal's processes: their owner ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(rank: int, ranks: int, pipe: Connection, store_path: str, group_timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, ranks)
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), backend="gloo", timeout=timeout) for n in range(1, ranks + 1)}
    modules: dict[str, ModuleType] = {}
    while (message := pipe.recv()) is not None:
        size, (path, module_name, qualname, args) = message
        try:
            function = getattr(_load(path, module_name, modules), qualname)
            pipe.send((True, function(rank, size, groups[size], *args)))
        except BaseException as error:  # every failure belongs to the caller
            pipe.send((False, (type(error).__name__, traceback.format_exc())))


def _load(path: str, module_name: str, modules: dict[str, ModuleType]) -> ModuleType:
    """Import the function's module by its file: test modules are not on the path of a worker."""
    if module_name in sys.modules:
        return sys.modules[module_name]
    if path not in modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]
