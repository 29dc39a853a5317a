"""The four packages of GPU attention kernels, made to look the same.

flash-attn 2 and 3, flash-attn 4 and torch have the same functions under different names: attention of several
(queries, keys) pairs that lie packed one behind another, causal and aligned to the bottom right, which returns the
log-sum-exp too; and its backward pass from output and log-sum-exp. Keywords differ between packages and between their
releases, and so do positions (releases of flash-attn 4 put another argument fourth), so everything after the tensors
is passed by keyword, and what a release does not have is found out when it is loaded.

E: entries of a call, M: its query rows, N: its key rows, H: query heads, K: key/value heads, D: head size.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import torch

from steelyard.errors import UsageError

_LOG = logging.getLogger(__name__)

Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Load: TypeAlias = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Masking:
    """Which function of q, k and v is computed, besides that it is causal.

    Attributes:
        scale: factor on q·k.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        softcap: c in c·tanh(score / c); None: no cap.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class Entries:
    """Where the entries of one call begin and end; entry e has queries [q_offset[e], q_offset[e + 1]), keys alike.

    Attributes:
        q_offset, k_offset: int32 (E + 1,), on the device of the tensors, from 0.
        q_longest, k_longest: at least the most queries and keys of any entry.
    """

    q_offset: torch.Tensor
    k_offset: torch.Tensor
    q_longest: int
    k_longest: int


class FlashKernels(Protocol):
    """One package. All tensors are packed and have a contiguous last dimension; lse is fp32 (H, M), natural logarithm.

    Attributes:
        name: of the package, as in messages.
        head_dim_limit: largest head size.
        softcap: whether it has a soft cap in both directions.
    """

    name: str
    head_dim_limit: int
    softcap: bool

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out (M, H, D) and lse (H, M)."""
        ...

    def backward(
        self,
        dout_MHD: torch.Tensor,
        q_MHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        entries: Entries,
        masking: Masking,
    ) -> Gradients:
        """dq (M, H, D), dk and dv (N, K, D), in the type of q."""
        ...


class Flash2:
    """flash-attn 2.7 or newer: Ampere and later."""

    name = "flash-attn 2"
    module = "flash_attn.flash_attn_interface"
    head_dim_limit = 256
    softcap = True

    def __init__(self, load: Load) -> None:
        module = load(self.module)
        self._forward = _function(module, "flash_attn_varlen_func", ("cu_seqlens_q", "softcap", "return_attn_probs"))
        self._backward = _function(
            module, "_flash_attn_varlen_backward", ("cu_seqlens_q", "softcap", "window_size_left", "deterministic")
        )

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q_MHD,
            k_NKD,
            v_NKD,
            **_seqlens(entries),
            dropout_p=0.0,
            softmax_scale=masking.scale,
            causal=True,
            window_size=(_left(masking, -1), _right(masking, -1)),
            softcap=masking.softcap or 0.0,
            return_attn_probs=True,
        )
        return out, lse

    def backward(
        self,
        dout_MHD: torch.Tensor,
        q_MHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        entries: Entries,
        masking: Masking,
    ) -> Gradients:
        dq, dk, dv = _empty_gradients(q_MHD, k_NKD, v_NKD)
        self._backward(
            dout_MHD,
            q_MHD,
            k_NKD,
            v_NKD,
            out_MHD,
            lse_HM,
            dq=dq,
            dk=dk,
            dv=dv,
            **_seqlens(entries),
            dropout_p=0.0,
            softmax_scale=masking.scale,
            causal=True,
            window_size_left=_left(masking, -1),
            window_size_right=_right(masking, -1),
            softcap=masking.softcap or 0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


class Flash3:
    """flash-attn 3: Hopper. Its releases differ in how causality and the window are named in the backward pass."""

    name = "flash-attn 3"
    module = "flash_attn_interface"
    head_dim_limit = 256
    softcap = True

    def __init__(self, load: Load) -> None:
        module = load(self.module)
        self._forward = _function(module, "flash_attn_varlen_func", ("cu_seqlens_q", "window_size", "softcap"))
        self._backward = _function(module, "_flash_attn_backward", ("cu_seqlens_q", "sequed_q", "softcap"))
        # Releases without this switch always return the log-sum-exp.
        asks = "return_attn_probs" in _parameters(self._forward)
        self._ask_for_lse: dict[str, Any] = {"return_attn_probs": True} if asks else {}
        names = _parameters(self._backward)
        self._causal = "is_causal" if "is_causal" in names else "causal"
        self._window_in_two = "window_size_left" in names

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q_MHD,
            k_NKD,
            v_NKD,
            **_seqlens(entries),
            softmax_scale=masking.scale,
            causal=True,
            window_size=(_left(masking, -1), _right(masking, -1)),
            softcap=masking.softcap or 0.0,
            **self._ask_for_lse,
        )
        return out, lse

    def backward(
        self,
        dout_MHD: torch.Tensor,
        q_MHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        entries: Entries,
        masking: Masking,
    ) -> Gradients:
        dq, dk, dv = _empty_gradients(q_MHD, k_NKD, v_NKD)
        left, right = _left(masking, -1), _right(masking, -1)
        window: dict[str, Any] = (
            {"window_size_left": left, "window_size_right": right}
            if self._window_in_two
            else {"window_size": (left, right)}
        )
        self._backward(
            dout_MHD,
            q_MHD,
            k_NKD,
            v_NKD,
            out_MHD,
            lse_HM,
            dq=dq,
            dk=dk,
            dv=dv,
            **_seqlens(entries),
            sequed_q=None,
            sequed_k=None,
            softmax_scale=masking.scale,
            softcap=masking.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **{self._causal: True},
            **window,
        )
        return dq, dk, dv


class Flash4:
    """flash-attn 4 (`flash_attn.cute`): Blackwell."""

    name = "flash-attn 4"
    module = "flash_attn.cute.interface"
    head_dim_limit = 128
    softcap = False

    def __init__(self, load: Load) -> None:
        module = load(self.module)
        self._forward = _function(module, "flash_attn_varlen_func", ("cu_seqlens_q", "max_seqlen_q", "return_lse"))
        self._backward = _function(
            module, "_flash_attn_bwd", ("cu_seqlens_q", "max_seqlen_q", "window_size_left", "deterministic")
        )

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q_MHD,
            k_NKD,
            v_NKD,
            **_seqlens(entries),
            softmax_scale=masking.scale,
            causal=True,
            window_size=(_left(masking, None), _right(masking, None)),
            return_lse=True,
        )
        return out, lse

    def backward(
        self,
        dout_MHD: torch.Tensor,
        q_MHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        entries: Entries,
        masking: Masking,
    ) -> Gradients:
        dq, dk, dv, *_ = self._backward(
            q_MHD,
            k_NKD,
            v_NKD,
            out_MHD,
            dout_MHD,
            lse_HM,
            **_seqlens(entries),
            softmax_scale=masking.scale,
            causal=True,
            window_size_left=_left(masking, None),
            window_size_right=_right(masking, None),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


class TorchVarlen:
    """The operators behind `torch.nn.attention.varlen.varlen_attn`, which are called themselves: the backward pass
    needs the log-sum-exp over all keys, and the function's own keywords change between torch releases."""

    name = "torch varlen"
    head_dim_limit = 256
    softcap = False

    def __init__(self, load: Load) -> None:
        del load
        self._forward = torch.ops.aten._flash_attention_forward.default
        self._backward = torch.ops.aten._flash_attention_backward.default

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q_MHD,
            k_NKD,
            v_NKD,
            **_cumulative(entries),
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=masking.scale,
            window_size_left=_left(masking, -1),
            window_size_right=_right(masking, -1),
        )
        return out, lse

    def backward(
        self,
        dout_MHD: torch.Tensor,
        q_MHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        entries: Entries,
        masking: Masking,
    ) -> Gradients:
        dq, dk, dv = self._backward(
            dout_MHD,
            q_MHD,
            k_NKD,
            v_NKD,
            out_MHD,
            lse_HM,
            **_cumulative(entries),
            dropout_p=0.0,
            is_causal=True,
            # Without dropout no random number is drawn, but the operator wants its state.
            rng_state=torch.zeros(2, dtype=torch.uint64, device=q_MHD.device),
            unused=torch.empty(0, device=q_MHD.device),
            scale=masking.scale,
            window_size_left=_left(masking, -1),
            window_size_right=_right(masking, -1),
        )
        return dq, dk, dv


