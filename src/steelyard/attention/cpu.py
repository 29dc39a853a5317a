"""Core attention on CPU, from torch's CPU flash-attention operator and from matrix products (`tiles`).

The operator knows a full mask and a causal one aligned to the top left; a task needs one aligned to the bottom right.
So a block of queries is computed in pieces: all keys before the block without a mask, then the square on the diagonal.
Pieces are merged through log-sum-exp (`merge`). Backward computes the same pieces with the merged output and
log-sum-exp: the weights it recomputes are then the final ones, so each piece yields its exact part of the gradients.

Who computes what: the keys before a block go to the operator if the block is long enough for it, to `tiles` otherwise;
squares go to `tiles`, in strips, so that little is computed above the diagonal; documents of up to one strip are
gathered and computed together with others of the same length. Half types use the operator for all but the latter.

Grouped heads never multiply K and V: the G query heads that share a key/value head are laid one behind another as one
long query; where the operator computes a square they are expanded with stride 0. Temporary memory is bounded by a few
blocks of queries, and in backward by the gradient of one document's keys and values.

M: tasks computed together, R: queries of a block, N: keys of a piece, H: query heads, K: key/value heads, G = H / K,
D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from steelyard.attention import tiles
from steelyard.attention.merge import merge
from steelyard.attention.reference import accumulator_dtype
from steelyard.domain.arrays import IntArray
from steelyard.domain.plan import KernelTasks

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Blocks begin at multiples of this many rows of their task, where the products are a little faster.
_ROW_UNIT = 32

Stores: TypeAlias = Sequence[torch.Tensor]


class _Keys(NamedTuple):
    """A run of key rows of one store."""

    store: int
    rows: slice

    def of(self, stores: Stores) -> torch.Tensor:
        """These rows of a (T, K, D) store as (K, N, D), a view."""
        return stores[self.store][self.rows].transpose(0, 1)


class _Block(NamedTuple):
    """Queries of one task that are computed together, the key runs before them, and their own square."""

    store: int
    rows: slice
    before: tuple[_Keys, ...]
    square: _Keys

    def of(self, stores: Stores, kv_heads: int) -> torch.Tensor:
        """The block's rows of a (T, H, D) store as (K, G, R, D), a view."""
        rows_KGD: torch.Tensor = stores[self.store][self.rows].unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
        return rows_KGD.permute(1, 2, 0, 3)


