from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.plots.simulation import (
    _MEMORY,
    _POLICY_COLORS,
    _SOURCE_COLORS,
    _SPLIT,
    _UNKNOWN_CAUSE,
    configuration_map,
    memory_stack,
    step_split,
)
from steelyard.plots.style import DOCUMENT_COLORS, IDLE, NARROW_IN, TRACK_COLORS, VERMILION, WIDE_IN
from steelyard.simulate.answer import CAUSES
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.sweep import Outcome
from steelyard.simulate.workloads import PolicyName

Mistakes = Callable[[Figure], list[str]]
LENGTHS = int_column([30000, 9000, 2000, 20000, 500, 4036])
BASE = Scenario(
    model=model_shape("llama3-8b"), profile=load_profile("H200"), degrees=Degrees(data=4, tensor=2),
    chunk_tokens=16384, policy="balanced",
)  # fmt: skip


@pytest.fixture(scope="module")
def estimates() -> dict[str, StepEstimate]:
    documents = Documents("d", LENGTHS, "batches", (LENGTHS,))
    policies: tuple[PolicyName, ...] = ("packed", "wlb", "balanced")
    return {name: simulate_step(BASE.replace(policy=name), documents, batches=1) for name in policies}


@pytest.mark.parametrize("width_in", [WIDE_IN, NARROW_IN])
def test_split_and_memory_are_legible(
    width_in: float, estimates: dict[str, StepEstimate], tmp_path: Path, sketches: list[Figure], mistakes: Mistakes
) -> None:
    note = "a model whose name is as long as the longest one that anybody thought of on 4096 × a device, simulated"
    full = replace(estimates["wlb"], shares=dict.fromkeys(CAUSES, 1 / len(CAUSES)))
    step_split(tmp_path / "s.png", {**estimates, "per_document_cp": full}, note=note, width_in=width_in)
    memory_stack(tmp_path / "m.png", estimates["balanced"].memory, note=note, width_in=width_in)
    for figure in sketches:
        assert mistakes(figure) == []
    capacity = estimates["balanced"].memory.capacity / 2**30
    assert [line.get_xdata()[0] for line in sketches[1].axes[0].lines if len(set(line.get_xdata())) == 1] == [capacity]
    legend = {text.get_text() for text in sketches[0].legends[0].get_texts()}
    assert legend == set(CAUSES.values())
    assert "packed\n52% of the pairs" in [t.get_text() for t in sketches[0].axes[0].get_yticklabels()]
    assert sketches[0].texts[0].get_text().replace("\n", " ").startswith("Of the policies that cut fewest documents, ")


def test_a_split_without_cut_documents_names_the_fastest(
    estimates: dict[str, StepEstimate], tmp_path: Path, sketches: list[Figure]
) -> None:
    whole = {name: estimates[name] for name in ("wlb", "balanced")}
    step_split(tmp_path / "s.png", whole)
    assert sketches[0].texts[0].get_text().startswith("Balanced is fastest: ")
    step_split(tmp_path / "s.png", {"wlb": whole["wlb"]})
    assert sketches[1].texts[0].get_text().startswith("A step takes ")
    step_split(tmp_path / "s.png", {name: estimates[name] for name in ("packed", "balanced")})
    assert "cut documents have less to compute" in sketches[2].texts[0].get_text()


def outcome(
    memory_gib: float, rate: float, verdict: str = "fits", *, kept: float = 1.0, policy: str = "wlb"
) -> Outcome:
    refused = "does not fit: 900 GiB" if verdict == "does not fit" else ""
    return Outcome(BASE.replace(policy=policy), 1.0, rate, 0.4, memory_gib, verdict, "attention", refused, kept)


def marks(figure: Figure) -> dict[tuple[int, bool], int]:
    """Points by corners of their marker (0: a cross) and by whether it is filled."""
    found: dict[tuple[int, bool], int] = {}
    for points in figure.axes[0].collections:
        count, path = len(points.get_offsets()), points.get_paths()[0]  # type: ignore[arg-type]
        if count and points.get_sizes()[0] < 50:  # type: ignore[attr-defined]
            cross = path.codes is not None and list(path.codes) == [1, 2, 1, 2]
            corners = 0 if cross else len(path.vertices)
            faces = points.get_facecolor()
            filled = len(faces) > 0 and faces[0][3] > 0  # type: ignore[arg-type,index]
            found[corners, filled] = found.get((corners, filled), 0) + count
    return found


