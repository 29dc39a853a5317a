"""The closed form of tiles and blocks against counting, and kernels against the measurements they were fitted on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.attention_kernels import BLOCK_KEYS, TILE_QUERIES, StripKernel, UnfusedKernel, range_counts
from steelyard.cost.profiles import load_profile


def counted(start: int, end: int) -> tuple[int, int, int]:
    tiles = blocks = masked = 0
    for first in range(start, end, TILE_QUERIES):
        last = min(first + TILE_QUERIES, end)
        tiles += 1
        walked = -(-last // BLOCK_KEYS)
        blocks += walked
        # A block is clear if the tile's first query sees all of its keys.
        masked += sum(1 for b in range(walked) if (b + 1) * BLOCK_KEYS > first + 1)
    return tiles, blocks, masked


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_counts_are_those_of_counting(start: int, length: int) -> None:
    counts = range_counts(np.array([start]), np.array([start + length]))
    found = (int(counts.tiles[0]), int(counts.blocks[0]), int(counts.masked[0]))
    assert found == counted(start, start + length)
    assert counts.pairs[0] == sum(range(start + 1, start + length + 1))
    assert (counts.ranges[0], counts.rows[0]) == (int(length > 0), length)
    strips = [
        (first, min(first + TILE_QUERIES, start + length)) for first in range(start, start + length, TILE_QUERIES)
    ]
    assert counts.scores[0] == sum((last - first) * last for first, last in strips)


def test_time_is_additive_over_ranges_cut_at_tiles() -> None:
    kernel = load_profile("h200").kernel("fa2")
    whole = kernel.forward_s(range_counts(np.array([0]), np.array([8192])), 32, 128).sum()
    cut = kernel.forward_s(range_counts(np.array([0, 1024, 5120]), np.array([1024, 5120, 8192])), 32, 128).sum()
    assert whole == pytest.approx(cut)


def test_short_documents_cost_more_per_pair_than_long_ones() -> None:
    kernel = load_profile("h100").kernel("fa3")

    def per_pair(length: int) -> float:
        counts = range_counts(np.array([0]), np.array([length]))
        return float(kernel.forward_s(counts, 16, 128)[0] / counts.pairs[0])

    assert per_pair(128) > 2 * per_pair(16384)
    assert per_pair(512) > 1.3 * per_pair(16384)


def test_varlen_times_of_the_h200_are_met(shared_dir: Path) -> None:
    """A constant rate misses these by a third; tiles by less than 6 %."""
    table = json.loads((shared_dir / "validation" / "kernel_distca_profile.json").read_text())["tables"][1]
    kernel = load_profile("h200").kernel("fa2")
    rows = [p for p in table["points"] if p["cp"] == 1]
    tiles, constant = [], []
    for p in rows:
        counts = range_counts(np.array([0]), np.array([p["seg_len"]]))
        one = float(kernel.forward_s(counts, p["q_heads"], 128)[0])
        tiles.append((kernel.floor_s + p["n_segments"] * one) / (p["total_ms"] * 1e-3) - 1)
        flops = 4 * 128 * p["q_heads"] * p["n_segments"] * float(counts.pairs[0])
        constant.append(flops / 300e12 / (p["total_ms"] * 1e-3) - 1)
    assert np.abs(tiles).mean() < 0.06
    assert np.abs(constant).mean() > 0.25


def test_unfused_attention_pays_for_masked_pairs() -> None:
    kernel = UnfusedKernel(0.0, 1e12, 10.0, 1e12, 2.0)
    counts = range_counts(np.array([0]), np.array([1000]))
    assert kernel.forward_s(counts, 2, 64)[0] == pytest.approx(1000 * 1000 * 2 * (4 * 64 + 10) / 1e12)


def test_strips_count_rows_and_scores_and_nothing_that_is_not_there() -> None:
    kernel = StripKernel(7.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.25, 0.0)
    counts = range_counts(np.array([0, 100]), np.array([64, 101]))
    forward_s = kernel.forward_s(counts, 2, 4)
    assert forward_s.tolist() == [
        5 + 2 * (64 * (3 + 4 * 2) + 64 * 64 * (1 + 4 * 0.5)),
        5 + 2 * ((3 + 4 * 2) + 101 * (1 + 4 * 0.5)),
    ]
    assert kernel.backward_s(forward_s, counts, 2, 4).tolist() == [7 + 2 * 64 * 64 * 0.25, 7 + 2 * 101 * 0.25]
    # A row is worth as many pairs as make one pair more as dear: half a strip above the diagonal, and its own cost.
    per_score_s = 1 + 4 * 0.5 + 0.25
    assert kernel.row_scores(4) == pytest.approx(127 / 2 + (3 + 4 * 2) / per_score_s)
    rows = 128 * 40
    whole = range_counts(np.array([0]), np.array([rows]))
    total_s = float((kernel.forward_s(whole, 1, 4) + kernel.backward_s(forward_s[:1], whole, 1, 4))[0]) - 5 - 7
    assert total_s / per_score_s == pytest.approx(float(whole.pairs[0]) + rows * kernel.row_scores(4))
