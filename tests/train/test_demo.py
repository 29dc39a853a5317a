"""What the demo predicts and which run it draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.train.demo import DemoRun, batch_time_s, predicted_speedup, typical_run

TOKENS = 100


def a_run(
    pairs: tuple[int, ...], *, slow: tuple[float, ...] = (1.0, 1.0), batch: int = 1, waits_s: float = 0.0
) -> DemoRun:
    """Ranks that take 2 s for token-wise layers and a second for 1000 pairs, each times `slow`."""
    attention_s = [factor * p / 1000 for p, factor in zip(pairs, slow, strict=True)]
    busy_s = [2 * factor + a for a, factor in zip(attention_s, slow, strict=True)]
    fair = sum(pairs) / len(pairs)
    return DemoRun(
        batch, max(busy_s) + waits_s, 1.0, 2 * TOKENS, tuple(busy_s), tuple(attention_s), pairs,
        (fair,) * len(pairs),
    )  # fmt: skip


@pytest.mark.parametrize("slow", [(1.0, 1.0), (1.5, 1.0)])
def test_the_prediction_is_exact_where_time_is_work(slow: tuple[float, float]) -> None:
    packed = [a_run((9000, 1000), slow=slow), a_run((4000, 8000), slow=slow, batch=2)]
    balanced = [a_run((5000, 5000), slow=slow), a_run((6000, 6000), slow=slow, batch=2)]
    expected = sum(run.time_s for run in packed) / sum(run.time_s for run in balanced)
    assert predicted_speedup({"packed": packed, "balanced": balanced}) == pytest.approx(expected)


def test_a_disturbed_run_does_not_count() -> None:
    runs = [a_run((6000, 4000), waits_s=w) for w in (0.0, 50.0, 0.0)] + [a_run((9000, 1000), batch=2)]
    undisturbed = [runs[0], runs[3]]
    expected = sum(run.time_s for run in undisturbed)
    assert batch_time_s(runs, [run.time_s for run in runs]) == pytest.approx(expected)


def test_nothing_of_a_balanced_run_but_its_work_enters_the_prediction() -> None:
    runs = {"packed": [a_run((9000, 1000))], "balanced": [a_run((5000, 5000))]}
    disturbed = {**runs, "balanced": [replace(runs["balanced"][0], time_s=99.0, busy_s=(98.0, 97.0))]}
    assert predicted_speedup(disturbed) == predicted_speedup(runs)


def test_the_drawn_run_is_of_the_middling_batch_and_the_least_disturbed() -> None:
    work = [(6000, 4000), (7000, 3000), (7000, 3000), (9000, 1000)]
    packed = [a_run(w, batch=b, waits_s=s) for w, b, s in zip(work, (1, 2, 2, 3), (0, 5, 0, 0), strict=True)]
    balanced = [a_run((5000, 5000), batch=b) for b in (1, 2, 2, 3)]
    assert typical_run({"packed": packed, "balanced": balanced}) == 2
