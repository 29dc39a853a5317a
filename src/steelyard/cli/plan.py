"""`steelyard plan WORKLOAD`: what a policy would make of it, or several beside each other."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from steelyard.cli.data_stats import failures_said_once, print_left_out, scan_progress
from steelyard.cli.flags import Switch, check_picture, parse_flags
from steelyard.cli.output import command_output
from steelyard.cli.plan_report import Planned, Refusal, Request, as_json, draw_plans, print_plans
from steelyard.data.config import DataConfig, Format, SourceConfig
from steelyard.data.lengths import data_statistics
from steelyard.data.stream import ChunkStream
from steelyard.data.tokenizers import load_tokenizer
from steelyard.data.workload import Workload, chunk_workload, pack_workload, read_workload
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS, MAX_RANKS, MAX_TOKENS_PER_RANK
from steelyard.domain.model_shape import MODEL_SHAPES
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError, UsageError
from steelyard.library import Goal, attention_shape, keys_of_a_row
from steelyard.planner import POLICIES
from steelyard.planner.measure import COMPARED, measure_plan
from steelyard.planner.objective import Memory, Objective, Passes
from steelyard.settings import nearest, nearest_sibling

DESCRIPTION = """\
Plan core attention of a workload and show what comes of it: work of the busiest rank over its share, bytes of one
layer's forward pass, bounds, and the time of planning. WORKLOAD is a file
{"tokens_per_rank": T, "ranks": n, "batches": [{"docs": [lengths in packing order]}, ...]}, or a folder or file of
documents, for which --ranks is needed."""

DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_BATCHES = 3
DEFAULT_NODE_WEIGHT = 0.125
MOST = {"--ranks": MAX_RANKS, "--chunk-tokens": MAX_TOKENS_PER_RANK, "--batches": 1 << 20}
OF_DOCUMENTS = ("ranks", "chunk_tokens", "batches", "documents", "tokenizer", "format", "field", "suffixes")
QUIET_S = 2.0
REASONS_SHOWN = 3  # of the batches without a plan; the notes below the tables name all of them
MODEL_HELP = (
    f"A built-in name ({', '.join(dict.fromkeys(shape.name for shape in MODEL_SHAPES.values()))}), or a Transformers "
    "config.json: bytes of a query and of a key."
)


@dataclass(frozen=True)
class PlanFlags:
    workload: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD")]
    """A workload file (.json), or documents: a folder, file or glob pattern as for `steelyard data stats`."""
    policy: str = "balanced"
    """`balanced`, `packed`, `wlb`, `per_document_cp`, `head_tail`, `greedy`, or `all` of these; or `reference`, the
    fewest bytes there are, for some hundred tokens (needs scipy)."""
    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama3-8b"
    tolerance: float = 0.05
    """No rank's work above (1 + tolerance) × its share; 0.05 is 5 %."""
    layout: Literal["chosen", "given"] = "chosen"
    """`chosen`: where a document spans ranks, `balanced` also decides which rank holds which tokens, equally many on
    each. `given`: tokens lie in packing order already."""
    speeds: str = ""
    """Relative speed of each rank, for example `1,1,0.5`; none: all equal."""
    node_size: int = 1
    """Ranks per node: `balanced` prefers transfers inside one; groups of `per_document_cp` and `head_tail` are nodes (8
    ranks where it is 1)."""
    node_weight: float | None = None
    """Cost of a byte inside a node relative to one between nodes (0.125: an eighth); with --node-size."""
    memory_tokens: int | None = None
    """Most tokens (query rows plus key rows) that a rank may receive; None: no cap. `balanced` keeps it, the others do
    not."""
    memory: Memory = "keep"
    """`keep`: ranks keep what they received until backward. `resend`: it is sent again, for less memory."""
    passes: Passes = "both"
    """The pass whose bytes `balanced` makes few: `forward`, `backward` or `both`. Those shown are of a forward pass."""
    objective: Goal = "pairs"
    """What `balanced` balances: `pairs` of query and key, or the `time` of the attention kernel of --device, for which
    short documents are more work than their pairs say."""
    device: str | None = None
    """For --objective time: `h200`, `h100`, `a100`, `b200`, `cpu-local`, or a profile of `steelyard calibrate`."""
    window: int | None = None
    """Keys that a query sees at most, its own included; None: all earlier ones of its document."""
    ranks: int | None = None
    """For documents: number of ranks."""
    chunk_tokens: int | None = None
    """For documents: tokens that each rank holds (8192)."""
    batches: int | None = None
    """For documents: batches to plan, in the order of training (3, or as many as they fill)."""
    documents: Literal["span", "cut"] = "span"
    """For documents: `span`: one that crosses a rank's end continues on the next. `cut`: the chunks of `steelyard
    train` on so many ranks, which cuts documents where chunks end: policies then differ in nothing but balance."""
    tokenizer: str = "bytes"
    """For documents: `bytes`, or a Hugging Face `tokenizer.json` or the folder of one."""
    format: Format = "auto"
    """For documents: their format; `auto`: by file name."""
    field: str = "text"
    """For documents: field (JSONL) or column (Parquet, datasets) that holds the text."""
    suffixes: tuple[str, ...] = ()
    """For documents: file-name endings to read, for example `.py .md`; none: the usual ones of the format."""
    plot: Path | None = None
    """Draw the work of every rank under each policy into this file (.png, .svg or .pdf)."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(PlanFlags, argv, prog="steelyard plan", description=DESCRIPTION)
    policies = _policies(flags.policy)
    check_picture(flags.plot)
    _check_numbers(flags)
    speeds = _speeds(flags.speeds)
    shape = attention_shape(flags.model)
    objective = _objective(flags, shape, policies)
    with command_output(as_json=flags.json) as output:
        workload = _workload(flags, output.console)
        if flags.plot is not None and not any(lengths.any() for lengths in workload.batches):
            raise UsageError(f"--plot {flags.plot}: {workload.name} holds no document, so there is no work to draw")
        request = Request(
            model=flags.model,
            shape=shape,
            workload=workload,
            topology=_topology(flags, speeds, workload),
            tolerance=flags.tolerance,
            window=flags.window,
            objective=objective,
            memory_tokens=flags.memory_tokens,
            layout=flags.layout,
            documents=None if _is_workload_file(flags) else flags.documents,
        )
        plans, refused = _plans(request, policies)
        print_plans(output.console, request, plans, refused)
        output.result(as_json(request, plans, refused))  # before the picture, which may fail on a full disk
        if flags.plot is not None:
            if "packed" not in plans:  # what it would be without us
                plans = {**_plans(request, ("packed",), repeats=1)[0], **plans}
            draw_plans(flags.plot, request, plans)
            output.console.print(f"wrote {flags.plot}", soft_wrap=True, markup=False)
    if refused:  # the tables of all other batches and policies stand above it
        raise PlanError("; ".join(f"{r.policy}, batch {r.batch}: {r.reason}" for r in refused[:REASONS_SHOWN]))
    return 0


def _plans(request: Request, policies: Sequence[str], *, repeats: int = 3) -> tuple[Planned, list[Refusal]]:
    """Plans by policy, and the batches that a policy has no plan for."""
    layouts = request.workload.layouts()
    plans: Planned = {}
    refused = []
    for policy in policies:
        plans[policy] = []
        for batch, layout in enumerate(layouts):
            with said_if_slow(f"planning {policy}, batch {batch + 1} of {len(layouts)} ({layout.ranks:,} ranks)"):
                try:
                    measured = measure_plan(
                        layout, policy=policy, shape=request.shape, tolerance=request.tolerance,
                        topology=request.topology, window=request.window, objective=request.objective, batch=batch,
                        layout_chosen=request.layout == "chosen", repeats=repeats,
                    )  # fmt: skip
                except PlanError as error:
                    reason = re.sub(r"(its )?memory_tokens", "--memory-tokens", str(error))
                    refused.append(Refusal(policy, batch, reason))
                else:
                    plans[policy].append(measured)
    return plans, refused


def _print_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def said_if_slow(
    what: str, quiet_s: float = QUIET_S, say: Callable[[str], object] = _print_on_stderr
) -> Iterator[None]:
    """A line on stderr once the block has taken `quiet_s`."""
    timer = threading.Timer(quiet_s, say, (f"{what} …",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _policies(given: str) -> tuple[str, ...]:
    if given == "all":
        return COMPARED
    if given not in POLICIES:
        names = (*COMPARED, "reference", "all")
        close = nearest(given, names)
        raise UsageError(
            f"--policy {given}: expected one of {', '.join(names)}" + (f"; did you mean {close}?" if close else "")
        )
    return (given,)


def _objective(flags: PlanFlags, shape: AttentionShape, policies: Sequence[str]) -> Objective:
    if "balanced" not in policies:
        for name, usual in (("passes", "both"), ("objective", "pairs"), ("device", None)):
            value = getattr(flags, name)
            if value != usual:
                raise UsageError(f"--{name} {value}: only the policy `balanced` has a use for it, not {flags.policy}")
    row_keys = keys_of_a_row(flags.objective, flags.device, shape, names=("--objective ", "--device "))
    return Objective(flags.passes, flags.memory, row_keys or 0)


def _check_numbers(flags: PlanFlags) -> None:
    """What is wrong whatever the documents are, said before they are read."""
    checks: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("--tolerance", flags.tolerance, 0, MAX_RANKS, f"a number from 0 to {MAX_RANKS:,} such as 0.05, which is 5 %"),
        ("--window", flags.window, 1, MAX_DOCUMENT_TOKENS, f"1 to {MAX_DOCUMENT_TOKENS:,} keys, or none"),
        ("--node-size", flags.node_size, 1, MAX_RANKS, f"1 to {MAX_RANKS:,} ranks"),
        ("--node-weight", flags.node_weight, 0, 1, "a number from 0 to 1 such as 0.125"),
        ("--memory-tokens", flags.memory_tokens, 0, float("inf"), "at least 0"),
    )
    for name, value, least, most, expected in checks:
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} {value}: expected {expected}")
    if flags.node_weight is not None and flags.node_size == 1:
        raise UsageError(f"--node-weight {flags.node_weight:g} has a meaning with nodes only; add --node-size")


def _speeds(given: str) -> tuple[float, ...]:
    speeds: list[float] = []
    for place, part in enumerate(given.split(",") if given.strip() else []):
        try:
            speeds.append(float(part))
        except ValueError:
            raise UsageError(
                f"--speeds: number {place + 1} is {part.strip()!r}, expected for example 1,1,0.5"
            ) from None
        if not (isfinite(speeds[-1]) and speeds[-1] >= 0):
            raise UsageError(
                f"--speeds: number {place + 1} (rank {place}) is {part.strip()}, expected a finite number, at least 0"
            )
    if speeds and not any(speeds):
        raise UsageError("--speeds: all are 0, expected one above 0 at least")
    return tuple(speeds)


# --- what to plan -----------------------------------------------------------------------------------------------------


def _is_workload_file(flags: PlanFlags) -> bool:
    path = Path(flags.workload).expanduser()
    return path.suffix == ".json" and path.exists() and not path.is_dir()


def _workload(flags: PlanFlags, console: Console) -> Workload:
    path = Path(flags.workload).expanduser()
    if not path.exists() and not any(c in flags.workload for c in "*?["):
        raise UsageError(f"no file or folder {flags.workload}{nearest_sibling(path)}")
    if not _is_workload_file(flags):
        return _from_documents(flags, console)
    usual = {f.name: f.default for f in fields(flags)}
    for name in OF_DOCUMENTS:
        value = getattr(flags, name)
        if value != usual[name]:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise UsageError(
                f"--{name.replace('_', '-')} {shown}: a workload file says all itself; the flag is for folders of "
                "documents"
            )
    return read_workload(path)


def _from_documents(flags: PlanFlags, console: Console) -> Workload:
    if flags.ranks is None:
        raise UsageError(
            f"{flags.workload} is no workload file (.json) but documents; say on how many ranks, for example --ranks 8"
        )
    chunk_tokens = DEFAULT_CHUNK_TOKENS if flags.chunk_tokens is None else flags.chunk_tokens
    batches = DEFAULT_BATCHES if flags.batches is None else flags.batches
    for name, value in (("--ranks", flags.ranks), ("--chunk-tokens", chunk_tokens), ("--batches", batches)):
        if value < 1:
            raise UsageError(f"{name} {value}: expected at least 1")
        if value > MOST[name]:
            raise UsageError(f"{name} {value}: expected at most {MOST[name]:,}")
    source = SourceConfig(path=flags.workload, format=flags.format, field=flags.field, suffixes=flags.suffixes)
    if flags.documents == "cut":
        return _as_trained(source, flags.tokenizer, chunk_tokens, flags.ranks, batches, console)
    with scan_progress() as progress, failures_said_once():
        statistics = data_statistics(
            source,
            tokenizer=flags.tokenizer,
            chunk_tokens=chunk_tokens,
            ranks=(),
            max_tokens=flags.ranks * chunk_tokens * batches,
            progress=progress,
        )
    print_left_out(console, statistics.skipped, statistics.ignored_files)
    return pack_workload(
        statistics.lengths, name=flags.workload, tokens_per_rank=chunk_tokens, ranks=flags.ranks, batches=batches
    )


def _as_trained(
    source: SourceConfig, tokenizer: str, chunk_tokens: int, ranks: int, batches: int, console: Console
) -> Workload:
    """The first chunks of `steelyard train` with one chunk a rank and step, which begins anew where documents end."""
    loaded = load_tokenizer(tokenizer)
    config = DataConfig(
        sources=(source,), tokenizer=tokenizer, chunk_tokens=chunk_tokens, batch_chunks=ranks, on_error="skip",
        append_eos=loaded.eos_id is not None,
    )  # fmt: skip
    stream = ChunkStream(config, tokenizer=loaded)
    with said_if_slow(f"reading {batches} × {ranks:,} chunks of {source.path}"), failures_said_once():
        workload = chunk_workload(stream, name=source.path, batches=batches)
    print_left_out(console, stream.skipped, stream.sources[0].listing.ignored)
    return workload


def _topology(flags: PlanFlags, speeds: tuple[float, ...], workload: Workload) -> Topology:
    if speeds and len(speeds) != workload.ranks:
        raise UsageError(f"--speeds gives {len(speeds)} speeds, the workload has {workload.ranks} ranks; give one each")
    weight = DEFAULT_NODE_WEIGHT if flags.node_weight is None else flags.node_weight
    return Topology(
        workload.ranks,
        speeds=speeds,
        memory_tokens=() if flags.memory_tokens is None else (flags.memory_tokens,) * workload.ranks,
        node_size=flags.node_size,
        intra_node_weight=weight if flags.node_size > 1 else 1.0,
    )
