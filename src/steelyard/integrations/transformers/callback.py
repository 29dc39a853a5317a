"""A `TrainerCallback` that puts balance into the Trainer's log lines."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from steelyard.errors import UsageError
from steelyard.integrations.transformers.attach import Attachment


class BalanceCallback(TrainerCallback):
    """Adds `steelyard/…` figures to every log line: how even the work was, how long ranks waited, who was slowest.

    They cover the steps since the line before; see `BalanceReport.take`. Give it to the Trainer before callbacks that
    report to somewhere else.

    Args:
        attachment: of the model that is trained.

    Raises:
        UsageError: something else was given.
    """

    def __init__(self, attachment: Attachment) -> None:
        if not isinstance(attachment, Attachment):
            raise UsageError(
                f"BalanceCallback({type(attachment).__name__}): expected what attach returned, as in "
                "BalanceCallback(attached)"
            )
        self._attachment = attachment

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None:
            return
        figures = {f"steelyard/{name}": round(value, 4) for name, value in self._attachment.report.take().items()}
        logs.update(figures)
        if state.log_history and figures:
            state.log_history[-1].update(figures)
