"""Published measurements: the shipped tables are the given ones, errors stay where they are, roles do not mix."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.errors import UsageError
from steelyard.simulate.microbenchmarks import measurements
from steelyard.simulate.published import cases_of, points_of
from steelyard.simulate.validate import (
    Comparison,
    SourceReport,
    load_tables,
    ranking,
    ranking_with_errors,
    validate,
)

SHIPPED = load_tables()


@cache
def reports(name: str) -> dict[str, SourceReport]:
    """A shipped table against the simulator, by role. Once for all tests: it takes seconds."""
    return {r.role: r for r in validate({name: SHIPPED[name]})}


def held_out(name: str) -> SourceReport:
    return reports(name)["held_out"]


def test_shipped_tables_are_the_published_ones(shared_dir: Path) -> None:
    given = load_tables(shared_dir / "validation")
    assert set(SHIPPED) - set(given) == {"distca_runs"}
    for name, content in given.items():
        for ours, theirs in zip(SHIPPED[name]["tables"], content["tables"], strict=True):
            for a, b in zip(points_of(ours), theirs["points"], strict=True):
                known = {k: v for k, v in b.items() if v is not None}
                assert set(a) == set(known)
                assert all(a[k] == (pytest.approx(v) if isinstance(v, float) else v) for k, v in known.items())


@pytest.mark.parametrize(
    ("name", "limit"),
    [("korthikanti_2022_recompute", 7), ("megascale_2024", 6), ("llama3_405b", 10.5), ("nvidia_nemo_long_sequence", 8),
     ("mosaicml_llm_foundry_mpt", 9), ("vtrain_a100_multi_node", 9), ("kernel_flash_attention", 6),
     ("torchtitan", 10.5)],
)  # fmt: skip
def test_held_out_errors(name: str, limit: float) -> None:
    assert held_out(name).as_json()["mean_abs_pct_error"] < limit


def test_weak_scaling_in_bf16_is_within_seven_per_cent() -> None:
    report = held_out("nvidia_dgxc_h100_weak_scaling")
    errors = [abs(c.error) for c in report.of("time") if "BF16" in c.table]
    assert len(errors) > 50
    assert np.mean(errors) < 0.05


def test_weak_scaling_in_fp8_has_no_model_that_is_far_off() -> None:
    """Gradients of interleaved pipelines, and 16-bit ones where the files say so, were what 340B lacked."""
    errors: dict[str, list[float]] = {}
    for c in held_out("nvidia_dgxc_h100_weak_scaling").of("time"):
        if "fp8" in c.label:
            errors.setdefault(c.label.split(",")[0], []).append(abs(c.error))
    assert np.mean(errors["nemotron4-340b"]) < 0.05
    assert max(float(np.mean(e)) for e in errors.values()) < 0.13


def test_the_order_of_the_single_node_grid() -> None:
    tau = held_out("vtrain_a100_single_node").as_json()["kendall_tau"]
    assert tau >= 0.8


def test_no_published_out_of_memory_run_is_called_fitting() -> None:
    report = held_out("burstengine_1m_context")
    assert sum(report.out_of_memory.values()) > 8
    assert "fits" not in report.out_of_memory


def test_a_wrong_measurement_shows() -> None:
    """Doubling the measured times must double the error: nothing is looked up."""
    content = json.loads(json.dumps(SHIPPED["megascale_2024"]))
    place = content["tables"][0]["columns"].index("step_time_s")
    for row in content["tables"][0]["rows"]:
        row[place] *= 2
    [report] = validate({"megascale_2024": content})
    assert report.as_json()["mean_abs_pct_error"] > 40


def test_every_row_is_compared_or_excluded_with_a_reason() -> None:
    for name in ("torchtitan", "megascale_2024", "llama3_405b", "nanotron_best_configs"):
        content = SHIPPED[name]
        rows = sum(len(t["rows"]) for t in content["tables"])
        found = reports(name).values()
        compared = {(c.table, c.label, i) for r in found for i, c in enumerate(r.of("time"))}
        memory_only = [c for r in found for c in r.of("memory")]
        excluded = sum(n for r in found for n in r.excluded.values())
        assert excluded + max(len(compared), len(memory_only)) <= rows
        assert all(reason for r in found for reason in r.excluded)


def test_fitted_rows_are_never_in_the_held_out_report() -> None:
    cases = cases_of("nvidia_dgxc_h100_weak_scaling", SHIPPED["nvidia_dgxc_h100_weak_scaling"])
    fitted = [c for c in cases if c.role == "fitted"]
    assert len(fitted) == 8
    assert {c.scenario.model.name for c in fitted if c.scenario} == {
        "llama3-8b", "llama3-70b", "nemotron4-15b", "gpt3-175b",
    }  # fmt: skip


def test_rows_behind_the_backward_ratio_are_fitted() -> None:
    found = measurements("kernel_flash_attention", SHIPPED["kernel_flash_attention"])
    backward = [m for m in found if not m.excluded and "H100" in m.label and " bwd " in m.label]
    lengths = {
        role: {int(m.label.split(", ")[1]) for m in backward if m.role == role} for role in ("fitted", "held_out")
    }
    assert min(lengths["fitted"]) == 2048
    assert max(lengths["held_out"]) < 2048


@pytest.mark.parametrize(
    ("name", "reason"), [("torchtitan", "times with a context axis"), ("megatron_lm", "times in deterministic mode")]
)
def test_times_that_are_left_out_are_counted_with_their_reason(name: str, reason: str) -> None:
    cases = cases_of(name, SHIPPED[name])
    memory_only = [c for c in cases if c.scenario is not None and c.step_time_s is None and not c.out_of_memory]
    assert memory_only
    assert all(c.time_excluded.startswith(reason) for c in memory_only)
    [excluded] = [n for r, n in held_out(name).excluded.items() if r.startswith(reason)]
    assert excluded == len(memory_only)


def test_ranking() -> None:
    def row(predicted: float, measured: float) -> Comparison:
        return Comparison("s", "t", "l", "held_out", "time", predicted, measured, "g")

    assert ranking([row(1, 1), row(2, 2), row(3, 3)]) == 1
    assert ranking([row(3, 1), row(2, 2), row(1, 3)]) == -1
    assert ranking([row(1, 1), row(2, 2)]) is None


def test_ranking_with_random_errors() -> None:
    far = [Comparison("s", "t", "l", "held_out", "time", 0.0, 2.0**k, "g") for k in range(6)]
    near = [Comparison("s", "t", "l", "held_out", "time", 0.0, 1 + k / 1000, "g") for k in range(6)]
    assert ranking_with_errors(far, 0.02) == (1.0, 0.0)
    mean, spread = ranking_with_errors(near, 0.05, draws=200)
    assert abs(mean) < 0.15  # nothing is left of an order that is finer than the errors
    assert spread > 0.1
    assert ranking_with_errors(near, 0.05) == ranking_with_errors(near, 0.05)
    better, _ = ranking_with_errors(near, 0.001, draws=200)
    assert better > mean + 0.3
    with pytest.raises(UsageError, match="no group of three"):
        ranking_with_errors(far[:2], 0.05)


def test_what_sources_say_of_gradients_and_networks() -> None:
    cases = {s: [c for c in cases_of(s, SHIPPED[s]) if c.scenario] for s in SHIPPED if s.startswith(("vtrain", "mega"))}
    weak = cases_of("nvidia_dgxc_h100_weak_scaling", SHIPPED["nvidia_dgxc_h100_weak_scaling"])
    sixteen = {c.scenario.model.name for c in weak if c.scenario and c.scenario.gradient_bytes == 2}
    assert sixteen == {"gpt3-175b", "nemotron4-340b"}
    multi, single = (
        {
            (c.scenario.profile.network_bytes_per_s, c.scenario.gradient_bytes)
            for c in cases[f"vtrain_a100_{n}"]
            if c.scenario
        }
        for n in ("multi_node", "single_node")
    )
    assert multi == {(11.5e9, 2)}
    assert single == {(23e9, 2)}
    assert not any(c.scenario.gradient_overlap for c in cases["megascale_2024"] if c.scenario)


def test_a_further_table_of_the_users_own(tmp_path: Path) -> None:
    point: dict[str, Any] = {
        "model": "llama3-8b", "gpu": "H100", "n_gpus": 8, "seq_len": 8192, "micro_batch": 1, "global_batch": 8,
        "fsdp": 8, "step_time_s": 1.0,
    }  # fmt: skip
    table = {"schema": "validation-table/1", "tables": [{"title": "mine", "points": [point, {"n_gpus": 8}]}]}
    (tmp_path / "mine.json").write_text(json.dumps(table))
    [report] = validate(load_tables(tmp_path))
    assert len(report.of("time")) == 1
    assert list(report.excluded) == ["the model's shape is not stated"]


def test_folders_without_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \*\.json in it"):
        load_tables(tmp_path)
    with pytest.raises(UsageError, match="there is no such folder"):
        load_tables(tmp_path / "none")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UsageError, match="has schema None, expected 'validation-table/1'"):
        load_tables(tmp_path)
