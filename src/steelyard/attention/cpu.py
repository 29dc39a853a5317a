"""Core attention on CPU, from torch's CPU flash-attention operator and from matrix products (`tiles`).

The operator knows a full mask and a causal one aligned to the top left; a task needs one aligned to the bottom right.
So the tasks are computed in pieces (`blocks`): rectangles without a mask, and squares on the diagonal. Pieces with the
same queries are merged through log-sum-exp (`merge`). Backward computes the same pieces with the merged output and
log-sum-exp: the weights it recomputes are then the final ones, so each piece yields its exact part of the gradients.

Who computes what: rectangles go to the operator if they have queries enough for it, to `tiles` otherwise; squares go to
`tiles`, in strips, so that little is computed above the diagonal; documents of up to one strip are gathered and
computed together with others of the same length. Sliding windows and soft caps are computed by `tiles` alone.

Grouped heads never multiply K and V: the G query heads that share a key/value head are laid one behind another as one
long query; where the operator computes a square they are expanded with stride 0. Temporary memory is bounded by a few
blocks of queries, and in backward by the gradient of one document's keys and values.

M: tasks computed together, R: queries of a block, S: queries of a piece, N: keys of a piece, H: query heads,
K: key/value heads, G = H / K, D: head size.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from steelyard.attention import tiles
from steelyard.attention.blocks import Block, Cut, Piece, Squares, Stores, blocks, joined, short_squares
from steelyard.attention.merge import merge_into
from steelyard.attention.reference import accumulator_dtype
from steelyard.domain.arrays import IntArray
from steelyard.domain.plan import KernelTasks

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_ROWS_WIDENED = 256
_NEAR_KEYS = 1024

# Whether scores are bounded (`tiles`); found out when a piece first needs to know: the operator does not.
_Once: TypeAlias = Callable[[], bool]


class _Given(NamedTuple):
    """What backward is given of a block or piece: (K, G, R, D), and lse (K, G, R)."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, rows: slice) -> _Given:
        return _Given(*(x[:, :, rows] for x in self))


class Limits(NamedTuple):
    """How the work of one direction is cut, and who computes a piece. Numbers of queries; folded: times G.

    block: a task of twice as many or more is cut into blocks of `block` to twice `block`.
    gather: ranges of one document are gathered until a block has so many.
    operator: folded queries from which the operator computes a rectangle; `tiles` below.
    operator_near: the same for a rectangle of at most `_NEAR_KEYS` keys.
    square: queries from which the operator computes a range's square; strips in `tiles` below.
    """

    block: int
    gather: int
    operator: int
    operator_near: int
    square: int


