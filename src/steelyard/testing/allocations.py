"""How much memory a piece of work has allocated at one moment: by torch's CPU allocator, not by the process's size.

The resident size of a process moves with what the C library keeps, so it says little about a few MiB. The profiler
records every block that torch's CPU allocator hands out and takes back on the thread that works, those inside of its
kernels included.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def peak_allocated_bytes(work: Callable[[], object]) -> int:
    """Most bytes that `work` has allocated on the CPU at one moment, over what there was when it began.

    What is freed of what was there before does not count, and neither do threads of its own that `work` starts.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return peak_of(
        (event["args"]["Addr"], event["args"]["Bytes"])
        for event in sorted((e for e in events if e.get("name") == "[memory]"), key=_time)
        if event["args"]["Device Type"] == 0
    )


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """The largest sum of blocks that are allocated at once, from (address, bytes), negative where one is freed."""
    size_at: dict[int, int] = {}
    total = peak = 0
    for address, size_bytes in events:
        if size_bytes > 0:
            size_at[address] = size_bytes
            total += size_bytes
            peak = max(peak, total)
        else:  # of a block that was there before, nothing was counted
            total -= size_at.pop(address, 0)
    return peak


def _time(event: Mapping[str, Any]) -> float:
    return float(event["ts"])
