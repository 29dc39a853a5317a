"""Core attention on CPU as matrix products over tiles of keys, batched over heads (and over equal documents).

What torch's operator does badly is done here: few queries against many keys (it then works in blocks of 32 queries, and
packs the keys again for each), and squares on the diagonal (it computes up to 512 keys beyond the mask). A tile of
scores is kept small enough to stay in a core's second-level cache between the passes over it. The running maximum and
sum are those of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

Two ways to the exponentials, chosen by the caller for a whole call:

- *bounded*: no |score| exceeds `SCORE_BOUND` (by Cauchy and Schwarz, from the longest query and key). Then exp(score)
  neither overflows nor vanishes, and the passes that find and subtract the maximum are left out; backward scales the
  output's gradient by exp(−lse) once instead of subtracting lse from every score. The mask multiplies by 0.
- otherwise the running maximum is subtracted. Scores are then kept in units of log 2: torch's `exp2` costs the same
  everywhere, while its `exp` (Intel's vector library) was 10 to 450 times slower for arguments below −87, −inf
  included, which a mask or one dominant key makes common. The mask adds −inf.

There may be a mask at both ends of a strip's keys: over the last ones, which are the queries' own rows (causal), and
over the first ones, which the later queries no longer see (a sliding window). A soft cap is applied to every score.

B: batch (key/value heads, of one or of several documents), R: rows, i.e. the queries of the G heads that share the
batch's keys, one head behind the other; N: keys; C: side of the masked square; E: keys at the window's edge, at most
C; D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from steelyard.attention.reference import accumulator_dtype

# Scores in a tile: 1 MiB in fp32 forward; backward keeps two tiles.
FORWARD_TILE = 1 << 18
BACKWARD_TILE = 1 << 17
MIN_TILE_KEYS = 64
# exp(−2 · 36 − ln N) is a normal fp32 number for N up to a million keys.
SCORE_BOUND = 36.0
# Maximum of a query to which the window's edge leaves no key of a tile: exp2(−inf − this) is 0, and so is its share.
_NO_KEY = -1e30
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)


def causal_mask(side: int, dtype: torch.dtype, *, bounded: bool) -> torch.Tensor:
    """(side, side) for a square on the diagonal: bounded, 0 above it and 1 elsewhere; otherwise −inf above it and 0."""
    if bounded:
        return torch.ones(side, side, dtype=dtype).tril_()
    return torch.full((side, side), -torch.inf, dtype=dtype).triu_(1)


def window_edge(side: int, dtype: torch.dtype, *, bounded: bool) -> torch.Tensor:
    """(side, side) for the keys around the start of the first query's window: query i sees those from column i on."""
    if bounded:
        return torch.ones(side, side, dtype=dtype).triu_()
    return torch.full((side, side), -torch.inf, dtype=dtype).tril_(-1)


def band_mask(side: int, window: int, dtype: torch.dtype, *, bounded: bool) -> torch.Tensor:
    """As `causal_mask`, for queries that see at most `window` keys, their own included."""
    seen = torch.ones(side, side, dtype=torch.bool).tril_().triu_(1 - window)
    return seen.to(dtype) if bounded else torch.zeros(side, side, dtype=dtype).masked_fill_(~seen, -torch.inf)