class _Given(NamedTuple):
    """What backward is given of a block or strip: (K, G, R, D), and lse (K, G, R)."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def strip(self, rows: slice) -> _Given:
        return _Given(*(x[:, :, rows] for x in self))


class _Squares(NamedTuple):
    """Tasks of equal length whose keys are their own rows: first rows (M,) of queries and keys in their stores."""

    q_store: int
    k_store: int
    length: int
    q_row: IntArray
    k_row: IntArray


class CpuBackend:
    """Plain causal core attention; see `interface.Backend` for the two calls.

    Args:
        scale: factor on q·k.
        forward_rows, backward_rows: folded queries (rows × G) of a block, at least; less than twice as many.
        operator_rows: folded queries from which the operator is faster than `tiles` on the keys before a block.
        square_rows: rows from which the operator computes a square of heads that are not grouped.
        ungrouped_rows: as forward_rows and backward_rows, for G = 1.
        strip: queries of a strip of a square, and the longest document that is computed with others.
    """

    name = "cpu"
    DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(
        self,
        *,
        scale: float,
        forward_rows: int = 768,
        backward_rows: int = 1536,
        operator_rows: int = 768,
        square_rows: int = 1024,
        ungrouped_rows: int = 4096,
        strip: int = 128,
    ) -> None:
        self.scale = scale
        self.forward_rows = forward_rows
        self.backward_rows = backward_rows
        self.operator_rows = operator_rows
        self.square_rows = square_rows
        self.ungrouped_rows = ungrouped_rows
        self.strip = strip
        self._masks: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def forward(self, tasks: KernelTasks, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores) -> None:
        kv_heads = k[0].shape[1]
        group = q[0].shape[1] // kv_heads
        bounded = self._bounded_scores(q, k)
        alone, squares = _together(tasks, self.strip)
        for square in self._in_tiles(squares, q[0].shape[1]):
            self._forward_squares(square, q, k, v, out, lse, bounded)
        for block in _blocks(tasks, alone, self._limit(group, self.forward_rows)):
            self._forward_block(block, q, k, v, out, lse, bounded)

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
        group = q[0].shape[1] // k[0].shape[1]
        bounded = self._bounded_scores(q, k)
        alone, squares = _together(tasks, self.strip)
        for square in self._in_tiles(squares, q[0].shape[1]):
            self._backward_squares(square, dout, q, k, v, out, lse, dq, dk, dv, bounded)
        for block in _blocks(tasks, alone, self._limit(group, self.backward_rows)):
            self._backward_block(block, dout, q, k, v, out, lse, dq, dk, dv, bounded)

    def _forward_block(
        self, block: _Block, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores, bounded: bool
    ) -> None:
        kv_heads = k[0].shape[1]
        q_KGRD, out_KGRD = block.of(q, kv_heads), block.of(out, kv_heads)
        lse_KGR1 = block.of(_with_head_dim(lse), kv_heads)
        before = self._forward_before(block, q_KGRD, k, v, bounded)
        if self._operator_takes_square(q_KGRD):
            result = self._operator_square(block, q_KGRD, k, v)
            if before is not None:
                result = merge(*before, *result)
            out_KGRD.copy_(result[0])
            lse_KGR1.copy_(result[1][..., None])
            return
        k_KND, v_KND = block.square.of(k), block.square.of(v)
        for rows in self._strips(q_KGRD):
            q_KGSD = q_KGRD[:, :, rows]
            done = None
            if before is not None:
                out_KGSD, lse_KGS = before[0][:, :, rows], before[1][:, :, rows]
                done = tiles.Partial.of(
                    out_KGSD.reshape(kv_heads, -1, q_KGSD.shape[3]), lse_KGS.reshape(kv_heads, -1), bounded=bounded
                )
            done = tiles.forward(
                tiles.scaled(q_KGSD, self.scale, bounded=bounded),
                [k_KND[:, : rows.stop]],
                [v_KND[:, : rows.stop]],
                self._mask(q_KGSD.shape[2], q_KGSD.dtype, bounded),
                done,
                bounded=bounded,
            )
            by_head = (*q_KGSD.shape[:3], -1)
            torch.div(done.out.view(by_head), done.total.view(by_head), out=out_KGRD[:, :, rows])
            lse_KGR1[:, :, rows] = done.lse.view(by_head)

    def _forward_before(
        self, block: _Block, q_KGRD: torch.Tensor, k: Stores, v: Stores, bounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output (K, G, R, D) and log-sum-exp (K, G, R) over the keys before the block; None if there are none."""
        if not block.before:
            return None
        shape = q_KGRD.shape
        if not self._operator_takes(q_KGRD):
            done = tiles.forward(
                tiles.scaled(q_KGRD, self.scale, bounded=bounded),
                [keys.of(k) for keys in block.before],
                [keys.of(v) for keys in block.before],
                None,
                bounded=bounded,
            )
            return done.out.div_(done.total).view(shape), done.lse.view(shape[:3])
        q_1KRD = q_KGRD.reshape(1, shape[0], -1, shape[3])
        result = None
        for keys in block.before:
            out_1KRD, lse_1KR = _FLASH(q_1KRD, keys.of(k)[None], keys.of(v)[None], 0.0, False, scale=self.scale)
            part = out_1KRD.view(shape), lse_1KR.view(shape[:3])
            result = part if result is None else merge(*result, *part)
        return result

    def _operator_square(
        self, block: _Block, q_KGRD: torch.Tensor, k: Stores, v: Stores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_KGRD, v_KGRD = (_expanded(block.square.of(x), q_KGRD.shape[1]) for x in (k, v))
        out_KGRD, lse_KGR = _FLASH(q_KGRD, k_KGRD, v_KGRD, 0.0, True, scale=self.scale)
        return out_KGRD, lse_KGR

    def _backward_block(
        self,
        block: _Block,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
        bounded: bool,
    ) -> None:
        kv_heads = k[0].shape[1]
        q_KGRD, dout_KGRD, out_KGRD = (block.of(x, kv_heads) for x in (q, dout, out))
        lse_KGR = block.of(_with_head_dim(lse), kv_heads)[..., 0]
        given = _Given(dout_KGRD, q_KGRD, out_KGRD, lse_KGR)
        dq_KGRD = torch.zeros(q_KGRD.shape, dtype=dk[0].dtype)
        if block.before and self._operator_takes(q_KGRD):
            for keys in block.before:
                self._operator_backward(given, keys, k, v, dq_KGRD, dk, dv, causal=False)
        elif block.before:
            self._tiles_backward(given, block.before, k, v, dq_KGRD, dk, dv, bounded, causal=False)
        if self._operator_takes_square(q_KGRD):
            self._operator_backward(given, block.square, k, v, dq_KGRD, dk, dv, causal=True)
        else:
            first = block.square.rows.start
            for rows in self._strips(q_KGRD):
                seen = _Keys(block.square.store, slice(first, first + rows.stop))
                self._tiles_backward(
                    given.strip(rows), (seen,), k, v, dq_KGRD[:, :, rows], dk, dv, bounded, causal=True
                )
        block.of(dq, kv_heads).copy_(dq_KGRD)

    def _operator_backward(
        self,
        given: _Given,
        keys: _Keys,
        k: Stores,
        v: Stores,
        dq_KGRD: torch.Tensor,
        dk: Stores,
        dv: Stores,
        *,
        causal: bool,
    ) -> None:
        """Add the gradients of one piece. Groups are folded, or, on the diagonal, expanded and summed."""
        kv_heads, group = given.q.shape[:2]
        dout, q, out, lse = given
        k_KND, v_KND = keys.of(k), keys.of(v)
        if causal:
            k_KND, v_KND = _expanded(k_KND, group), _expanded(v_KND, group)
        else:
            dout, q, out = (x.reshape(1, kv_heads, -1, x.shape[-1]) for x in (dout, q, out))
            lse, k_KND, v_KND = lse.reshape(1, kv_heads, -1), k_KND[None], v_KND[None]
        dq_part, dk_part, dv_part = _FLASH_BACKWARD(dout, q, k_KND, v_KND, out, lse, 0.0, causal, scale=self.scale)
        dq_KGRD += dq_part.view(dq_KGRD.shape)
        for stores, grad in ((dk, dk_part), (dv, dv_part)):
            of_heads = (
                grad.sum(1, dtype=stores[0].dtype)
                if causal and group > 1
                else grad.view(k_KND.shape).squeeze(1 if causal else 0)
            )
            keys.of(stores).add_(of_heads)

    def _tiles_backward(
        self,
        given: _Given,
        runs: tuple[_Keys, ...],
        k: Stores,
        v: Stores,
        dq_KGRD: torch.Tensor,
        dk: Stores,
        dv: Stores,
        bounded: bool,
        *,
        causal: bool,
    ) -> None:
        """Add the gradients of one piece; causal: the queries are the last rows of the last run."""
        kv_heads, _, rows, head_dim = given.q.shape
        dq_KRD = tiles.backward(
            tiles.scaled(given.q, self.scale, bounded=bounded),
            given.dout.reshape(kv_heads, -1, head_dim),
            given.lse.reshape(kv_heads, -1),
            (given.dout * given.out).sum(-1).view(kv_heads, -1),
            [keys.of(k) for keys in runs],
            [keys.of(v) for keys in runs],
            [keys.of(dk) for keys in runs],
            [keys.of(dv) for keys in runs],
            self._mask(rows, given.q.dtype, bounded) if causal else None,
            self.scale,
            bounded=bounded,
        )
        dq_KGRD += dq_KRD.view(dq_KGRD.shape)

    def _operator_takes(self, q_KGRD: torch.Tensor) -> bool:
        """Whether the operator computes the keys before a block: for half types always."""
        return _is_half(q_KGRD) or q_KGRD.shape[1] * q_KGRD.shape[2] >= self.operator_rows

    def _operator_takes_square(self, q_KGRD: torch.Tensor) -> bool:
        """Whether the operator computes a block's square: for half types always, without groups if it is large."""
        return _is_half(q_KGRD) or (q_KGRD.shape[1] == 1 and q_KGRD.shape[2] >= self.square_rows)

    def _limit(self, group: int, folded_rows: int) -> int:
        """Rows of a block. Without groups nothing is copied or expanded, and squares may be large."""
        return self.ungrouped_rows if group == 1 else max(1, folded_rows // group)

    def _strips(self, q_KGRD: torch.Tensor) -> Iterator[slice]:
        """The rows of a block, `strip` at a time."""
        rows = q_KGRD.shape[2]
        for start in range(0, rows, self.strip):
            yield slice(start, min(start + self.strip, rows))

    def _mask(self, side: int, dtype: torch.dtype, bounded: bool) -> torch.Tensor:
        if (dtype, bounded) not in self._masks:
            self._masks[dtype, bounded] = tiles.causal_mask(self.strip, dtype, bounded=bounded)
        return self._masks[dtype, bounded][:side, :side]

    def _bounded_scores(self, q: Stores, k: Stores) -> bool:
        """Whether no query of these stores can score above `tiles.SCORE_BOUND` with any key; NaN says no.

        Half types go to `tiles` only in short documents; there it is not worth a wide copy of the stores.
        """
        if _is_half(q[0]):
            return False
        longest_queries, longest_keys = ([_longest(x) for x in stores if len(x)] for stores in (q, k))
        factor = abs(self.scale)
        return all(factor * a * b <= tiles.SCORE_BOUND for a in longest_queries for b in longest_keys)

    def _in_tiles(self, squares: Sequence[_Squares], heads: int) -> Iterator[_Squares]:
        """Cut groups of squares so that their scores fit into one tile."""
        for group in squares:
            limit = max(1, tiles.BACKWARD_TILE // (heads * group.length * group.length))
            for first in range(0, len(group.q_row), limit):
                part = slice(first, first + limit)
                yield group._replace(q_row=group.q_row[part], k_row=group.k_row[part])

    def _forward_squares(
        self, square: _Squares, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores, bounded: bool
    ) -> None:
        kv_heads = k[0].shape[1]
        q_rows, k_rows = _row_table(square.q_row, square.length), _row_table(square.k_row, square.length)
        q_BRD = _gathered(q[square.q_store], q_rows, kv_heads)
        k_BND, v_BND = (_gathered(x[square.k_store], k_rows, kv_heads) for x in (k, v))
        done = tiles.forward(
            tiles.scaled(q_BRD[:, None], self.scale, bounded=bounded),
            [k_BND],
            [v_BND],
            self._mask(square.length, q_BRD.dtype, bounded),
            bounded=bounded,
        )
        _scatter(out[square.q_store], q_rows, done.out.div_(done.total), kv_heads)
        _scatter(_with_head_dim(lse)[square.q_store], q_rows, done.lse, kv_heads)

    def _backward_squares(
        self,
        square: _Squares,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
        bounded: bool,
    ) -> None:
        kv_heads = k[0].shape[1]
        q_rows, k_rows = _row_table(square.q_row, square.length), _row_table(square.k_row, square.length)
        q_BRD, dout_BRD, out_BRD, lse_BR1 = (
            _gathered(x[square.q_store], q_rows, kv_heads) for x in (q, dout, out, _with_head_dim(lse))
        )
        k_BND, v_BND = (_gathered(x[square.k_store], k_rows, kv_heads) for x in (k, v))
        dk_BND, dv_BND = torch.zeros_like(k_BND), torch.zeros_like(v_BND)
        dq_BRD = tiles.backward(
            tiles.scaled(q_BRD[:, None], self.scale, bounded=bounded),
            dout_BRD,
            lse_BR1[..., 0],
            (dout_BRD * out_BRD).sum(-1),
            [k_BND],
            [v_BND],
            [dk_BND],
            [dv_BND],
            self._mask(square.length, q_BRD.dtype, bounded),
            self.scale,
            bounded=bounded,
        )
        _scatter(dq[square.q_store], q_rows, dq_BRD, kv_heads)
        for stores, grad_BND in ((dk, dk_BND), (dv, dv_BND)):
            stores[square.k_store].index_add_(0, k_rows.flatten(), _as_rows(grad_BND, k_rows, kv_heads))


def _together(tasks: KernelTasks, longest: int) -> tuple[IntArray, list[_Squares]]:
    """Split the table: tasks computed alone, and groups of short equal tasks whose keys are their own rows."""
    first = tasks.segment_offset[:-1]
    short = (np.diff(tasks.segment_offset) == 1) & (tasks.q_length <= longest) & (tasks.q_length > 0)
    short[short] = tasks.segment_length[first[short]] == tasks.q_length[short]
    index = np.flatnonzero(short)
    groups: list[_Squares] = []
    if len(index):
        segment = first[index]
        keys = np.stack([tasks.q_store[index], tasks.segment_store[segment], tasks.q_length[index]])
        kinds, kind = np.unique(keys, axis=1, return_inverse=True)
        for number, (q_store, k_store, length) in enumerate(kinds.T.tolist()):
            member = kind.reshape(-1) == number
            groups.append(
                _Squares(q_store, k_store, length, tasks.q_row[index[member]], tasks.segment_row[segment[member]])
            )
    return np.flatnonzero(~short & (tasks.q_length > 0)), groups


def _blocks(tasks: KernelTasks, chosen: IntArray, limit: int) -> Iterator[_Block]:
    """Cut the chosen tasks into blocks of `limit` to twice `limit` queries, in the order of the table."""
    columns = (tasks.q_store, tasks.q_row, tasks.q_length, tasks.segment_offset[:-1], tasks.segment_offset[1:])
    segment_store, segment_row, segment_length = (
        column.tolist() for column in (tasks.segment_store, tasks.segment_row, tasks.segment_length)
    )
    for store, row, length, first, end in zip(*(column[chosen].tolist() for column in columns), strict=True):
        full = tuple(
            _Keys(segment_store[s], slice(segment_row[s], segment_row[s] + segment_length[s]))
            for s in range(first, end - 1)
        )
        last_store, last_row = segment_store[end - 1], segment_row[end - 1]
        diagonal_row = last_row + segment_length[end - 1] - length
        for start, stop in pairwise(_cuts(length, limit)):
            earlier = slice(last_row, diagonal_row + start)
            before = (*full, _Keys(last_store, earlier)) if earlier.start < earlier.stop else full
            square = _Keys(last_store, slice(diagonal_row + start, diagonal_row + stop))
            yield _Block(store, slice(row + start, row + stop), before, square)


def _cuts(length: int, limit: int) -> list[int]:
    """Borders of nearly equal blocks of `limit` to twice `limit` rows: a short last block would be a slow one."""
    count = max(1, length // limit)
    return sorted({0, *(length * i // count // _ROW_UNIT * _ROW_UNIT for i in range(1, count)), length})


def _longest(x_THD: torch.Tensor) -> float:
    """Largest Euclidean norm of a head's row; NaN and infinity come through."""
    return float(torch.linalg.vector_norm(x_THD, dim=-1).max())


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype.itemsize < 4


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
