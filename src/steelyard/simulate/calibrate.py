"""From times measured on a device to its profile: the fit, without the measuring (see `train.measure_device`).

Every constant is either fitted here on the samples, with the number of samples in its source, or copied from a base
profile and named as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention_kernels import REFERENCE_HEAD_DIM, TileKernel, range_counts
from steelyard.cost.profiles import DeviceProfile, Precision
from steelyard.domain.arrays import FloatArray, int_column
from steelyard.errors import UsageError


@dataclass(frozen=True)
class ProductSample:
    """A matrix product of (tokens × rows) by (rows × columns)."""

    tokens: int
    rows: int
    columns: int
    time_s: float


@dataclass(frozen=True)
class AttentionSample:
    """`count` documents of `length` tokens, forward and backward."""

    length: int
    count: int
    heads: int
    head_dim: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class LayerSample:
    """Token-wise part of one layer of our own model, forward, beside its matrix products: bytes of one pass, and time.

    Attributes:
        tokens, hidden, element_bytes: size of one memory pass.
        products: the layer's matrix products, as (rows, columns).
        forward_s: measured.
    """

    tokens: int
    hidden: int
    element_bytes: int
    products: tuple[tuple[int, int], ...]
    forward_s: float


@dataclass(frozen=True)
class TransferSample:
    """An all-to-all in which every rank sends `size_bytes` to each other one."""

    ranks: int
    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class Samples:
    """All that was measured on one device."""

    device: str
    precision: Precision
    memory_bytes: int
    copy_bytes_per_s: float
    products: tuple[ProductSample, ...]
    attention: tuple[AttentionSample, ...]
    layers: tuple[LayerSample, ...]
    transfers: tuple[TransferSample, ...]


def fit_profile(samples: Samples, base: DeviceProfile, *, name: str) -> DeviceProfile:
    """A profile of the device that was measured; what was not measured comes from `base`.

    Raises:
        UsageError: too few samples of a kind to fit its constants.
    """
    if len(samples.products) < 3 or len(samples.attention) < 4:
        raise UsageError(
            f"calibrate: {len(samples.products)} products and {len(samples.attention)} attention calls were measured; "
            "expected at least 3 and 4"
        )
    peak, half_size, product_error = _fit_products(samples.products)
    kernel, kernel_error = _fit_attention(samples.attention)
    transfers = _fit_layers(samples, peak, half_size)
    floor_s, rate = _fit_transfers(samples.transfers, base)
    measured = {
        f"peak_{samples.precision}_flops": (peak, f"best of {len(samples.products)} products"),
        "gemm_efficiency": (1.0, "the peak is a measured one"),
        "gemm_half_size": (half_size, f"fitted on {len(samples.products)} products, mean error {product_error:.1%}"),
        "memory_bytes": (float(samples.memory_bytes), "as the system reports it"),
        "memory_bytes_per_s": (samples.copy_bytes_per_s, "a copy, bytes read and written"),
        "token_wise_transfers": (transfers, f"fitted on {len(samples.layers)} layers of our own model"),
        "eager_transfers": (transfers, "the same: our own model"),
        "time_error": (max(0.1, product_error + kernel_error), "errors of the fits, at least 10 %"),
    }
    if samples.transfers:
        text = f"fitted on {len(samples.transfers)} all-to-alls of {samples.transfers[0].ranks} ranks"
        measured |= {"node_floor_s": (floor_s, text), "node_bytes_per_s": (rate, text)}
    sources = {k: v if v.startswith("taken from") else f"taken from {base.name}: {v}" for k, v in base.sources.items()}
    sources = {k: v for k, v in sources.items() if not k.startswith("kernels.")}
    sources |= {f"constants.{k}": f"measured on {samples.device}: {text}" for k, (_, text) in measured.items()}
    text = f"measured on {samples.device}: {len(samples.attention)} calls, mean error {kernel_error:.1%}"
    fields = ("floor_s", "tile_s", "block_s", "masked_block_s", "multiprocessors", "backward_ratio", "narrow_penalty")
    sources |= {f"kernels.measured.{f}": text for f in fields}
    return base.replace(
        name=name, kernels={"measured": kernel}, sources=sources, **{k: v for k, (v, _) in measured.items()}
    )


def _fit_products(samples: Sequence[ProductSample]) -> tuple[float, float, float]:
    """Rate of large products, and the smallest dimension at which half of it is reached."""
    flops = np.array([2.0 * s.tokens * s.rows * s.columns for s in samples])
    smallest = np.array([min(s.tokens, s.rows, s.columns) for s in samples], dtype=np.float64)
    time_s = np.array([s.time_s for s in samples])
    best = (np.inf, 0.0, 0.0)
    for half in np.concatenate([[0.0], np.geomspace(1, 1000, 60)]):
        factor = smallest / (smallest + half)
        rate = float(np.exp(np.mean(np.log(flops / time_s / factor))))
        error = float(np.mean(np.abs(flops / (rate * factor) / time_s - 1)))
        best = min(best, (error, rate, float(half)))
    return best[1], best[2], best[0]


def _fit_attention(samples: Sequence[AttentionSample]) -> tuple[TileKernel, float]:
    """Tile constants by least squares on relative errors; what comes out negative is left out."""
    rows = []
    for s in samples:
        counts = range_counts(int_column([0]), int_column([s.length]))
        width = s.head_dim / REFERENCE_HEAD_DIM
        work = s.count * s.heads
        rows.append([1.0, work * counts.tiles[0], work * width * counts.blocks[0], work * width * counts.masked[0]])
    matrix = np.array(rows)
    time_s = np.array([s.forward_s for s in samples])
    found = _positive_least_squares(matrix / time_s[:, None], np.ones(len(samples)))
    error = float(np.mean(np.abs(matrix @ found / time_s - 1)))
    ratio = float(np.exp(np.mean([np.log(s.backward_s / s.forward_s) for s in samples])))
    floor_s, tile_s, block_s, masked_s = (float(x) for x in found)
    return TileKernel(floor_s, tile_s, block_s, masked_s, 1.0, ratio, 1.0), error


def _positive_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    kept = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if len(kept) == 1 or float(solution.min()) >= 0:
            found = np.zeros(matrix.shape[1])
            found[kept] = np.maximum(solution, 0.0)
            return found
        kept.pop(int(solution.argmin()))


def _fit_layers(samples: Samples, peak: float, half_size: float) -> float:
    """Memory passes that explain what a layer takes beyond its products."""
    found = []
    for layer in samples.layers:
        products_s = 0.0
        for rows, columns in layer.products:
            smallest = min(layer.tokens, rows, columns)
            products_s += 2 * layer.tokens * rows * columns / (peak * smallest / (smallest + half_size))
        one_pass_s = layer.tokens * layer.hidden * layer.element_bytes / samples.copy_bytes_per_s
        found.append(max(0.0, layer.forward_s - products_s) / one_pass_s)
    return float(np.mean(found)) if found else 12.0


def _fit_transfers(samples: Sequence[TransferSample], base: DeviceProfile) -> tuple[float, float]:
    """Start and rate of an all-to-all: a line through the times."""
    if len(samples) < 2:
        return base.node_floor_s, base.node_bytes_per_s
    sent = np.array([(s.ranks - 1) * s.size_bytes for s in samples], dtype=np.float64)
    time_s = np.array([s.time_s for s in samples])
    found = _positive_least_squares(np.stack([1 / time_s, sent / time_s], axis=1), np.ones(len(samples)))
    return float(found[0]), float(1 / max(found[1], 1e-15))