class Partial(NamedTuple):
    """Attention over some keys, not normalised: the output is out / total, its log-sum-exp ln 2 · (top + log2 total).

    out: (B, R, D), weighted by exp2(score − top). total, top: (B, R, 1); top is 0 in bounded calls.
    """

    out: torch.Tensor
    total: torch.Tensor
    top: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Natural log-sum-exp, (B, R, 1)."""
        return self.total.log2().add_(self.top).mul_(_LN_2)

    @classmethod
    def of(cls, out_BRD: torch.Tensor, lse_BR: torch.Tensor, *, bounded: bool) -> Partial:
        """Take over a normalised result; `out_BRD` will be overwritten."""
        lse_BR1 = lse_BR[..., None]
        if bounded:
            total_BR1 = lse_BR1.exp()
            return cls(out_BRD.mul_(total_BR1), total_BR1, torch.zeros_like(total_BR1))
        return cls(out_BRD, torch.ones_like(lse_BR1), lse_BR1 * _LOG2_E)


def forward(
    q_BRD: torch.Tensor,
    k_BND: Sequence[torch.Tensor],
    v_BND: Sequence[torch.Tensor],
    mask_CC: torch.Tensor | None,
    done: Partial | None = None,
    *,
    bounded: bool,
    edge_CE: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend to runs of keys, going on from what is `done`.

    Args:
        q_BRD: queries from `scaled`.
        k_BND, v_BND: runs of keys and values, of half types too (widened tile by tile); each query sees all of them,
            but for the mask.
        mask_CC: from `causal_mask`, for the last C keys of the last run and the C queries of every head; R is a
            multiple of C. None: no mask.
        done: attention of the same queries to other keys; it is overwritten.
        bounded: see above; the same in `scaled`, the masks, `Partial.of` and here.
        edge_CE: columns of `window_edge` for the first E of all keys and the C queries of every head; None: all see
            them.
        softcap: c in c·tanh(score / c); None: no cap.
    """
    for tile in _tiles(q_BRD, k_BND, mask_CC, FORWARD_TILE):
        k_tile, v_tile = (x[tile.run][:, tile.keys].to(q_BRD.dtype) for x in (k_BND, v_BND))
        weight_BRN = torch.bmm(q_BRD, k_tile.mT)
        if softcap is not None:
            _cap(weight_BRN, softcap, bounded=bounded)
        masks = _masks_on(weight_BRN, tile, mask_CC, edge_CE)
        if bounded:
            weight_BRN.exp_()
            for scores, mask in masks:
                scores.mul_(mask)
            sum_BR1 = weight_BRN.sum(-1, keepdim=True)
            if done is None:
                done = Partial(torch.bmm(weight_BRN, v_tile), sum_BR1, torch.zeros_like(sum_BR1))
            else:
                done.total.add_(sum_BR1)
                done.out.baddbmm_(weight_BRN, v_tile)
            continue
        for scores, mask in masks:
            scores.add_(mask)
        top_BR1 = weight_BRN.amax(-1, keepdim=True)
        if edge_CE is not None:
            top_BR1.clamp_(min=_NO_KEY)
        if done is None:
            weight_BRN.sub_(top_BR1).exp2_()
            done = Partial(torch.bmm(weight_BRN, v_tile), weight_BRN.sum(-1, keepdim=True), top_BR1)
            continue
        torch.maximum(top_BR1, done.top, out=top_BR1)
        weight_BRN.sub_(top_BR1).exp2_()
        shrink_BR1 = done.top.sub_(top_BR1).exp2_()
        done.total.mul_(shrink_BR1).add_(weight_BRN.sum(-1, keepdim=True))
        done.out.mul_(shrink_BR1).baddbmm_(weight_BRN, v_tile)
        done = Partial(done.out, done.total, top_BR1)
    assert done is not None, "a query sees at least itself"
    return done


def scaled(q_KGRD: torch.Tensor, scale: float, *, bounded: bool) -> torch.Tensor:
    """Queries as the functions here want them: (K, G·R, D), wide, times the scale (not bounded: and log2 e)."""
    wide = accumulator_dtype(q_KGRD.dtype)
    q = torch.empty(q_KGRD.shape, dtype=wide, device=q_KGRD.device)
    torch.mul(q_KGRD.to(wide), scale if bounded else scale * _LOG2_E, out=q)
    return q.view(len(q), -1, q.shape[-1])


