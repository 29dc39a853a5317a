"""How long an attention kernel takes for query ranges of documents: by tiles, not by FLOP/s.

A kernel works on tiles of 128 queries; a tile walks over its keys in blocks of 64. The last blocks of a tile are masked
and cost more than their share of pairs: a document of 512 tokens is far from a quarter as fast per pair as one of 2048.

    time = floor + heads × Σ over tiles (tile + block × key blocks + masked block × masked blocks) / multiprocessors

A constant FLOP/s misses measured varlen times by a third; this form by about 5 % (docs/results/simulator.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from steelyard.cost.attention import pairs_array
from steelyard.domain.arrays import FloatArray, IntArray

TILE_QUERIES = 128
BLOCK_KEYS = 64
REFERENCE_HEAD_DIM = 128


@dataclass(frozen=True, eq=False)
class RangeCounts:
    """What a kernel does for one head: sums over query ranges, float64 of any one shape.

    Attributes:
        tiles, blocks, masked: tiles of 128 queries, key blocks of 64 that they walk over, and masked ones among them.
        rectangle: (query, key) pairs with the masked ones, as a kernel that cannot skip them computes.
        pairs: (query, key) pairs that the mask leaves.
        ranges, rows: query ranges, and their queries.
        scores: (query, key) pairs that are computed in strips of 128 queries, each against all keys up to its end.
    """

    tiles: FloatArray
    blocks: FloatArray
    masked: FloatArray
    rectangle: FloatArray
    pairs: FloatArray
    ranges: FloatArray
    rows: FloatArray
    scores: FloatArray

    def map(self, change: Callable[[FloatArray], FloatArray]) -> RangeCounts:
        """The same counts in another form."""
        return RangeCounts(*(change(getattr(self, f.name)) for f in dataclasses.fields(self)))


@dataclass(frozen=True)
class TileKernel:
    """A FlashAttention-type kernel.

    Attributes:
        floor_s: of one call.
        tile_s, block_s, masked_block_s: of a tile, of each of its key blocks, and extra of each masked one, on one
            multiprocessor, for a head of 128 channels.
        multiprocessors: that work on tiles side by side.
        backward_ratio: time of backward over forward.
        narrow_penalty: a head of 64 channels costs this times half of one of 128.
    """

    floor_s: float
    tile_s: float
    block_s: float
    masked_block_s: float
    multiprocessors: float
    backward_ratio: float
    narrow_penalty: float

    def forward_s(self, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the forward pass of `heads` heads, without the call's floor; of the shape of the counts."""
        return self._seconds(counts.tiles, counts.blocks, counts.masked, heads, head_dim)

    def full_forward_s(self, queries: int, keys: int, heads: int, head_dim: int) -> float:
        """Seconds without a mask: `queries` that all see `keys`."""
        tiles = -(-queries // TILE_QUERIES)
        blocks = np.array([tiles * -(-keys // BLOCK_KEYS)], dtype=np.float64)
        none = np.zeros(1)
        return float(self._seconds(np.array([float(tiles)]), blocks, none, heads, head_dim)[0])

    def _seconds(
        self, tiles: FloatArray, blocks: FloatArray, masked: FloatArray, heads: float, head_dim: int
    ) -> FloatArray:
        width = head_dim / REFERENCE_HEAD_DIM
        if head_dim < REFERENCE_HEAD_DIM:
            width *= 1 + (self.narrow_penalty - 1) * (REFERENCE_HEAD_DIM / head_dim - 1)
        one_head: FloatArray = (
            tiles * self.tile_s + blocks * self.block_s * width + masked * self.masked_block_s * width
        )
        return one_head * (heads / self.multiprocessors)

    def backward_s(self, forward_s: FloatArray, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the backward pass of ranges whose forward pass takes `forward_s`."""
        return forward_s * self.backward_ratio


@dataclass(frozen=True)
class UnfusedKernel:
    """Attention as batched matrix products with a softmax between them: all pairs, masked ones too, through memory.

    Attributes:
        floor_s: of one call (several kernels).
        flops_per_s: rate of the two matrix products.
        score_bytes: bytes that travel to and from memory per (query, key) pair and head, masked pairs included.
        memory_bytes_per_s: at this rate.
        backward_ratio: time of backward over forward.
    """

    floor_s: float
    flops_per_s: float
    score_bytes: float
    memory_bytes_per_s: float
    backward_ratio: float

    def forward_s(self, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the forward pass of `heads` heads, without the call's floor; of the shape of the counts."""
        per_pair_s = 4 * head_dim / self.flops_per_s + self.score_bytes / self.memory_bytes_per_s
        return counts.rectangle * (heads * per_pair_s)

    def backward_s(self, forward_s: FloatArray, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the backward pass of ranges whose forward pass takes `forward_s`."""
        return forward_s * self.backward_ratio


@dataclass(frozen=True)
class StripKernel:
    """Attention on the cores of a CPU: no tile is free beside another, so that every row, score and product counts.

    Queries are worked through in strips of 128, the last one as long as what is left, each against all keys up to its
    end; so a document of 64 tokens costs half of what one of 128 costs per token, where a tile kernel pads it.

    Attributes:
        floor_s: of one call.
        range_s: of a query range (a document or a task), all heads together.
        row_s: of a query row and head.
        channel_s: of a query row, head and channel: gathering, scaling, writing back.
        score_s: of a score and head: maximum, exponential, sum.
        product_s: of a score, head and channel: the two matrix products.
        backward_range_s, backward_row_s, backward_channel_s, backward_score_s, backward_product_s: the same of the
            backward pass, which computes the scores anew.
    """

    floor_s: float
    range_s: float
    row_s: float
    channel_s: float
    score_s: float
    product_s: float
    backward_range_s: float
    backward_row_s: float
    backward_channel_s: float
    backward_score_s: float
    backward_product_s: float

    def forward_s(self, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the forward pass of `heads` heads, without the call's floor; of the shape of the counts."""
        of_row, of_score = self.row_s + head_dim * self.channel_s, self.score_s + head_dim * self.product_s
        return _in_strips(counts, heads, self.range_s, of_row, of_score)

    def backward_s(self, forward_s: FloatArray, counts: RangeCounts, heads: float, head_dim: int) -> FloatArray:
        """Seconds of the backward pass with its call's floor; `forward_s` says nothing about it here."""
        of_row = self.backward_row_s + head_dim * self.backward_channel_s
        of_score = self.backward_score_s + head_dim * self.backward_product_s
        return _in_strips(counts, heads, self.backward_range_s, of_row, of_score) + self.floor_s * (counts.pairs > 0)

    def row_scores(self, head_dim: int) -> float:
        """What a query row costs besides its pairs, in pairs, both passes together: its own cost and its share of the
        triangle above the diagonal that a strip computes."""
        row_s = self.row_s + self.backward_row_s + head_dim * (self.channel_s + self.backward_channel_s)
        score_s = self.score_s + self.backward_score_s + head_dim * (self.product_s + self.backward_product_s)
        return row_s / score_s + (TILE_QUERIES - 1) / 2


def _in_strips(counts: RangeCounts, heads: float, range_s: float, row_s: float, score_s: float) -> FloatArray:
    seconds: FloatArray = counts.ranges * range_s + heads * (counts.rows * row_s + counts.scores * score_s)
    return seconds


AttentionKernel: TypeAlias = TileKernel | UnfusedKernel | StripKernel


def range_counts(start: IntArray, end: IntArray) -> RangeCounts:
    """The counts of each causal query range [start, end), float64 (ranges,)."""
    tiles, blocks, masked = tile_counts(start, end)
    rectangle: FloatArray = (end - start).astype(np.float64) * end
    rows = (end - start).astype(np.float64)
    pairs = pairs_array(start, end).astype(np.float64)
    last = rows - TILE_QUERIES * np.maximum(tiles - 1, 0)
    triangles = np.maximum(tiles - 1, 0) * (TILE_QUERIES * (TILE_QUERIES - 1) / 2) + last * (last - 1) / 2
    return RangeCounts(tiles, blocks, masked, rectangle, pairs, (rows > 0).astype(np.float64), rows, pairs + triangles)


def tile_counts(start: IntArray, end: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Tiles, key blocks and masked key blocks of each causal query range, in closed form; float64 (ranges,).

    Tile j of a range has the queries [a + 128j, min(a + 128(j + 1), b)) and sees the keys before its last query's end.
    Since 128 is twice 64, the blocks of all but the last tile add up to n'·⌈a/64⌉ + n'(n' + 1), n' = tiles − 1.
    """
    tiles = -(-(end - start) // TILE_QUERIES)
    before = np.maximum(tiles - 1, 0)
    first = -(-start // BLOCK_KEYS)
    last = -(-end // BLOCK_KEYS)
    blocks = np.where(tiles > 0, before * first + before * (before + 1) + last, 0)
    clear = (start + 1) // BLOCK_KEYS  # blocks that the first query of the first tile sees whole; two more per tile
    masked = before * (first + 2 - clear) + np.where(tiles > 0, last - clear - 2 * before, 0)
    return tiles.astype(np.float64), blocks.astype(np.float64), masked.astype(np.float64)
