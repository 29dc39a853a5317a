"""One interface for core attention over task tables, and the choice of the back end that computes it.

Tensors come as pairs, one per *store*: 0 holds the rank's own rows, 1 the received ones (`domain.plan.KernelTasks`).

T: rows of a store, H: query heads, K: key/value heads, D: head size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from steelyard.attention.cpu import CpuBackend
from steelyard.attention.flash import FlashBackend, check_flash
from steelyard.attention.flash_kernels import FlashKernels, load_kernels
from steelyard.attention.reference import ReferenceBackend
from steelyard.domain.plan import KernelTasks
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

_LOG = logging.getLogger(__name__)
NAMES = ("auto", "cpu", "flash", "reference")
FAST_DEVICES = ("cpu",)
"""Kinds of devices that are taken without being asked for. "cuda" has a back end too, `flash`, but no run on a GPU
stands behind it yet, so it is used where a device is named. `reference` runs anywhere, slowly."""


class Backend(Protocol):
    """Core attention of task tables. The caller allocates everything; stores may have no row, tables no task."""

    name: str

    def forward(
        self,
        tasks: KernelTasks,
        q: Sequence[torch.Tensor],
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        lse: Sequence[torch.Tensor],
    ) -> None:
        """Write the rows of the tasks' queries in `out` and `lse`, and no other row.

        Args:
            tasks: the table; a query row belongs to at most one task.
            q, out: per store (T, H, D). k, v: per store (T, K, D). Any strides with a contiguous last dimension.
                Every row of q and k should hold data: the largest norms over whole stores choose between two exact
                ways to compute, so rubbish in unused rows could change the rounding from one run to the next.
            lse: per store (T, H), natural logarithm; fp32 (fp64 for fp64 inputs).
        """
        ...

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
        """Write the tasks' rows of `dq`, and *add* to `dk` and `dv`, always in the same order.

        Args:
            tasks: the table of the forward call.
            dout: per store (T, H, D), gradient of `out`. q, k, v, out, lse: as they were after the forward call.
            dq: per store (T, H, D). dk, dv: per store (T, K, D), fp32 (fp64 for fp64 inputs), zeroed by the caller.
        """
        ...


def build_backend(
    name: str = "auto",
    *,
    head_dim: int,
    heads: int,
    kv_heads: int,
    device: torch.device | str,
    dtype: torch.dtype,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Backend:
    """Choose a back end and log its name; whatever it could not do is refused here, not in the middle of a run.

    Args:
        name: "cpu" (fast), "flash" (CUDA, kernels of flash-attn or torch), "reference" (slow, everything), or "auto":
            on CUDA "flash", elsewhere "cpu" where it can do what is asked and "reference" otherwise. `attention.sink`
            adds a sink to what any of them computed.
        head_dim, heads, kv_heads: the attention shape of this rank.
        device, dtype: of q, k, v.
        dropout: must be 0: no back end drops attention weights.
        window: keys that a query sees at most, its own included.
        softcap: c in c·tanh(score / c).
        scale: factor on q·k; head_dim ** −0.5 if None.

    Raises:
        UsageError: names the argument that the back end cannot honour, and what to use instead.
    """
    if name not in NAMES:
        raise UsageError(f"attention back end {name!r}: expected one of {', '.join(NAMES)}")
    AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if not dtype.is_floating_point:
        raise UsageError(f"attention dtype={dtype}: expected a floating type such as torch.float32 or torch.bfloat16")
    if dropout != 0.0:
        raise UsageError(
            f"attention dropout={dropout}: no back end drops attention weights; set it to 0 and apply dropout outside"
        )
    if window is not None and window < 1:
        raise UsageError(f"attention window={window}: a query sees at least itself; use window >= 1 or None")
    if softcap is not None and softcap <= 0:
        raise UsageError(f"attention softcap={softcap}: expected a positive number or None")
    factor = head_dim**-0.5 if scale is None else scale
    kind = torch.device(device).type
    if name == "cpu" and kind != "cpu":
        raise UsageError(
            f"attention back end 'cpu' on device {kind!r}: it runs on cpu only; use name='flash' or 'auto' on cuda, or "
            "name='reference' for small checks"
        )
    if name == "flash" or (name == "auto" and kind != "cpu"):
        kernels = _flash_kernels(torch.device(device))
        check_flash(kernels, head_dim=head_dim, dtype=dtype, softcap=softcap)
        _LOG.info("core attention: back end flash by %s (asked for %s) on %s, %s", kernels.name, name, device, dtype)
        return FlashBackend(kernels, scale=factor, window=window, softcap=softcap)
    if name == "cpu" and dtype not in CpuBackend.DTYPES:
        raise UsageError(
            f"attention back end 'cpu' cannot compute in dtype={dtype}; use one of "
            f"{', '.join(str(d) for d in CpuBackend.DTYPES)}, or name='reference'"
        )
    fast = dtype in CpuBackend.DTYPES and dtype != torch.float64
    backend: Backend
    if name == "cpu" or (name == "auto" and fast):
        backend = CpuBackend(scale=factor, window=window, softcap=softcap)
    else:
        backend = ReferenceBackend(scale=factor, window=window, softcap=softcap)
    _LOG.info("core attention: back end %s (asked for %s) on %s, %s", backend.name, name, kind, dtype)
    return backend


def _flash_kernels(device: torch.device) -> FlashKernels:
    """The kernels for a device that was asked for.

    Raises:
        UsageError: there are none.
    """
    problem = None
    if device.type != "cuda":
        problem = "it runs on cuda only; use name='auto' elsewhere"
    elif not torch.cuda.is_available():
        problem = "torch finds no such device; use device='cpu', or a machine and a torch build with CUDA"
    elif torch.version.hip is not None:
        problem = "its masks are not known to hold on AMD devices"
    if problem is not None:
        raise UsageError(
            f"attention back end 'flash' on device {device.type!r}: {problem}, or name='reference' for small checks"
        )
    return load_kernels(torch.cuda.get_device_capability(device))