def backward(
    q_BRD: torch.Tensor,
    dout_BRD: torch.Tensor,
    lse_BR: torch.Tensor,
    delta_BR: torch.Tensor,
    k_BND: Sequence[torch.Tensor],
    v_BND: Sequence[torch.Tensor],
    dk_BND: Sequence[torch.Tensor],
    dv_BND: Sequence[torch.Tensor],
    mask_CC: torch.Tensor | None,
    scale: float,
    *,
    bounded: bool,
    edge_CE: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Add to `dk_BND` and `dv_BND` in place; return the gradient (B, R, D) of the queries before they were scaled.

    Args:
        q_BRD, k_BND, v_BND, mask_CC, edge_CE, softcap: as in `forward`.
        dout_BRD: gradient of the output.
        lse_BR, delta_BR: log-sum-exp over *all* keys of the queries, and the sum of dout · out over D.
        scale: the factor on q·k with which the queries were scaled.
    """
    dq_BRD = torch.zeros_like(q_BRD)
    lse_BR1, delta_BR1 = lse_BR[..., None], delta_BR[..., None]
    if bounded:
        # weight · x = exp(score) · (exp(−lse) · x), for x the output's gradient and delta alike.
        share_BR1 = torch.exp(-lse_BR1)
        dout_BRD, delta_BR1 = dout_BRD * share_BR1, delta_BR1 * share_BR1
    else:
        lse_BR1 = lse_BR1 * _LOG2_E
    for tile in _tiles(q_BRD, k_BND, mask_CC, BACKWARD_TILE):
        k_tile, v_tile = (x[tile.run][:, tile.keys].to(q_BRD.dtype) for x in (k_BND, v_BND))
        weight_BRN = torch.bmm(q_BRD, k_tile.mT)
        slope_BRN = None if softcap is None else _cap(weight_BRN, softcap, bounded=bounded, slope=True)
        masks = _masks_on(weight_BRN, tile, mask_CC, edge_CE)
        if bounded:
            weight_BRN.exp_()
            for scores, mask in masks:
                scores.mul_(mask)
        else:
            weight_BRN.sub_(lse_BR1)
            for scores, mask in masks:
                scores.add_(mask)
            weight_BRN.exp2_()
        dv_BND[tile.run][:, tile.keys].baddbmm_(weight_BRN.mT, dout_BRD)
        dscore_BRN = torch.bmm(dout_BRD, v_tile.mT).sub_(delta_BR1).mul_(weight_BRN)
        if slope_BRN is not None:
            dscore_BRN.mul_(slope_BRN)
        # Where the queries carry log2(e) beside the scale, it is taken out again.
        dk_BND[tile.run][:, tile.keys].baddbmm_(dscore_BRN.mT, q_BRD, alpha=1.0 if bounded else _LN_2)
        dq_BRD.baddbmm_(dscore_BRN, k_tile, alpha=scale)
    return dq_BRD


class _Tile(NamedTuple):
    """Keys of one run.

    square: whether the masked square lies within, at its end.
    before: keys of all runs that come before the first of this tile.
    """

    run: int
    keys: slice
    square: bool
    before: int


def _tiles(
    q_BRD: torch.Tensor, k_BND: Sequence[torch.Tensor], mask_CC: torch.Tensor | None, elements: int
) -> Iterator[_Tile]:
    longest = max(MIN_TILE_KEYS, elements // max(1, q_BRD.shape[0] * q_BRD.shape[1]))
    before = 0
    for run, keys in enumerate(k_BND):
        length = keys.shape[1]
        square = mask_CC.shape[0] if mask_CC is not None and run == len(k_BND) - 1 else 0
        # The last tile holds the square and as many keys before it as fit.
        tail = min(length, max(square, longest))
        for first in range(0, length - tail, longest):
            yield _Tile(run, slice(first, min(first + longest, length - tail)), False, before + first)
        if tail:
            yield _Tile(run, slice(length - tail, length), square > 0, before + length - tail)
        before += length


def _masks_on(
    score_BRN: torch.Tensor, tile: _Tile, mask_CC: torch.Tensor | None, edge_CE: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The masks that reach into a tile, each with the scores under it, (B, G, C, some keys), a view."""
    found = []
    batch, rows, keys = score_BRN.shape
    if tile.square and mask_CC is not None:
        side = mask_CC.shape[0]
        found.append((score_BRN.view(batch, rows // side, side, keys)[..., keys - side :], mask_CC))
    if edge_CE is not None and tile.before < edge_CE.shape[1]:
        side = edge_CE.shape[0]
        part_CE = edge_CE[:, tile.before : tile.before + keys]
        found.append((score_BRN.view(batch, rows // side, side, keys)[..., : part_CE.shape[1]], part_CE))
    return found


def _cap(score_BRN: torch.Tensor, softcap: float, *, bounded: bool, slope: bool = False) -> torch.Tensor | None:
    """Cap scores in place; with `slope`, the derivative of the capped scores by the given ones."""
    cap = softcap if bounded else softcap * _LOG2_E
    score_BRN.div_(cap).tanh_()
    slope_BRN = score_BRN.square().neg_().add_(1.0) if slope else None
    score_BRN.mul_(cap)
    return slope_BRN