def load_kernels(capability: tuple[int, int], load: Load = importlib.import_module) -> FlashKernels:
    """The best kernels that are installed for a device, those of torch if there are none other.

    Args:
        capability: CUDA compute capability of the device, such as (9, 0).
        load: imports a module by name.

    Raises:
        UsageError: no package has kernels for such a device.
    """
    candidates = candidates_for(capability)
    if not candidates:
        raise UsageError(
            f"attention back end 'flash' on a device of compute capability {capability[0]}.{capability[1]}: flash "
            "attention needs 8.0 (Ampere) or newer; use name='reference' for small checks"
        )
    for candidate in candidates[:-1]:
        try:
            return candidate(load)
        except ImportError as error:
            _LOG.info("%s is not used: %s", candidate.name, error)
    return candidates[-1](load)


def candidates_for(capability: tuple[int, int]) -> Sequence[type[Flash2 | Flash3 | Flash4 | TorchVarlen]]:
    """Packages with forward and backward kernels for a device, the fastest first. The last one is always there."""
    if capability[0] in (10, 11):
        return (Flash4, Flash2, TorchVarlen)
    if capability[0] == 9:
        return (Flash3, Flash2, TorchVarlen)
    return (Flash2, TorchVarlen) if capability >= (8, 0) else ()


def _function(module: ModuleType, name: str, needed: Sequence[str]) -> Callable[..., Any]:
    """A function of a module, if it has the parameters that are needed.

    Raises:
        ImportError: it is missing or of a release with other parameters.
    """
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise ImportError(f"{module.__name__} has no {name}: a release that is not known here")
    missing = [parameter for parameter in needed if parameter not in _parameters(function)]
    if missing:
        raise ImportError(f"{module.__name__}.{name} has no {', '.join(missing)}: too old a release")
    return function


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of parameters, of functions and of operators defined by `torch.library.custom_op`."""
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        return tuple(argument.name for argument in operator._schema.arguments)
    return tuple(inspect.signature(function).parameters)


def _empty_gradients(*inputs: torch.Tensor) -> Gradients:
    """Contiguous tensors like q, k and v, which may be views of wider ones."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    return dq, dk, dv


def _left(masking: Masking, unlimited: Any) -> Any:
    """Keys before a query's own that it sees."""
    return unlimited if masking.window is None else masking.window - 1


def _right(masking: Masking, unlimited: Any) -> Any:
    """Keys after a query's own that it sees."""
    return unlimited if masking.window is None else 0


def _seqlens(entries: Entries) -> dict[str, Any]:
    return {
        "cu_seqlens_q": entries.q_offset,
        "cu_seqlens_k": entries.k_offset,
        "max_seqlen_q": entries.q_longest,
        "max_seqlen_k": entries.k_longest,
    }


def _cumulative(entries: Entries) -> dict[str, Any]:
    return {
        "cum_seq_q": entries.q_offset,
        "cum_seq_k": entries.k_offset,
        "max_q": entries.q_longest,
        "max_k": entries.k_longest,
    }
