"""One self-contained HTML report of a simulation: text, tables and pictures in a single file that opens offline."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.domain.units import format_bytes, format_time
from steelyard.errors import UsageError
from steelyard.observe.trace import write_perfetto
from steelyard.plots.simulation import memory_stack, step_split
from steelyard.plots.timeline import step_timeline
from steelyard.plots.work import work_per_rank
from steelyard.simulate.answer import CAUSES, model_text
from steelyard.simulate.sampled_trace import pipeline_trace, sampled_trace
from steelyard.simulate.step import StepEstimate
from steelyard.simulate.workloads import Documents, WorkloadCache

TIMELINE_LAYERS = 3
"""A timeline of all layers would be a grey bar; they are alike."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:16px/1.5 system-ui,sans-serif;color:#22272E;max-width:60rem;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem}} h2{{font-size:1.15rem;margin-top:2rem}} table{{border-collapse:collapse}}
td,th{{padding:.2rem .9rem .2rem 0;text-align:left}} td.n{{text-align:right;font-variant-numeric:tabular-nums}}
img{{max-width:100%;height:auto}} .verdict{{font-weight:700}} .muted{{color:#5B6570}}
</style></head><body>{body}</body></html>
"""


def write_report(
    folder: Path, estimate: StepEstimate, documents: Documents, values: Mapping[str, Any],
    compared: Mapping[str, StepEstimate | str],
) -> list[Path]:  # fmt: skip
    """Write pictures, `report.html` and a Perfetto trace into `folder`; returns the files.

    Raises:
        UsageError: `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--plot {folder}: it is a file; expected a folder")
    folder.mkdir(parents=True, exist_ok=True)
    cache = WorkloadCache(documents)
    pictures: list[tuple[str, Path]] = []

    def add(caption: str, name: str) -> Path:
        pictures.append((caption, folder / name))
        return folder / name

    note = f"{model_text(estimate.scenario.model)}, {estimate.scenario.degrees}, simulated"
    shown = {k: e for k, e in compared.items() if isinstance(e, StepEstimate)} or {estimate.scenario.policy: estimate}
    step_split(add("Where the time of a step goes", "split.png"), shown, note=note)
    memory_stack(add("Memory of the fullest device", "memory.png"), estimate.memory, note=note)
    before = shown.get("packed")
    if (
        before is not None
        and estimate.scenario.policy != "packed"
        and len(before.rank_work_s) == len(estimate.rank_work_s)
    ):
        work_per_rank(
            add("Attention work of every rank", "work.png"), list(before.rank_work_s), list(estimate.rank_work_s),
            names=("packed", estimate.scenario.policy), note=note,
        )  # fmt: skip
    trace = folder / "trace.json.gz"
    stages = estimate.scenario.degrees.stage
    if stages > 1 and estimate.scenario.policy != "balanced":
        spans = pipeline_trace(estimate.scenario, cache)
        write_perfetto(trace, spans)
        step_timeline(add("The pipeline, one lane per stage", "timeline.png"), {estimate.scenario.policy: spans})
    else:
        write_perfetto(trace, sampled_trace(estimate.scenario, cache))
        few = sampled_trace(estimate.scenario, cache, layers=min(TIMELINE_LAYERS, estimate.scenario.model.layers))
        step_timeline(
            add(f"{TIMELINE_LAYERS} layers, forward and backward, on sampled ranks", "timeline.png"),
            {estimate.scenario.policy: few},
            title=f"The first {TIMELINE_LAYERS} layers and the head, then backward, simulated",
        )
    report = folder / "report.html"
    report.write_text(_page(estimate, values, pictures), encoding="utf-8")
    return [report, *(p for _, p in pictures), trace]


def _page(estimate: StepEstimate, values: Mapping[str, Any], pictures: list[tuple[str, Path]]) -> str:
    memory, (low, high) = estimate.memory, estimate.band_s
    scenario = estimate.scenario
    title = f"{model_text(scenario.model)} on {scenario.degrees.devices} × {scenario.profile.name}"
    rows = [
        ("verdict", values["verdict"]),
        ("step", f"{format_time(estimate.step_time_s)} ({format_time(low)} … {format_time(high)})"),
        ("tokens per second and device", f"{estimate.tokens_per_s_per_device:,.0f}"),
        ("MFU, causal pairs (attention in full)", f"{estimate.mfu_causal:.1%} ({estimate.mfu:.1%})"),
        ("memory of the fullest device", f"{format_bytes(memory.expected)} of {format_bytes(memory.capacity)}"),
        ("most time goes to", f"{CAUSES[values['dominant']]} ({estimate.shares[values['dominant']]:.0%})"),
        ("policy", estimate.scenario.policy),
        ("degrees", str(estimate.scenario.degrees)),
        ("documents", f"{values['sampler']}, {values['batches']} batches; longest wait "
                      f"{format_time(float(np.ptp(estimate.rank_work_s)))} a layer"),
    ]  # fmt: skip
    parts = [f"<h1>{html.escape(title)}</h1>", _table(rows)]
    if values["next"]:
        parts.append("<h2>Try next</h2><ul>")
        parts += [f"<li><b>{html.escape(s['change'])}</b>: {html.escape(s['reason'])}</li>" for s in values["next"]]
        parts.append("</ul>")
    for caption, path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f'<h2>{html.escape(caption)}</h2><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        )
    parts.append("<h2>Not modelled</h2><ul>")
    parts += [f"<li>{html.escape(text)}</li>" for text in values["not_modelled"]]
    parts.append("</ul><p class=muted>Constants and their sources:</p>")
    parts.append(_table([(k, v) for k, v in estimate.scenario.profile.sources.items()]))
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{''.join(cells)}</table>"
