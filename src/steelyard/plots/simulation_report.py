"""One self-contained HTML report of a simulation: text, tables and pictures in a single file that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.observe.trace import Span, write_perfetto
from steelyard.plots.report_page import Picture, page
from steelyard.plots.simulation import memory_stack, step_split
from steelyard.plots.timeline import step_timeline
from steelyard.plots.work import work_per_rank
from steelyard.simulate.answer import model_text
from steelyard.simulate.document_spans import by_document
from steelyard.simulate.documents import Documents
from steelyard.simulate.sampled_trace import pipeline_trace, sampled_trace
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

    def add(heading: str, caption: str, name: str) -> Path:
        pictures.append(Picture(heading, caption, folder / name))
        return folder / name

    note = f"{model_text(scenario.model)} on {scenario.degrees.devices} × {scenario.profile.name}, simulated"
    shown = {k: e for k, e in compared.items() if isinstance(e, StepEstimate)}
    shown = shown if scenario.policy in shown else {scenario.policy: estimate, **shown}
    step_split(
        add("Where the time goes", "Device time of a step by cause; the line on each bar is the band of the estimate.",
            "split.png"), shown, note=note,
    )  # fmt: skip
    memory_stack(
        add("Memory", "What is alive at the peak on the fullest device, and what fragmentation may add.", "memory.png"),
        estimate.memory, note=note,
    )  # fmt: skip
    before = shown.get("packed")
    if before is estimate or before is None or len(before.rank_work_s) != len(estimate.rank_work_s):
        before = None
    if before is not None:
        caption = "Attention time of one layer on every rank: packed as it comes, and under the chosen policy."
        # Each beside its own mean: where one of them cuts documents, they do not have the same work.
        work = [list(e.rank_work_s / e.rank_work_s.mean()) for e in (before, estimate)]
        work_per_rank(
            add("Work per rank, before and after", caption, "work.png"), work[0], work[1],
            names=("packed", scenario.policy), note=note,
        )  # fmt: skip
    trace = folder / "trace.json.gz"
    picture = add("Timeline", _timeline_caption(scenario), "timeline.png")
    if scenario.degrees.stage > 1 and scenario.policy != "balanced":
        spans = pipeline_trace(scenario, cache)
        write_perfetto(trace, spans)
        step_timeline(picture, {scenario.policy: spans}, note=note)
    else:
        write_perfetto(trace, by_document(sampled_trace(scenario, cache), scenario, cache))
        panels: dict[str, dict[int, list[Span]]] = {scenario.policy: _few_layers(scenario, cache)}
        if before is not None and before.scenario.degrees.stage == 1:
            panels = {"packed": _few_layers(before.scenario, cache), **panels}
        step_timeline(picture, panels, title=f"{_few(scenario)} layers, forward and backward", note=note)
    report = folder / "report.html"
    report.write_text(page(estimate, values, compared, pictures), encoding="utf-8")
    return [report, *(p.path for p in pictures), trace]


def _timeline_caption(scenario: Scenario) -> str:
    if scenario.schedule_name in ("1f1b", "interleaved"):
        return (
            "All passes of a step, one lane for each stage of the pipeline (its first rank). Token-wise work, "
            "attention and exposed transfers of a pass are drawn as blocks; in truth they alternate layer by layer."
        )
    turn = "tick" if scenario.schedule_name == "lockstep" else "micro-batch"
    return f"{_few(scenario)} layers of one {turn} on sampled ranks; attention is coloured by document."


def _few(scenario: Scenario) -> int:
    return min(TIMELINE_LAYERS, scenario.model.layers)


def _few_layers(scenario: Scenario, cache: WorkloadCache) -> dict[int, list[Span]]:
    spans = sampled_trace(scenario, cache, layers=_few(scenario), head=False)
    return by_document(spans, scenario, cache)
