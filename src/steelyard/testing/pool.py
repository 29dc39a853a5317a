"""The pool of gloo workers under the name by which tests know it."""

from __future__ import annotations

from steelyard.runtime.worker_pool import RemoteError, WorkerPool

__all__ = ["RemoteError", "WorkerPool"]
