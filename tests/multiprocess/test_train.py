"""Runs over 1, 2 and 4 ranks: the same losses and parameters, whatever shares the work and however often it stops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import train_ranks as on_rank
from train_ranks import (
    RankResult,
    small_config,
    with_attention,
    with_data,
    with_parallel,
    write_documents,
)

from steelyard.testing.pool import WorkerPool
from steelyard.train.checkpoint import complete_checkpoints
from steelyard.train.config import EvalConfig, OptimizerConfig, TrainConfig

LOSS_BOUND = 5e-7
"""Largest relative difference of a step's loss between numbers of ranks, 20 updates of 1e-4: fp32 rounding (measured
9e-8)."""
PARAMETER_BOUND = 1e-7
"""Largest difference of a parameter after them: a thousandth of one update (measured 6e-9)."""
FAST_BOUND = 2e-5
"""Both, where the rate is 1e-3 and eps 1e-8: AdamW amplifies the rounding of gradients near zero."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


def run(pool: WorkerPool, config: TrainConfig, ranks: int, stop_after: int | None = None) -> RankResult:
    """Rank 0's result, after a look that all ranks ended with the same parameters."""
    results: list[RankResult] = pool.run(on_rank.train_rank, pool.ranks, ranks, config, stop_after)[:ranks]
    for other in results[1:]:
        assert other.losses == results[0].losses
        for name, value in results[0].parameters.items():
            if name in other.parameters:  # a gathered state stands on rank 0 only
                np.testing.assert_array_equal(other.parameters[name], value, err_msg=name)
    return results[0]


def assert_same_run(
    one: RankResult, other: RankResult, loss_bound: float = LOSS_BOUND, parameter_bound: float = PARAMETER_BOUND
) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=loss_bound)
    assert one.parameters.keys() == other.parameters.keys() and one.parameters
    for name, value in one.parameters.items():
        np.testing.assert_allclose(other.parameters[name], value, atol=parameter_bound, rtol=0, err_msg=name)


def assert_identical(one: RankResult, other: RankResult) -> None:
    assert one.losses == other.losses
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(other.parameters[name], value, err_msg=name)


