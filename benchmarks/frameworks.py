"""A Transformers model on two ranks with skewed packed documents: stock, balanced, ping-pong, and torch's all-gather.

    python benchmarks/frameworks.py                       # everything, into docs/results (minutes)
    python benchmarks/frameworks.py --parts speed         # memory is counted, so a busy machine does for it
    python benchmarks/frameworks.py --skews long --rounds 9 --out part
    python benchmarks/frameworks.py --redraw              # page and picture from docs/results/frameworks.json

Two gloo processes with one thread each train a small Llama in fp32. All variants take the same steps in turn in one
run, round after round, and ratios are taken inside a round. Before anything is timed, arithmetic says what to expect,
and one step of every variant must give the loss and the gradients of the stock model.

  stock         Transformers as it is: packed position ids, `sdpa`, which on CPU needs a mask of tokens × tokens
  packed        the same data parallelism with our kernel, every rank computing what it holds: what others are over
  plain         balanced attention, `attach(model)`
  ping_pong     the same, two halves in turn
  head_tail, per_document, ptrr
                torch's all-gather context parallelism with each of its load balancers, our kernel
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from frameworks_ranks import MEMORY_WAYS, VARIANTS, measure, memory
from frameworks_report import draw_picture, renew_page, summary_lines
from frameworks_workloads import MODEL, RANKS, SKEWS

from steelyard.testing.pool import WorkerPool

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
PARTS = ("speed", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [skew.name for skew in SKEWS]
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="others stay as they were in --out")
    parser.add_argument("--skews", nargs="*", choices=names, default=names)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank, a multiple of 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of frameworks.md, .json and picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object; logs go to stderr")
    parser.add_argument("--redraw", action="store_true", help="measure nothing, use frameworks.json")
    options = parser.parse_args()
    if options.tokens < 512 or options.tokens % 512:
        parser.error(f"--tokens {options.tokens}: expected a multiple of 512")
    record_path = options.out / "frameworks.json"
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    if not options.redraw:
        record |= run(options)
        options.out.mkdir(parents=True, exist_ok=True)
        record_path.write_text(as_lines(record), encoding="utf-8")
    if record.get("steps"):
        draw_picture(record, options.out / "frameworks.png")
    renew_page(options.out / "frameworks.md", record)
    print(json.dumps(record) if options.json else "\n".join(summary_lines(record)))
    print(f"wrote {record_path}, frameworks.md and frameworks.png", file=sys.stderr)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the parts that were asked for, as JSON values."""
    skews = [skew for skew in SKEWS if skew.name in options.skews]
    variants = [name for name in VARIANTS if name in options.variants]
    found: dict[str, Any] = {
        "tokens_per_rank": options.tokens,
        "model": {name: getattr(MODEL, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")},
        "skews": [{"skew": s.name, "text": s.text, "lengths_by_rank": s.lengths(options.tokens)} for s in skews],
    }
    with WorkerPool(RANKS, group_timeout_s=300.0) as pool:
        if "speed" in options.parts:
            begin = time.monotonic()
            found |= pool.run(measure, RANKS, skews, variants, options.tokens, options.rounds, timeout_s=3600.0)[0]
            found["speed_run"] = {**where(begin), "rounds": options.rounds}
        if "memory" in options.parts:
            begin = time.monotonic()
            found["memory"] = [
                {"skew": s.name, "way": way, "by_rank": by_rank}
                for s in skews
                for way in MEMORY_WAYS
                for by_rank in [pool.run(memory, RANKS, s.lengths(options.tokens), way, timeout_s=600.0)]
            ]
            found["memory_run"] = where(begin)
    return dict(rounded(found))


def where(begin_s: float) -> dict[str, Any]:
    return {"machine": machine(), "commit": commit(), "took_s": round(time.monotonic() - begin_s)}


def rounded(value: Any) -> Any:
    """Seven digits say enough."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def machine() -> str:
    """Processor, cores and versions, in words."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, Transformers {transformers.__version__}"


def commit() -> str:
    """The commit measured, and whether there were changes on top of it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def as_lines(record: dict[str, Any]) -> str:
    """JSON with one measured row a line, so that changes show."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            lines = ",\n".join("  " + json.dumps(row) for row in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
