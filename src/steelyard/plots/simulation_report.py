"""One self-contained HTML report of a simulation: text, tables and pictures in a single file that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from steelyard.domain.units import format_time
from steelyard.observe.trace import Span, write_perfetto
from steelyard.plots.report_page import Picture, page
from steelyard.plots.simulation import memory_stack, step_split
from steelyard.plots.style import NARROW_IN, WIDE_IN
from steelyard.plots.timeline import step_timeline
from steelyard.plots.work import work_per_rank
from steelyard.simulate.answer import model_text
from steelyard.simulate.document_spans import by_document, longest_documents
from steelyard.simulate.documents import Documents
from steelyard.simulate.sampled_trace import MOST_RANKS, pipeline_trace, sampled_trace
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate
from steelyard.simulate.workloads import WorkloadCache

TIMELINE_LAYERS = 3
"""A timeline of all layers would be a grey bar; they are alike."""


def write_report(
    folder: Path, estimate: StepEstimate, documents: Documents, values: Mapping[str, Any],
    compared: Mapping[str, StepEstimate | str],
) -> list[Path]:  # fmt: skip
    """Write pictures, `report.html` and a Perfetto trace into `folder`; returns the files.

    Args:
        values: what `simulate.answer.as_json` says of `estimate`.
        compared: other policies on the same documents, or why they cannot run. `packed` is what "before" means.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache = WorkloadCache(documents)
    scenario = estimate.scenario
    pictures: list[Picture] = []

    def add(heading: str, caption: str, name: str, draw: Callable[[Path, float], None]) -> None:
        """Draw twice: for a page as wide as a desk's, which is kept as a file, and for a phone's."""
        draw(folder / name, WIDE_IN)
        with TemporaryDirectory() as other:
            draw(Path(other) / name, NARROW_IN)
            pictures.append(Picture(heading, caption, folder / name, (Path(other) / name).read_bytes()))

    note = f"{model_text(scenario.model)} on {scenario.degrees.devices} × {scenario.profile.name}, simulated"
    note += f"; one replica, {values['site']}" if "site" in values else ""
    shown = {k: e for k, e in compared.items() if isinstance(e, StepEstimate)}
    shown = shown if scenario.policy in shown else {scenario.policy: estimate, **shown}
    add(
        "Where the time goes", f"Device time of a step by cause, {_mean_of(values)}; the line on each bar is the band "
        "of the estimate.", "split.png", lambda path, width_in: step_split(path, shown, note=note, width_in=width_in),
    )  # fmt: skip
    add(
        "Memory", "What is alive at the peak on the fullest device, and what fragmentation may add.", "memory.png",
        lambda path, width_in: memory_stack(path, estimate.memory, note=note, width_in=width_in),
    )  # fmt: skip
    before = None if scenario.policy == "packed" else shown.get("packed")
    if before is not None and len(before.rank_work_s) == len(estimate.rank_work_s):
        _add_work(add, before, estimate, values, note)
    written = _add_timeline(add, before, estimate, cache, values, note, folder / "trace.json.gz")
    report = folder / "report.html"
    report.write_text(page(estimate, values, compared, pictures), encoding="utf-8")
    return [report, *(p.path for p in pictures), written]


def _add_work(
    add: Callable[..., None], before: StepEstimate, estimate: StepEstimate, values: Mapping[str, Any], note: str
) -> None:
    scenario = estimate.scenario
    # Each beside its own mean: where one of them cuts documents, they do not have the same work.
    packed, chosen = (list(e.rank_work_s / e.rank_work_s.mean()) for e in (before, estimate))
    caption = (
        f"Time in the attention kernel of one layer, forward, on every rank: the first micro-batch of "
        f"{_first_of(values)}, packed as it comes and under the chosen policy, each beside its own mean."
    )
    tensor = scenario.degrees.tensor
    add(
        "Work per rank, before and after", caption, "work.png",
        lambda path, width_in: work_per_rank(
            path, packed, chosen, names=("packed", scenario.policy), quantity="attention kernel time",
            rank_name=f"rank ({tensor} devices each)" if tensor > 1 else "rank", note=note, width_in=width_in,
            pairs_kept=(before.pairs_kept, estimate.pairs_kept),
        ),
    )  # fmt: skip


