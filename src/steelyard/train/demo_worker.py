"""One rank of `steelyard demo`, as torchrun's agent starts it; and the call that starts them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from steelyard.domain.units import format_time
from steelyard.observe.trace import write_perfetto
from steelyard.settings import ProcessSettings, load_toml
from steelyard.train.assemble import assemble, choose_device, process_groups
from steelyard.train.demo import Demo, DemoRun, batch_time_s, train_config
from steelyard.train.demo_config import WAYS, DemoConfig, demo_files
from steelyard.train.launch import launch
from steelyard.train.worker import CONFIG_FILE, leave, serve


def run_demo(config: DemoConfig, *, debug: bool = False) -> dict[str, Any]:
    """Run the demo as `config.nproc` processes of this machine; what it wrote to `demo.json`.

    Raises:
        UsageError: a setting that cannot run.
        SteelyardError: why a process ended.
    """
    config.validate()
    launch("steelyard.train.demo_worker", config, config.nproc, debug=debug)
    record: dict[str, Any] = json.loads(demo_files(Path(config.out_dir)).record.read_text(encoding="utf-8"))
    return record


class DemoProgress:
    """Rank 0's progress: a live line on a terminal, else a line for each batch."""

    def __init__(self, config: DemoConfig) -> None:
        console = Console(file=sys.stderr, highlight=False)
        self._console = console
        self._progress: Progress | None = None
        console.print(
            f"{config.nproc} processes, two chunks of {config.chunk_tokens} tokens each: Python's own source files, "
            "mixed so that about a third of the chunks is one long file. Each batch runs packed and balanced in turn, "
            f"up to {config.repeats}× each; the fastest counts. {config.steps} batches, after one to warm up: two to "
            "three minutes where nothing else runs.",
        )
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                console=console,
            )  # fmt: skip
            self._task = self._progress.add_task("warming up", total=config.steps)

    def __enter__(self) -> DemoProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, runs: Mapping[str, list[DemoRun]]) -> None:
        """Show the newest batch."""
        times_s = {way: batch_time_s(runs[way], [run.time_s for run in runs[way]]) for way in WAYS}
        batch = runs["packed"][-1].batch
        packed, balanced = ([run for run in runs[way] if run.batch == batch] for way in WAYS)
        both_s = [batch_time_s(newest, [run.time_s for run in newest]) for newest in (packed, balanced)]
        line = (
            f"batch {batch:>2}: packed {format_time(both_s[0])} (work {packed[-1].work_max_over_mean:.2f}× its share), "
            f"balanced {format_time(both_s[1])} ({balanced[-1].work_max_over_mean:.2f}×), "
            f"loss {balanced[-1].loss:.3f}; speed-up so far {times_s['packed'] / times_s['balanced']:.2f}×"
        )
        if self._progress is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._console.print(line)
            self._progress.update(
                self._task,
                advance=1,
                description=f"{2 * balanced[-1].tokens / sum(both_s):.0f} tokens/s",
            )


def main(run_folder: Path) -> int:
    """Run one rank for `run_demo`."""

    def run(settings: ProcessSettings) -> str:
        # Files in another encoding are part of Python's library; the loader counts them, the demo has enough others.
        logging.getLogger("steelyard.data").setLevel(logging.ERROR)
        config = load_toml(DemoConfig, run_folder / CONFIG_FILE)
        training = train_config(config)
        training.validate(config.nproc)
        device = choose_device(settings, training.device)
        with process_groups(settings, device, training.attention.timeout_s) as groups:
            parts = assemble(training, groups, device)
            if settings.rank == 0:
                with DemoProgress(config) as progress:
                    result = Demo(parts, config.repeats, config.seconds, progress.report).run()
            else:
                result = Demo(parts, config.repeats, config.seconds, lambda runs: None).run()
            parts.balancer.close()
        if result is None:
            return ""
        files = demo_files(Path(config.out_dir))
        for way, spans in result.pop("spans").items():
            write_perfetto(files.traces[way], spans)
        files.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return json.dumps(result["figures"])

    return serve(run_folder, run)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
