"""What the report says of its pictures, and that pictures and trace are of the step that was estimated."""

from __future__ import annotations

import gzip
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.observe.trace import gaps, read_perfetto
from steelyard.plots.simulation_report import sampled_ranks, write_report
from steelyard.simulate.answer import as_json
from steelyard.simulate.documents import Documents
from steelyard.simulate.sampled_trace import MOST_RANKS
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step

BATCHES = (int_column([40000, 9000, 2000, 10000, 500, 4036]), int_column([1024] * 64))
DOCUMENTS = Documents("d", int_column(np.concatenate(BATCHES)), "batches", BATCHES)
BASE = Scenario(
    model=model_shape("llama3-8b").with_layers(4), profile=load_profile("H200"), degrees=Degrees(data=4),
    chunk_tokens=16384, policy="balanced",
)  # fmt: skip


READ_BYTES = Path.read_bytes


def report(scenario: Scenario, folder: Path, *others: str) -> tuple[StepEstimate, dict[str, str]]:
    """The estimate, and the captions of the page by picture."""
    estimate = simulate_step(scenario, DOCUMENTS, batches=2)
    compared = {name: simulate_step(scenario.replace(policy=name), DOCUMENTS, batches=2) for name in others}
    write_report(folder, estimate, DOCUMENTS, as_json(estimate, DOCUMENTS), compared)
    page = (folder / "report.html").read_text()
    found = re.findall(r'<section id="([^"]+)"><h2>[^<]*</h2><figure>.*?<figcaption>([^<]+)</figcaption>', page)
    return estimate, {name: unescape(caption) for name, caption in found}


def once_s(estimate: StepEstimate) -> float:
    """What comes once a step and is in no trace."""
    names = ("gradient reduction", "optimizer", "overhead")
    return estimate.step_time_s * sum(estimate.shares[name] for name in names)


@pytest.mark.parametrize("policy", ["packed", "balanced"])
def test_captions_name_the_batch_and_the_trace_is_of_it(
    policy: str, tmp_path: Path, sketches: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path.suffix == ".png" else READ_BYTES(path))
    estimate, captions = report(BASE.replace(policy=policy, skip_optimizer=True), tmp_path, "packed", "balanced")
    assert set(captions) == {"split", "memory", "timeline"} | ({"work"} if policy == "balanced" else set())
    assert "mean over 2 sampled batches" in captions["split"]
    assert "first of 2 sampled batches" in captions["timeline"]
    axes = [axes for figure in sketches for axes in figure.axes]
    assert any(a.get_ylabel() == "attention kernel time, × mean" for a in axes) == (policy == "balanced")
    cut = [a.get_title(loc="left") for a in axes if a.get_title(loc="left").startswith("packed")]
    assert cut
    assert all("of the pairs" in title.replace("\n", " ") for title in cut)
    if policy == "balanced":
        assert "Time in the attention kernel" in captions["work"] and "first of 2 sampled batches" in captions["work"]
    spans = read_perfetto(tmp_path / "trace.json.gz")
    assert sorted(spans) == [0, 1, 2, 3]
    if policy == "packed":  # nobody waits for anybody before gradients are reduced
        for own in spans.values():
            assert [gap for gap in gaps(own, 0.0, own[-1].end_s) if gap[1] - gap[0] > 1e-6] == []
    lasted_s = max(s.end_s for own in spans.values() for s in own)
    first = simulate_step(estimate.scenario, DOCUMENTS, batches=1)
    assert estimate.step_s[0] == pytest.approx(first.step_time_s, rel=1e-3)
    # The first of them takes longer than their mean, by far more than this tolerance.
    assert lasted_s == pytest.approx(first.step_time_s - once_s(first), rel=2e-3)
    assert estimate.step_time_s < 0.95 * first.step_time_s


def test_a_pipeline_s_lanes_are_stages_and_its_caption_has_both_times(tmp_path: Path) -> None:
    axes = BASE.replace(policy="wlb", degrees=Degrees(data=2, stage=2), micro_batches=2)
    estimate, captions = report(axes, tmp_path)
    caption = captions["timeline"]
    times = [float(t) * (1.0 if unit == "s" else 1e-3) for t, unit in re.findall(r"([\d.]+) (ms|s)\b", caption)]
    assert times == pytest.approx([estimate.step_s[0], estimate.step_time_s], rel=0.01)
    text = gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
    events = json.loads(text)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["stage 0", "stage 1"]
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= threads


def test_the_busiest_rank_is_among_those_drawn() -> None:
    """Without it a packed step would look shorter than it is."""
    lengths = [100] * 4 * 45 + [16384] + [100] * 3000
    documents = Documents("d", int_column(lengths), "in_order")
    axes = BASE.replace(degrees=Degrees(data=64), chunk_tokens=4000, policy="packed", model=BASE.model)
    estimate = simulate_step(axes, documents, batches=1)
    busiest = int(estimate.rank_work_s.argmax())
    ranks = sampled_ranks(axes, [estimate])
    assert busiest in ranks
    assert busiest not in sampled_ranks(axes, [])
    assert len(ranks) == len(set(ranks)) == MOST_RANKS
    assert ranks == sorted(ranks)
    assert sampled_ranks(axes.replace(degrees=Degrees(data=3)), []) == [0, 1, 2]