def _add_timeline(
    add: Callable[..., None], before: StepEstimate | None, estimate: StepEstimate, cache: WorkloadCache,
    values: Mapping[str, Any], note: str, trace: Path,
) -> Path:  # fmt: skip
    """The picture and the trace, which is written to `trace`; returns its path."""
    scenario = estimate.scenario
    name = _rank_names(scenario)
    pairs_kept: dict[str, float] = {scenario.policy: estimate.pairs_kept}
    panels: dict[str, dict[int, list[Span]]]
    if scenario.schedule_name in ("1f1b", "interleaved"):
        spans = pipeline_trace(scenario, cache)
        panels, since = {scenario.policy: spans}, "the step began"
        title = f"All passes of a step: {format_time(max(s.end_s for own in spans.values() for s in own))}"
    else:
        others = [e for e in (estimate, before) if e is not None and e.scenario.degrees.stage == 1]
        ranks = sampled_ranks(scenario, others)
        named = longest_documents(scenario, cache, ranks)
        spans = by_document(sampled_trace(scenario, cache, ranks=ranks), scenario, cache, named=named)
        panels, since = {}, "the first of these layers began"
        if before is not None and before.scenario.degrees.stage == 1:
            panels["packed"] = _few_layers(before.scenario, cache, ranks, named)
            pairs_kept["packed"] = before.pairs_kept
        panels[scenario.policy] = _few_layers(scenario, cache, ranks, named)
        title = f"{_few(scenario)} layers, forward and backward"
    write_perfetto(trace, spans, name_of=name)
    add(
        "Timeline", _timeline_caption(estimate, values), "timeline.png",
        lambda path, width_in: step_timeline(
            path, panels, title=title, note=note, lane=name, since=since, pairs_kept=pairs_kept, width_in=width_in
        ),
    )  # fmt: skip
    return trace


def sampled_ranks(scenario: Scenario, estimates: Sequence[StepEstimate]) -> list[int]:
    """Ranks to draw: spread evenly, and of each estimate the one with most attention work, for which others wait."""
    count = scenario.degrees.lanes * (scenario.degrees.stage if scenario.schedule_name == "lockstep" else 1)
    chosen = np.linspace(0, count - 1, min(MOST_RANKS, count)).round().astype(np.int64).tolist()
    busiest = [int(np.argmax(e.rank_work_s)) for e in estimates if len(e.rank_work_s) == count]
    for rank in busiest:
        if rank not in chosen:
            chosen[min((i for i, r in enumerate(chosen) if r not in busiest), key=lambda i: abs(chosen[i] - rank))] = (
                rank
            )
    return sorted(chosen)


def _rank_names(scenario: Scenario) -> Callable[[int], str]:
    if scenario.schedule_name in ("1f1b", "interleaved"):
        return "stage {}".format
    lanes = scenario.degrees.lanes
    if scenario.schedule_name == "lockstep":
        return lambda rank: f"stage {rank // lanes}, rank {rank % lanes}"
    return "rank {}".format


def _mean_of(values: Mapping[str, Any]) -> str:
    return "of the one sampled batch" if values["batches"] == 1 else f"mean over {values['batches']} sampled batches"


def _first_of(values: Mapping[str, Any]) -> str:
    return "the sampled batch" if values["batches"] == 1 else f"the first of {values['batches']} sampled batches"


def _timeline_caption(estimate: StepEstimate, values: Mapping[str, Any]) -> str:
    scenario, batch = estimate.scenario, _first_of(values)
    trace = "The trace (trace.json.gz) is of the same batch; ui.perfetto.dev opens it."
    if scenario.schedule_name in ("1f1b", "interleaved"):
        mean = f"; the mean over all is {format_time(estimate.step_time_s)}" if values["batches"] > 1 else ""
        return (
            f"All passes of {batch}, one lane for each stage of the pipeline (its first rank). Token-wise work, "
            "attention and exposed transfers of a pass are drawn as blocks; in truth they alternate layer by layer. "
            f"With gradients, optimizer and overhead the step of this batch takes {format_time(estimate.step_s[0])}"
            f"{mean}. {trace}"
        )
    turn = "full tick" if scenario.schedule_name == "lockstep" else "micro-batch"
    return (
        f"{_few(scenario)} of {scenario.model.layers} layers, in the first {turn} of {batch}, on sampled ranks; "
        f"attention is coloured by document, the longest of these ranks each for itself. {trace}"
    )


def _few(scenario: Scenario) -> int:
    return min(TIMELINE_LAYERS, scenario.model.layers)


def _few_layers(
    scenario: Scenario, cache: WorkloadCache, ranks: Sequence[int], named: Sequence[int]
) -> dict[int, list[Span]]:
    spans = sampled_trace(scenario, cache, ranks=ranks, layers=_few(scenario), head=False)
    return by_document(spans, scenario, cache, named=named)
