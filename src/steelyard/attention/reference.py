"""Core attention with dense masks: slow, obvious, any floating type; what every fast back end is compared with.

T: rows of a store, M: queries of a task, N: its keys, H: query heads, K: key/value heads, G = H / K, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from steelyard.domain.arrays import IntArray
from steelyard.domain.plan import KernelTasks


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over `dtype` values are kept: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible(q_position_M: torch.Tensor, k_position_N: torch.Tensor, window: int | None) -> torch.Tensor:
    """Boolean mask (M, N): key at or before the query, and among its last `window` keys if there is a window."""
    distance_MN = q_position_M[:, None] - k_position_N[None, :]
    seen_MN = distance_MN >= 0
    return seen_MN if window is None else seen_MN & (distance_MN < window)


class _Scores(NamedTuple):
    """Scores of one task after soft cap and mask, and the soft cap's derivative where there is one: (K, G, M, N)."""

    score: torch.Tensor
    slope: torch.Tensor | None


class ReferenceBackend:
    """Dense-mask core attention; see `interface.Backend` for the two calls.

    Args:
        scale: factor on q·k.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        softcap: c in c·tanh(score / c), applied after the scale and before the mask.
        sink: (heads,) logits of one more key per head that takes weight and gives no value. They enter `lse`; their
            gradient is `sink_gradient`. What adds sinks to any back end, `attention.sink`, is compared with this.
    """

    name = "reference"

    def __init__(
        self,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sink: torch.Tensor | None = None,
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.sink = sink

    def forward(
        self,
        tasks: KernelTasks,
        q: Sequence[torch.Tensor],
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        lse: Sequence[torch.Tensor],
    ) -> None:
        for task in range(len(tasks)):
            store, rows = _query_rows(tasks, task)
            k_NKD, v_NKD = _keys(tasks, task, k), _keys(tasks, task, v)
            q_KGMD = _grouped(q[store][rows], k_NKD.shape[1])
            score_KGMN = self._scores(tasks, task, q_KGMD, k_NKD).score
            lse_KGM = torch.logsumexp(score_KGMN, dim=-1)
            if self.sink is not None:
                lse_KGM = torch.logaddexp(lse_KGM, self._sink_logits(lse_KGM))
            weight_KGMN = torch.exp(score_KGMN - lse_KGM[..., None])
            out_KGMD = torch.einsum("kgmn,nkd->kgmd", weight_KGMN, v_NKD)
            out[store][rows] = _ungrouped(out_KGMD).to(out[store].dtype)
            lse[store][rows] = lse_KGM.permute(2, 0, 1).flatten(1).to(lse[store].dtype)

    def backward(
        self,
        tasks: KernelTasks,
        dout: Sequence[torch.Tensor],
        q: Sequence[torch.Tensor],
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        lse: Sequence[torch.Tensor],
        dq: Sequence[torch.Tensor],
        dk: Sequence[torch.Tensor],
        dv: Sequence[torch.Tensor],
    ) -> None:
        for task in range(len(tasks)):
            store, rows = _query_rows(tasks, task)
            k_NKD, v_NKD = _keys(tasks, task, k), _keys(tasks, task, v)
            kv_heads = k_NKD.shape[1]
            q_KGMD = _grouped(q[store][rows], kv_heads)
            dout_KGMD, out_KGMD = _grouped(dout[store][rows], kv_heads), _grouped(out[store][rows], kv_heads)
            lse_KGM = _grouped(lse[store][rows][..., None], kv_heads)[..., 0]
            scores = self._scores(tasks, task, q_KGMD, k_NKD)
            weight_KGMN = torch.exp(scores.score - lse_KGM[..., None])
            delta_KGM1 = (dout_KGMD * out_KGMD).sum(-1, keepdim=True)
            dweight_KGMN = torch.einsum("kgmd,nkd->kgmn", dout_KGMD, v_NKD)
            dscore_KGMN = weight_KGMN * (dweight_KGMN - delta_KGM1)
            if scores.slope is not None:
                dscore_KGMN = dscore_KGMN * scores.slope
            dscore_KGMN = dscore_KGMN * self.scale
            dq[store][rows] = _ungrouped(torch.einsum("kgmn,nkd->kgmd", dscore_KGMN, k_NKD)).to(dq[store].dtype)
            _add_to_keys(tasks, task, dk, torch.einsum("kgmn,kgmd->nkd", dscore_KGMN, q_KGMD))
            _add_to_keys(tasks, task, dv, torch.einsum("kgmn,kgmd->nkd", weight_KGMN, dout_KGMD))

    def _scores(self, tasks: KernelTasks, task: int, q_KGMD: torch.Tensor, k_NKD: torch.Tensor) -> _Scores:
        score_KGMN = torch.einsum("kgmd,nkd->kgmn", q_KGMD, k_NKD) * self.scale
        slope_KGMN = None
        if self.softcap is not None:
            tanh_KGMN = torch.tanh(score_KGMN / self.softcap)
            score_KGMN, slope_KGMN = self.softcap * tanh_KGMN, 1.0 - tanh_KGMN.square()
        first_query, queries = int(tasks.q_position[task]), int(tasks.q_length[task])
        first_key = int(tasks.segment_position[tasks.segment_offset[task]])
        q_position_M = torch.arange(first_query, first_query + queries, device=k_NKD.device)
        k_position_N = torch.arange(first_key, first_key + len(k_NKD), device=k_NKD.device)
        seen_MN = visible(q_position_M, k_position_N, self.window)
        return _Scores(score_KGMN.masked_fill(~seen_MN, -torch.inf), slope_KGMN)

    def _sink_logits(self, lse_KGM: torch.Tensor) -> torch.Tensor:
        assert self.sink is not None
        return self.sink.detach().to(lse_KGM).view(*lse_KGM.shape[:2], 1)


def sink_gradient(
    sink_H: torch.Tensor, dout_THD: torch.Tensor, out_THD: torch.Tensor, lse_TH: torch.Tensor
) -> torch.Tensor:
    """Gradient (H,) of the sink logits, from rows whose `lse` includes the sink: −Σ exp(sink − lse) · (dout · out)."""
    wide = lse_TH.dtype
    delta_TH = (dout_THD.to(wide) * out_THD.to(wide)).sum(-1)
    return -(torch.exp(sink_H.to(wide) - lse_TH) * delta_TH).sum(0).to(sink_H.dtype)


def core_attention_reference(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    doc_lengths: Sequence[int] | IntArray,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Core attention over packed documents with one dense mask over all tokens; gradients come from autograd alone.

    Shares nothing with the back ends but the masking rule, so that it can check them, `reference` included.

    Args:
        q_THD: (tokens, heads, head_dim); k_TKD, v_TKD: (tokens, kv_heads, head_dim).
        doc_lengths: tokens of each document, in order; their sum is `tokens`.
        window, softcap, scale: as in `interface.build_backend`. sink: as in `ReferenceBackend`; may require a gradient.

    Returns:
        (tokens, heads, head_dim), in the type of `q_THD`.
    """
    tokens, heads, head_dim = q_THD.shape
    lengths = torch.as_tensor([int(n) for n in doc_lengths], dtype=torch.int64, device=q_THD.device)
    wide = accumulator_dtype(q_THD.dtype)
    group = heads // k_TKD.shape[1]
    k_THD, v_THD = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    doc_T = torch.repeat_interleave(torch.arange(len(lengths), device=q_THD.device), lengths, output_size=tokens)
    row_T = torch.arange(tokens, device=q_THD.device)
    seen_TT = visible(row_T, row_T, window) & (doc_T[:, None] == doc_T[None, :])
    score_HTT = torch.einsum("thd,shd->hts", q_THD.to(wide), k_THD) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        score_HTT = softcap * torch.tanh(score_HTT / softcap)
    score_HTT = score_HTT.masked_fill(~seen_TT, -torch.inf)
    if sink is not None:
        extra_HT1 = sink.to(wide)[:, None, None].expand(heads, tokens, 1)
        score_HTT = torch.cat([score_HTT, extra_HT1], dim=-1)
    weight_HTT = torch.softmax(score_HTT, dim=-1)[..., :tokens]
    return torch.einsum("hts,shd->thd", weight_HTT, v_THD).to(q_THD.dtype)


def _query_rows(tasks: KernelTasks, task: int) -> tuple[int, slice]:
    first = int(tasks.q_row[task])
    return int(tasks.q_store[task]), slice(first, first + int(tasks.q_length[task]))


def _segments(tasks: KernelTasks, task: int) -> list[tuple[int, slice]]:
    found = []
    for segment in range(int(tasks.segment_offset[task]), int(tasks.segment_offset[task + 1])):
        first = int(tasks.segment_row[segment])
        found.append((int(tasks.segment_store[segment]), slice(first, first + int(tasks.segment_length[segment]))))
    return found


def _keys(tasks: KernelTasks, task: int, stores: Sequence[torch.Tensor]) -> torch.Tensor:
    """The task's key (or value) rows in order of position, (N, K, D), wide."""
    parts = [stores[store][rows] for store, rows in _segments(tasks, task)]
    joined = torch.cat(parts)
    return joined.to(accumulator_dtype(joined.dtype))


def _add_to_keys(tasks: KernelTasks, task: int, stores: Sequence[torch.Tensor], grad_NKD: torch.Tensor) -> None:
    done = 0
    for store, rows in _segments(tasks, task):
        length = rows.stop - rows.start
        stores[store][rows] += grad_NKD[done : done + length].to(stores[store].dtype)
        done += length


def _grouped(x_MHD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(M, H, D) as (K, G, M, D), wide."""
    x_MKGD: torch.Tensor = x_MHD.unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
    return x_MKGD.to(accumulator_dtype(x_MHD.dtype)).permute(1, 2, 0, 3)


def _ungrouped(x_KGMD: torch.Tensor) -> torch.Tensor:
    """(K, G, M, D) as (M, H, D)."""
    return x_KGMD.permute(2, 0, 1, 3).flatten(1, 2)