def default_limits(dtype: torch.dtype, group: int, *, backward: bool) -> Limits:
    """What was fastest (docs/results/attention.md).

    Half types: the operator multiplies in bf16 and `tiles` in fp32, at less than half the rate where the processor has
    units for bf16 matrices; so forward the operator pays off early. Otherwise squares go to it only where no keys are
    expanded. In one block it needs the gradient of a square's keys once per query head: as much as of the queries.
    """
    if dtype.itemsize < 4:
        if backward:
            return Limits(2048, max(1, 2048 // group), operator=768, operator_near=512, square=1024)
        return Limits(8192, 1024, operator=128, operator_near=128, square=256)
    if group == 1:
        return Limits(8192, 1024, operator=768, operator_near=256, square=1024)
    block = max(1, (1536 if backward else 768) // group)
    return Limits(block, max(1, 1024 // group), operator=768, operator_near=768, square=sys.maxsize)


class CpuBackend:
    """Causal core attention; see `interface.Backend` for the two calls.

    Args:
        scale: factor on q·k.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        softcap: c in c·tanh(score / c), applied after the scale and before the mask; None: no cap.
        forward, backward: limits instead of `default_limits`.
        strip: queries of a strip of a square, and the longest document that is computed with others.
    """

    name = "cpu"
    DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(
        self,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        forward: Limits | None = None,
        backward: Limits | None = None,
        strip: int = 128,
    ) -> None:
        self.scale, self.window, self.softcap = scale, window, softcap
        self.strip = strip
        self._limits = {False: forward, True: backward}
        self._masks: dict[tuple[str, torch.dtype, bool], torch.Tensor] = {}

    def forward(self, tasks: KernelTasks, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores) -> None:
        limits = self._limits_of(q, k, backward=False)
        bounded = functools.cache(lambda: self._bounded_scores(q, k))
        work = joined(tasks)
        alone, squares = short_squares(work, self.strip)
        for square in self._in_tiles(squares, q[0].shape[1]):
            self._forward_squares(square, q, k, v, out, lse, bounded)
        for block in blocks(work, alone, limits.block, limits.gather):
            self._forward_block(block, limits, q, k, v, out, lse, bounded)

    def backward(
        self,
        tasks: KernelTasks,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
    ) -> None:
        limits = self._limits_of(q, k, backward=True)
        bounded = functools.cache(lambda: self._bounded_scores(q, k))
        work = joined(tasks)
        alone, squares = short_squares(work, self.strip)
        for square in self._in_tiles(squares, q[0].shape[1]):
            self._backward_squares(square, dout, q, k, v, out, lse, dq, dk, dv, bounded)
        for block in blocks(work, alone, limits.block, limits.gather):
            self._backward_block(block, limits, dout, q, k, v, out, lse, dq, dk, dv, bounded)

    def _forward_block(
        self, block: Block, limits: Limits, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores, bounded: _Once
    ) -> None:
        q_KGRD = block.of(q, k[0].shape[1])
        pieces = list(block.pieces(self._cut(limits, q_KGRD.shape[1])))
        wide = accumulator_dtype(q_KGRD.dtype)
        # Results are merged in their stores if they lie in one place there and need no wider type on the way.
        in_place = len(block.ranges) == 1 and (q_KGRD.dtype == wide or len(pieces) == 1)
        out_KGRD = block.of(out, len(q_KGRD)) if in_place else torch.empty(q_KGRD.shape, dtype=wide)
        lse_KGR = (
            block.of(_with_head_dim(lse), len(q_KGRD))[..., 0]
            if in_place
            else torch.empty(q_KGRD.shape[:3], dtype=wide)
        )
        for piece in pieces:
            q_KGSD, out_KGSD, lse_KGS = q_KGRD[:, :, piece.rows], out_KGRD[:, :, piece.rows], lse_KGR[:, :, piece.rows]
            if _operator_takes(piece, q_KGSD, limits):
                self._forward_by_operator(piece, q_KGSD, k, v, out_KGSD, lse_KGS)
            else:
                self._forward_by_tiles(piece, q_KGSD, k, v, out_KGSD, lse_KGS, bounded)
        if not in_place:
            block.put(out_KGRD, out)
            block.put(lse_KGR[..., None], _with_head_dim(lse))

    def _forward_by_operator(
        self,
        piece: Piece,
        q_KGSD: torch.Tensor,
        k: Stores,
        v: Stores,
        out_KGSD: torch.Tensor,
        lse_KGS: torch.Tensor,
    ) -> None:
        """Merge attention to the keys of a piece into out and lse, or write it there if the piece is fresh."""
        shape, fresh = q_KGSD.shape, piece.fresh
        folded = q_KGSD if piece.causal else q_KGSD.reshape(1, shape[0], -1, shape[3])
        for keys in piece.keys:
            k_part, v_part = (_expanded(keys.of(x), shape[1]) if piece.causal else keys.of(x)[None] for x in (k, v))
            out_part, lse_part = _FLASH(folded, k_part, v_part, 0.0, piece.causal, scale=self.scale)
            out_part, lse_part = out_part.view(shape), lse_part.view(shape[:3])
            if fresh:
                out_KGSD.copy_(out_part)
                lse_KGS.copy_(lse_part)
            else:
                merge_into(out_KGSD, lse_KGS, out_part, lse_part)
            fresh = False

    def _forward_by_tiles(
        self,
        piece: Piece,
        q_KGSD: torch.Tensor,
        k: Stores,
        v: Stores,
        out_KGSD: torch.Tensor,
        lse_KGS: torch.Tensor,
        bounded: _Once,
    ) -> None:
        """The same; going on from what is there costs less than merging."""
        kv_heads, _, rows, head_dim = q_KGSD.shape
        done = None
        if not piece.fresh:
            done_KGSD = torch.empty(out_KGSD.shape, dtype=out_KGSD.dtype).copy_(out_KGSD)
            done = tiles.Partial.of(
                done_KGSD.view(kv_heads, -1, head_dim), lse_KGS.reshape(kv_heads, -1), bounded=bounded()
            )
        done = tiles.forward(
            tiles.scaled(q_KGSD, self.scale, bounded=bounded()),
            [keys.of(k) for keys in piece.keys],
            [keys.of(v) for keys in piece.keys],
            self._mask("causal", lse_KGS.dtype, bounded())[:rows, :rows] if piece.causal else None,
            done,
            bounded=bounded(),
            edge_CE=self._edge(piece, rows, lse_KGS.dtype, bounded()),
            softcap=self.softcap,
        )
        torch.div(done.out.view(out_KGSD.shape), done.total.view(lse_KGS.shape)[..., None], out=out_KGSD)
        lse_KGS.copy_(done.lse.view(lse_KGS.shape))

    def _backward_block(
        self,
        block: Block,
        limits: Limits,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
        bounded: _Once,
    ) -> None:
        kv_heads = k[0].shape[1]
        q_KGRD, dout_KGRD, out_KGRD = (block.of(x, kv_heads) for x in (q, dout, out))
        lse_KGR = block.of(_with_head_dim(lse), kv_heads)[..., 0]
        wide = accumulator_dtype(q_KGRD.dtype)
        pieces = list(block.pieces(self._cut(limits, q_KGRD.shape[1])))
        in_place = len(block.ranges) == 1 and (q_KGRD.dtype == wide or len(pieces) == 1)
        dq_KGRD = block.of(dq, kv_heads) if in_place else torch.empty(q_KGRD.shape, dtype=wide)
        given = _Given(dout_KGRD, q_KGRD, out_KGRD, lse_KGR)
        for piece in pieces:
            part, dq_KGSD = given.rows(piece.rows), dq_KGRD[:, :, piece.rows]
            if _operator_takes(piece, part.q, limits):
                self._backward_by_operator(part, piece, k, v, dq_KGSD, dk, dv)
            else:
                self._backward_by_tiles(part, piece, k, v, dq_KGSD, dk, dv, bounded)
        if not in_place:
            block.put(dq_KGRD, dq)

    def _backward_by_operator(
        self,
        given: _Given,
        piece: Piece,
        k: Stores,
        v: Stores,
        dq_KGSD: torch.Tensor,
        dk: Stores,
        dv: Stores,
    ) -> None:
        """Add the gradients of one piece; dq is written instead if the piece is fresh.

        Groups are folded, or, on the diagonal, expanded and summed.
        """
        kv_heads, group = given.q.shape[:2]
        dout, q, out, lse = given
        if not piece.causal:
            dout, q, out = (x.reshape(1, kv_heads, -1, x.shape[-1]) for x in (dout, q, out))
            lse = lse.reshape(1, kv_heads, -1)
        fresh = piece.fresh
        for keys in piece.keys:
            k_part, v_part = (_expanded(keys.of(x), group) if piece.causal else keys.of(x)[None] for x in (k, v))
            dq_part, *dkv_part = _FLASH_BACKWARD(dout, q, k_part, v_part, out, lse, 0.0, piece.causal, scale=self.scale)
            _add(dq_KGSD, dq_part, fresh=fresh)
            fresh = False
            for stores, grad in zip((dk, dv), dkv_part, strict=True):
                if piece.causal:
                    of_heads = grad.sum(1, dtype=stores[0].dtype) if group > 1 else grad[:, 0]
                else:
                    of_heads = grad[0]
                keys.of(stores).add_(of_heads)

    def _backward_by_tiles(
        self,
        given: _Given,
        piece: Piece,
        k: Stores,
        v: Stores,
        dq_KGSD: torch.Tensor,
        dk: Stores,
        dv: Stores,
        bounded: _Once,
    ) -> None:
        """The same, with sums in the type of dk and dv."""
        kv_heads, _, rows, head_dim = given.q.shape
        dout_KGSD = given.dout.to(dk[0].dtype)
        dq_KSD = tiles.backward(
            tiles.scaled(given.q, self.scale, bounded=bounded()),
            dout_KGSD.reshape(kv_heads, -1, head_dim),
            given.lse.reshape(kv_heads, -1),
            (dout_KGSD * given.out).sum(-1).view(kv_heads, -1),
            [keys.of(k) for keys in piece.keys],
            [keys.of(v) for keys in piece.keys],
            [keys.of(dk) for keys in piece.keys],
            [keys.of(dv) for keys in piece.keys],
            self._mask("causal", dk[0].dtype, bounded())[:rows, :rows] if piece.causal else None,
            self.scale,
            bounded=bounded(),
            edge_CE=self._edge(piece, rows, dk[0].dtype, bounded()),
            softcap=self.softcap,
        )
        _add(dq_KGSD, dq_KSD, fresh=piece.fresh)

    def _limits_of(self, q: Stores, k: Stores, *, backward: bool) -> Limits:
        group = q[0].shape[1] // k[0].shape[1]
        limits = self._limits[backward] or default_limits(q[0].dtype, group, backward=backward)
        if self.softcap is None:
            return limits
        # The operator knows no cap. Blocks are as long as `tiles` computes well.
        block = min(limits.block, max(1, (1536 if backward else 768) // group))
        return Limits(block, min(limits.gather, max(1, 1024 // group)), *(sys.maxsize,) * 3)

    def _cut(self, limits: Limits, group: int) -> Cut:
        """A range's keys before it go to `tiles` together with its square, if they go there."""
        return Cut(self.strip, fused=(limits.operator - 1) // group, whole_square=limits.square, window=self.window)

    def _mask(self, kind: str, dtype: torch.dtype, bounded: bool) -> torch.Tensor:
        """A mask of `strip` queries: "causal", "edge" of the window, or both of them in a "square"."""
        key = (kind, dtype, bounded)
        if key not in self._masks:
            side, window = self.strip, self.window
            if kind == "edge":
                self._masks[key] = tiles.window_edge(side, dtype, bounded=bounded)
            elif kind == "square" and window is not None:
                self._masks[key] = tiles.band_mask(side, window, dtype, bounded=bounded)
            else:
                self._masks[key] = tiles.causal_mask(side, dtype, bounded=bounded)
        return self._masks[key]

    def _edge(self, piece: Piece, rows: int, dtype: torch.dtype, bounded: bool) -> torch.Tensor | None:
        """The mask over the first keys of a strip under the window."""
        if piece.edge is None or piece.edge.start >= piece.edge.stop:
            return None
        return self._mask("edge", dtype, bounded)[:rows, piece.edge]

    def _bounded_scores(self, q: Stores, k: Stores) -> bool:
        """Whether no query of these stores can score above `tiles.SCORE_BOUND` with any key; NaN says no."""
        if self.softcap is not None and self.softcap <= tiles.SCORE_BOUND:
            return True
        longest_queries, longest_keys = ([_longest(x) for x in stores if len(x)] for stores in (q, k))
        factor = abs(self.scale)
        return all(factor * a * b <= tiles.SCORE_BOUND for a in longest_queries for b in longest_keys)

    def _in_tiles(self, squares: Sequence[Squares], heads: int) -> Iterator[Squares]:
        """Cut groups of squares so that their scores fit into one tile."""
        for group in squares:
            limit = max(1, tiles.BACKWARD_TILE // (heads * group.length * group.length))
            for first in range(0, len(group.q_row), limit):
                part = slice(first, first + limit)
                yield group._replace(q_row=group.q_row[part], k_row=group.k_row[part])

    def _forward_squares(
        self, square: Squares, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores, bounded: _Once
    ) -> None:
        kv_heads = k[0].shape[1]
        q_rows, k_rows = _row_table(square.q_row, square.length), _row_table(square.k_row, square.length)
        q_BRD = _gathered(q[square.q_store], q_rows, kv_heads)
        k_BND, v_BND = (_gathered(x[square.k_store], k_rows, kv_heads) for x in (k, v))
        done = tiles.forward(
            tiles.scaled(q_BRD[:, None], self.scale, bounded=bounded()),
            [k_BND],
            [v_BND],
            self._mask("square", q_BRD.dtype, bounded())[: square.length, : square.length],
            bounded=bounded(),
            softcap=self.softcap,
        )
        _scatter(out[square.q_store], q_rows, done.out.div_(done.total), kv_heads)
        _scatter(_with_head_dim(lse)[square.q_store], q_rows, done.lse, kv_heads)

    def _backward_squares(
        self,
        square: Squares,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
        bounded: _Once,
    ) -> None:
        kv_heads = k[0].shape[1]
        q_rows, k_rows = _row_table(square.q_row, square.length), _row_table(square.k_row, square.length)
        q_BRD, dout_BRD, out_BRD, lse_BR1 = (
            _gathered(x[square.q_store], q_rows, kv_heads) for x in (q, dout, out, _with_head_dim(lse))
        )
        k_BND, v_BND = (_gathered(x[square.k_store], k_rows, kv_heads) for x in (k, v))
        dk_BND, dv_BND = torch.zeros_like(k_BND), torch.zeros_like(v_BND)
        dq_BRD = tiles.backward(
            tiles.scaled(q_BRD[:, None], self.scale, bounded=bounded()),
            dout_BRD,
            lse_BR1[..., 0],
            (dout_BRD * out_BRD).sum(-1),
            [k_BND],
            [v_BND],
            [dk_BND],
            [dv_BND],
            self._mask("square", q_BRD.dtype, bounded())[: square.length, : square.length],
            self.scale,
            bounded=bounded(),
            softcap=self.softcap,
        )
        _scatter(dq[square.q_store], q_rows, dq_BRD, kv_heads)
        for stores, grad_BND in ((dk, dk_BND), (dv, dv_BND)):
            stores[square.k_store].index_add_(0, k_rows.flatten(), _as_rows(grad_BND, k_rows, kv_heads))


def _operator_takes(piece: Piece, q_KGSD: torch.Tensor, limits: Limits) -> bool:
    if piece.edge is not None:
        return False
    if piece.causal:
        return q_KGSD.shape[2] >= limits.square
    keys = sum(run.rows.stop - run.rows.start for run in piece.keys)
    enough = limits.operator_near if keys <= _NEAR_KEYS else limits.operator
    return q_KGSD.shape[1] * q_KGSD.shape[2] >= enough


def _add(total_KGSD: torch.Tensor, part: torch.Tensor, *, fresh: bool) -> None:
    """Add a part of the same elements, or write it if there is nothing yet."""
    part_KGSD = part.view(total_KGSD.shape)
    if fresh:
        total_KGSD.copy_(part_KGSD)
    else:
        total_KGSD.add_(part_KGSD)


def _longest(x_THD: torch.Tensor) -> float:
    """Largest Euclidean norm of a head's row; NaN and infinity come through."""
    wide = accumulator_dtype(x_THD.dtype)
    # Half types are widened part by part.
    parts = (x_THD,) if x_THD.dtype == wide else torch.split(x_THD, _ROWS_WIDENED)
    return float(torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=wide).max() for part in parts]).max())


def _with_head_dim(lse: Stores) -> list[torch.Tensor]:
    """(T, H) stores as (T, H, 1), views."""
    return [store[..., None] for store in lse]


def _expanded(x_KND: torch.Tensor, group: int) -> torch.Tensor:
    """(K, N, D) as (K, G, N, D), a view with stride 0."""
    return x_KND[:, None].expand(-1, group, -1, -1)


def _row_table(first_row: IntArray, length: int) -> torch.Tensor:
    """Rows (M, length) of runs that begin at `first_row`."""
    return torch.from_numpy(first_row[:, None] + np.arange(length))


def _gathered(x_THD: torch.Tensor, rows_MR: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Rows of a (T, H, D) store as (M·K, G·R, D), a wide copy."""
    tasks, length = rows_MR.shape
    x_MRKGD = x_THD[rows_MR].view(tasks, length, kv_heads, -1, x_THD.shape[-1])
    x_MKGRD = x_MRKGD.to(accumulator_dtype(x_THD.dtype)).permute(0, 2, 3, 1, 4)
    return x_MKGRD.reshape(tasks * kv_heads, -1, x_THD.shape[-1])


def _as_rows(x_BRD: torch.Tensor, rows_MR: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The inverse of `_gathered`: (M·K, G·R, D) as (M·R, H, D)."""
    tasks, length = rows_MR.shape
    x_MKGRD = x_BRD.view(tasks, kv_heads, -1, length, x_BRD.shape[-1])
    return x_MKGRD.permute(0, 3, 1, 2, 4).reshape(tasks * length, -1, x_BRD.shape[-1])


def _scatter(x_THD: torch.Tensor, rows_MR: torch.Tensor, x_BRD: torch.Tensor, kv_heads: int) -> None:
    x_THD[rows_MR.flatten()] = _as_rows(x_BRD, rows_MR, kv_heads).to(x_THD.dtype)
