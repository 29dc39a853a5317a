"""Stand-ins for the packages of flash kernels: their functions with their exact parameters, computed densely.

Parameter names, their order and defaults are those of flash-attn 2.7 to 2.8, of two releases of flash-attn 3, and of
two of flash-attn 4 (4.0.0b5, and 4.0.0b36 with `qv` in the fourth place). What a call may not leave out it may not
leave out here either, and every argument that would change the result is honoured or makes the call fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

WINDOW_2 = (-1, -1)
WINDOW_4 = (None, None)


def scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, window: tuple[int | None, int | None], softcap: float
) -> torch.Tensor:
    """(H, M, N) of one entry: causal, aligned to the bottom right."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    score = torch.einsum("mhd,nhd->hmn", q, k) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None, :]
    seen = distance >= 0
    if window[0] is not None and window[0] >= 0:
        seen &= distance <= window[0]
    return score.masked_fill(~seen, -torch.inf)


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any
) -> None:
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    assert int(cu_q[0]) == int(cu_k[0]) == 0 and int(cu_q[-1]) == len(q) and int(cu_k[-1]) == len(k) == len(v)
    assert isinstance(max_q, int) and isinstance(max_k, int)
    assert max_q >= int(cu_q.diff().max()) and max_k >= int(cu_k.diff().max())
    assert max_q > 1, "kernels take one query per entry for a decoding step"
    assert all(x.stride(-1) == 1 for x in (q, k, v))


def forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
    check_arguments(q, k, v, cu_q, cu_k, max_q, max_k)
    assert causal and not (torch.is_grad_enabled() and q.requires_grad)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=q.dtype)
    for m, n in entries(cu_q, cu_k):
        score = scores(q[m], k[n], scale, window, softcap)
        lse[:, m] = score.logsumexp(-1)
        heads = v[n].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[m] = torch.einsum("hmn,nhd->mhd", score.softmax(-1), heads)
    return out, lse


def backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
    """Gradients that use the given out and lse as kernels do: weights are exp(score − lse)."""
    check_arguments(q, k, v, cu_q, cu_k, max_q, max_k)
    assert causal and lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and dout.shape == out.shape == q.shape
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for m, n in entries(cu_q, cu_k):
        k_heads, v_heads = (x[n].repeat_interleave(group, dim=1) for x in (k, v))
        score = scores(q[m], k[n], scale, window, softcap)
        weight = torch.exp(score - lse[:, m, None])
        dweight = torch.einsum("mhd,nhd->hmn", dout[m], v_heads)
        delta = torch.einsum("mhd,mhd->hm", dout[m], out[m])
        dscore = weight * (dweight - delta[..., None]) * scale
        if softcap:
            dscore *= 1 - (score.masked_fill(weight == 0, 0.0) / softcap).square()
        dq[m] = torch.einsum("hmn,nhd->mhd", dscore, k_heads)
        dk[n] = torch.einsum("hmn,mhd->nhd", dscore, q[m]).unflatten(1, (-1, group)).sum(2)
        dv[n] = torch.einsum("hmn,mhd->nhd", weight, dout[m]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def entries(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(*q[e : e + 2]), slice(*k[e : e + 2])) for e in range(len(q) - 1)]


def put(targets: Any, values: Any) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target.is_contiguous()
        target.copy_(value)


# flash-attn 2


def flash2() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=WINDOW_2, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and alibi_slopes is None and block_table is None
        out, lse = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and alibi_slopes is None
        window = (window_size_left, window_size_right)
        found = backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            causal, window, softcap,
        )  # fmt: skip
        put((dq, dk, dv), found)

    return module_of("flash_attn.flash_attn_interface", flash_attn_varlen_func, _flash_attn_varlen_backward)


def flash2_of_2_6() -> ModuleType:
    """Still with the window as a pair."""

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        raise AssertionError("must not be called")

    module = flash2()
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
    return module


# flash-attn 3


@functools.cache
def flash3() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=WINDOW_2, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert seqused_q is seqused_k is qv is None and attention_chunk == 0
        found = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )
        return found if return_attn_probs else found[0]

    def _flash_attn_backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        sequed_q: torch.Tensor | None = None,
        sequed_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: torch.Tensor | None = None,
        dk: torch.Tensor | None = None,
        dv: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        assert sequed_q is None and sequed_k is None
        window = (window_size_left, window_size_right)
        found = backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            is_causal, window, softcap,
        )  # fmt: skip
        put((dq, dk, dv), found)
        return torch.empty(0)

    # As in the package, this one is an operator, of which `inspect.signature` knows nothing.
    operator = torch.library.custom_op("steelyard_test::flash3_backward", mutates_args=("dq", "dk", "dv"))
    module = module_of("flash_attn_interface", flash_attn_varlen_func)
    module._flash_attn_backward = operator(_flash_attn_backward)  # type: ignore[attr-defined]
    return module


def flash3_beta() -> ModuleType:
    """Before the log-sum-exp had to be asked for, and with other names in the backward pass."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=WINDOW_2, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert seqused_q is seqused_k is qv is None
        return forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, causal, window_size=WINDOW_2, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert sequed_q is sequed_k is None
        found = backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            causal, window_size, softcap,
        )  # fmt: skip
        put((dq, dk, dv), found)
        return found

    return module_of("flash_attn_interface", flash_attn_varlen_func, _flash_attn_backward)


# flash-attn 4


def flash4() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
        causal=False, window_size=WINDOW_4, learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
        aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert qv is None and learnable_sink is None and score_mod is None
        out, lse = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )
        return out, lse if return_lse else None

    return module_of("flash_attn.cute.interface", flash_attn_varlen_func, flash4_backward())


def flash4_beta() -> ModuleType:
    """4.0.0b5: nothing between `v` and `cu_seqlens_q`, fewer switches after."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
        seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=WINDOW_4, learnable_sink=None,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, aux_tensors=None,
        return_lse=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        out, lse = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )
        return out, lse if return_lse else None

    return module_of("flash_attn.cute.interface", flash_attn_varlen_func, flash4_backward())


def flash4_without_lse() -> ModuleType:
    """Before it could be asked for the log-sum-exp."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, softmax_scale=None,
        causal=False, window_size=WINDOW_4, learnable_sink=None, softcap=0.0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        raise AssertionError("must not be called")

    return module_of("flash_attn.cute.interface", flash_attn_varlen_func, flash4_backward())


def flash4_backward() -> Callable[..., Any]:
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        window = (window_size_left, window_size_right)
        return backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window, softcap,
        )  # fmt: skip

    return _flash_attn_bwd


# torch


def register_torch_operators() -> torch.library.Library:
    """CPU kernels for the operators behind `varlen_attn`; torch's dispatcher checks their arguments itself."""
    library = torch.library.Library("aten", "IMPL")

    def flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and not return_debug_mask
        window = (window_size_left, window_size_right)
        out, lse = forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, window, 0.0)
        none = torch.empty(0)
        return out, lse, none, none, none

    def flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0
        window = (window_size_left, window_size_right)
        return backward(
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, window,
            0.0,
        )  # fmt: skip

    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    return library


def module_of(name: str, *functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def installed(*modules: ModuleType) -> Callable[[str], ModuleType]:
    """What imports exactly these."""
    by_name = {module.__name__: module for module in modules}

    def load(name: str) -> ModuleType:
        if name not in by_name:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return by_name[name]

    return load