def test_the_map_marks_what_cuts_documents_and_what_is_tight(
    tmp_path: Path, sketches: list[Figure], mistakes: Mistakes
) -> None:
    outcomes = [
        outcome(60, 4000, policy="balanced"), outcome(70, 3900), outcome(139, 3950, "tight"),
        outcome(50, 4400, kept=0.5),
        outcome(55, 4300, kept=0.94, policy="packed"), outcome(56, 4290, kept=0.96, policy="packed"),
        outcome(141, 4500, "tight", kept=0.3), outcome(900, 5000, "does not fit", kept=0.3),
    ]  # fmt: skip
    configuration_map(tmp_path / "m.png", outcomes, refusals={"does not fit in memory": 900, "long " * 60: 3})
    assert mistakes(sketches[0]) == []
    legend = [text.get_text() for text in sketches[0].legends[0].get_texts()]
    assert legend == [
        "packed", "wlb", "balanced", "fits", "fits tightly", "cuts documents: under 95% of the pairs",
        "cuts them and fits tightly", "does not fit", "memory of the device",
    ]  # fmt: skip
    found = marks(sketches[0])
    round_corners, triangle = max(c for c, _ in found), 4
    assert found == {
        (round_corners, True): 3, (triangle, True): 1, (round_corners, False): 2, (triangle, False): 1, (0, True): 1,
    }  # fmt: skip
    configuration_map(tmp_path / "m.png", outcomes[:2])
    assert [t.get_text() for t in sketches[1].legends[0].get_texts()][2:] == ["fits", "memory of the device"]


@pytest.mark.parametrize("memory_gib", [1, 20, 139, 2000])
@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_the_best_of_the_map_is_named_where_there_is_room(
    memory_gib: float, kept: float, tmp_path: Path, sketches: list[Figure], mistakes: Mistakes
) -> None:
    best = outcome(memory_gib, 100, kept=kept, policy="per_document_cp")
    rest = [outcome(m, rate) for m, rate in itertools.product((1, 10, 100, 2000), (20, 99))]
    configuration_map(tmp_path / "m.png", [best, *rest], refusals={"a": 1})
    assert mistakes(sketches[0]) == []
    axes = sketches[0].axes[0]
    [label] = axes.texts
    assert label.get_text().startswith("per_document_cp: data 4, tensor 2")
    assert ("40% of the pairs" in label.get_text()) == (kept < 1)
    words, room = Text.get_window_extent(label), axes.get_window_extent()
    assert room.x0 - 1 <= words.x0 and words.x1 <= room.x1 + 1
    assert words.y0 > axes.transData.transform((1, 100))[1]  # above all points


# Machado, Oliveira and Fernandes (2009): how linear RGB looks to who lacks one kind of cone.
EYES = {
    "all cones": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
LEAST_DIFFERENCE = 13.0
"""CIE 1976; 2.3 is just noticeable with two areas side by side."""


def lab(color: str, eye: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    given = np.array(to_rgba(color)[:3])
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(eye @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "colors",
    [
        {name: color for name, (color, hatch) in _SPLIT.items() if not hatch},  # hatching tells the others apart
        _MEMORY,
        {**TRACK_COLORS, "idle": IDLE, **{f"document {i}": color for i, color in enumerate(DOCUMENT_COLORS)}},
        {**_POLICY_COLORS, "memory of the device": VERMILION},
        {str(number): color for number, color in enumerate(_SOURCE_COLORS)},
    ],
    ids=["split", "memory", "timeline", "map", "sources"],
)
def test_colours_are_told_apart_by_the_colour_blind(colors: Mapping[str, str]) -> None:
    for who, eye in EYES.items():
        for one, other in itertools.combinations(colors, 2):
            difference = float(np.linalg.norm(lab(colors[one], eye) - lab(colors[other], eye)))
            assert difference > LEAST_DIFFERENCE, f"{one} and {other} look alike to who has {who}"


def test_every_cause_has_a_look_of_its_own() -> None:
    assert set(_SPLIT) == set(CAUSES)
    assert len({*_SPLIT.values(), _UNKNOWN_CAUSE}) == len(CAUSES) + 1