def test_balanced_equals_packed_on_any_number_of_ranks(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    # A small rate: AdamW divides by the gradient's size, so where a gradient is near zero its rounding is amplified.
    optimizer = OptimizerConfig(lr=1e-4, warmup_steps=2, eps=1e-6)
    base = with_attention(small_config(documents, tmp_path / "one", steps=20, optimizer=optimizer), policy="packed")
    reference = run(pool, base, 1)
    assert reference.losses[-1] < reference.losses[0]
    for policy, ranks in (("balanced", 2), ("balanced", 4), ("packed", 4)):
        config = small_config(documents, tmp_path / f"{policy}-{ranks}", steps=20, optimizer=optimizer)
        result = run(pool, with_attention(config, policy=policy), ranks)
        assert_same_run(reference, result)
        assert result.summary.tokens == reference.summary.tokens
        mean_imbalance = np.mean([r.work_max_over_mean for r in result.records])
        assert mean_imbalance > 1.1 if policy == "packed" else mean_imbalance <= 1.02


def test_same_seed_twice_is_bit_identical(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    configs = [
        with_parallel(with_data(small_config(documents, tmp_path / name, steps=10), batch_chunks=8), ping_pong=True)
        for name in "ab"
    ]
    assert_identical(*(run(pool, config, 4) for config in configs))


def test_fsdp2_and_accumulation_equal_ddp(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    """One optimizer step of eight chunks: as two ping-pong micro-batches, as four plain ones, and sharded."""
    optimizer = OptimizerConfig(lr=1e-4, warmup_steps=2, eps=1e-6)
    base = with_data(small_config(documents, tmp_path / "ddp", steps=5, optimizer=optimizer), batch_chunks=8)
    reference = run(pool, base, 2)
    for name, changes in {
        "plain": {"ping_pong": False},
        "fsdp2": {"data_parallel": "fsdp2"},
        "fsdp2-plain": {"data_parallel": "fsdp2", "ping_pong": False},
        "recomputed": {"checkpoint_token_wise": True},
    }.items():
        config = with_data(small_config(documents, tmp_path / name, steps=5, optimizer=optimizer), batch_chunks=8)
        assert_same_run(reference, run(pool, with_parallel(config, **changes), 2))


def test_evaluation_is_the_same_on_any_number_of_ranks_and_changes_nothing(
    pool: WorkerPool, documents: Path, tmp_path: Path
) -> None:
    def config(name: str, kind: str, every: int) -> TrainConfig:
        given = small_config(documents, tmp_path / name, steps=4, eval=EvalConfig(every_steps=every, chunks=8))
        return with_parallel(with_data(given, eval_fraction=0.3), data_parallel=kind)

    without = run(pool, config("none", "ddp", 0), 2)
    assert without.summary.eval_loss is None
    losses = []
    for name, kind, ranks in (("one", "ddp", 1), ("two", "ddp", 2), ("sharded", "fsdp2", 2)):
        result = run(pool, config(name, kind, 1), ranks)
        assert_same_run(without, result, FAST_BOUND, FAST_BOUND)
        losses.append(result.summary.eval_loss)
    np.testing.assert_allclose(losses, losses[0], rtol=FAST_BOUND)
    assert losses[0] != pytest.approx(without.losses[-1], rel=1e-4)


def test_lanes_that_run_dry_at_different_times(pool: WorkerPool, tmp_path: Path) -> None:
    """Four lanes, three long documents and a short one: the last rounds have chunks on some ranks only."""
    folder = tmp_path / "few"
    folder.mkdir()
    for name, length in (("a", 1300), ("b", 40), ("c", 700), ("d", 2100), ("e", 90)):
        (folder / f"{name}.txt").write_text("x y z " * (length // 6), encoding="utf-8")
    results = []
    for ranks in (1, 2, 4):
        given = small_config(folder, tmp_path / f"out{ranks}", steps=50)
        results.append(run(pool, with_data(given, epochs=1), ranks))
    tokens = sum(p.stat().st_size + 1 for p in folder.iterdir())
    for result in results:
        assert result.summary.tokens == tokens
        assert 2 <= result.summary.steps < 50
        assert_same_run(results[0], result, FAST_BOUND, FAST_BOUND)


@pytest.mark.parametrize(("ranks", "ranks_after"), [(2, 2), (4, 4), (2, 1), (2, 4)])
def test_a_stopped_run_goes_on_as_if_it_had_not(
    pool: WorkerPool, documents: Path, tmp_path: Path, ranks: int, ranks_after: int
) -> None:
    whole = run(pool, small_config(documents, tmp_path / "whole", steps=8), ranks)
    config = small_config(documents, tmp_path / "stopped", steps=8)
    first = run(pool, config, ranks, stop_after=3)
    assert first.summary.interrupted and first.summary.steps == 3
    assert [p.name for p in complete_checkpoints(config.checkpoint_dir)] == ["step-00000003"]
    second = run(pool, config, ranks_after)
    assert [r.step for r in second.records] == [4, 5, 6, 7, 8]
    joined = RankResult(second.summary, first.records + second.records, second.parameters)
    assert second.summary.tokens == whole.summary.tokens
    if ranks_after == ranks:
        assert_identical(whole, joined)
    else:
        assert_same_run(whole, joined, FAST_BOUND, FAST_BOUND)


def test_sharded_checkpoint_is_loaded_unsharded(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    config = with_parallel(small_config(documents, tmp_path / "run", steps=6), data_parallel="fsdp2")
    first = run(pool, config, 2, stop_after=3)
    second = run(pool, with_parallel(config, data_parallel="ddp"), 2)
    whole = run(pool, small_config(documents, tmp_path / "whole", steps=6), 2)
    joined = RankResult(second.summary, first.records + second.records, second.parameters)
    assert_same_run(whole, joined, FAST_BOUND, FAST_BOUND)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_token_weighted_loss(pool: WorkerPool, kind: str) -> None:
    """The case of practice: loss sums 2.0 of one token and 9.0 of nine make 1.1, not the mean of means 1.5."""
    draw = torch.Generator().manual_seed(0)

    def rows(count: int, loss_sum: float) -> torch.Tensor:
        values = torch.rand(count, 2, 2, generator=draw)
        return values * (loss_sum / values.sum())

    short, long = rows(1, 2.0), rows(9, 9.0)
    expected_gradient = torch.cat([short, long]).sum(0).numpy() / 10
    for cut in ([[short], [long]], [[short, short[:0]], [long[:4], long[4:]]]):
        for loss, gradient in pool.run(on_rank.token_weighted, 2, kind, cut):
            assert loss == pytest.approx(1.1, abs=1e-6)
            np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def test_a_rank_without_data_reports_it_everywhere(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    """A disk error on one rank ends the run on all of them, with the path, instead of leaving the others waiting."""
    config = small_config(documents, tmp_path / "out", steps=5)
    outcomes = pool.run(on_rank.train_with_broken_disk, pool.ranks, 2, config)[:2]
    assert [kind for kind, _ in outcomes] == ["PeerError", "DataError"]
    assert all("texts/7.txt: disk on fire" in message for _, message in outcomes)


@pytest.mark.parametrize(("policy", "kind"), [("balanced", "ddp"), ("packed", "ddp"), ("packed", "fsdp2")])
def test_a_slow_rank_is_named_with_its_work(
    pool: WorkerPool, documents: Path, tmp_path: Path, policy: str, kind: str
) -> None:
    given = with_attention(small_config(documents, tmp_path / "out", steps=4), policy=policy)
    config = with_parallel(given, data_parallel=kind)
    records = pool.run(on_rank.train_with_slow_rank, pool.ranks, 2, config, 1)[0]
    for record in records[1:]:
        assert f"slowest rank 1 (work {record.slowest_rank_work:.2f} of mean)" in record.log_line()
        assert record.idle_share > 0.1
        # The other rank waits for it: what it waited is on record.
        assert record.exposed_comm_s > 0.05
