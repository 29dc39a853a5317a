"""From times measured on a device to its profile: the fit, without the measuring (see `train.measure_device`).

Every constant is either fitted here on the samples, with the number of samples in its source, or copied from a base
profile and named as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention_kernels import StripKernel, range_counts
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
    """Token-wise part of one layer of our own model in its place in the model, forward and backward.

    Attributes:
        tokens, hidden, element_bytes: size of one memory pass.
        products: the layer's matrix products, as (rows, columns).
        forward_s, backward_s: measured.
    """

    tokens: int
    hidden: int
    element_bytes: int
    products: tuple[tuple[int, int], ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class TransferSample:
    """An all-to-all in which every rank sends `size_bytes` to each other one, with rows packed and put back."""

    ranks: int
    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class UpdateSample:
    """Clipping and optimizer step of a model with so many parameters."""

    parameters: int
    time_s: float


@dataclass(frozen=True)
class Samples:
    """All that was measured on one device.

    Attributes:
        step_overhead_s: a training step that has hardly anything to compute; None: not measured.
        probe_s: of the fixed piece of work by whose time others can tell how fast the cores were.
    """

    device: str
    precision: Precision
    memory_bytes: int
    copy_bytes_per_s: float
    products: tuple[ProductSample, ...]
    attention: tuple[AttentionSample, ...]
    layers: tuple[LayerSample, ...]
    transfers: tuple[TransferSample, ...]
    updates: tuple[UpdateSample, ...] = ()
    step_overhead_s: float | None = None
    probe_s: float = 0.0


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
    kernel, kernel_error = fit_attention(samples.attention)
    measured = {
        f"peak_{samples.precision}_flops": (peak, f"best of {len(samples.products)} products"),
        "gemm_efficiency": (1.0, "the peak is a measured one"),
        "gemm_half_size": (half_size, f"fitted on {len(samples.products)} products, mean error {product_error:.1%}"),
        "node_size": (samples.transfers[0].ranks if samples.transfers else 1, "as many processes as were measured"),
        "memory_bytes": (float(samples.memory_bytes), "as the system reports it"),
        "memory_bytes_per_s": (samples.copy_bytes_per_s, "a copy, bytes read and written"),
        "time_error": (min(1.0, max(0.1, product_error + kernel_error)), "errors of the fits, 10 to 100 %"),
    }
    if samples.layers:
        text = f"fitted on {len(samples.layers)} sizes of our own model's layers"
        passes, ratio = _fit_layers(samples, peak, half_size)
        measured |= {
            "token_wise_transfers": (passes, text),
            "eager_transfers": (passes, text),
            "token_wise_backward": (ratio, text),
            # Whatever the host needs to begin a layer is part of its measured time: host and device are the same core.
            "layer_host_s": (0.0, "part of the layer's own time: host and device are one core"),
            "eager_host_s": (0.0, "part of the layer's own time: host and device are one core"),
        }
    if samples.updates:
        text = f"clipping and AdamW, {len(samples.updates)} models"
        measured["optimizer_bytes"] = (_fit_updates(samples), text)
    if samples.step_overhead_s is not None:
        text = "steps of a model of one narrow layer"
        measured["step_overhead_s"] = (samples.step_overhead_s, text)
    if samples.transfers:
        text = f"fitted on {len(samples.transfers)} all-to-alls of {samples.transfers[0].ranks} ranks"
        floor_s, rate = _fit_transfers(samples.transfers, base)
        measured |= {"node_floor_s": (floor_s, text), "node_bytes_per_s": (rate, text)}
    sources = {k: v if v.startswith("taken from") else f"taken from {base.name}: {v}" for k, v in base.sources.items()}
    sources = {k: v for k, v in sources.items() if not k.startswith("kernels.")}
    sources |= {f"constants.{k}": f"measured on {samples.device}: {text}" for k, (_, text) in measured.items()}
    text = f"measured on {samples.device}: {len(samples.attention)} calls, mean error {kernel_error:.1%}"
    sources |= {f"kernels.measured.{f}": text for f in StripKernel.__dataclass_fields__}
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


def fit_attention(samples: Sequence[AttentionSample]) -> tuple[StripKernel, float]:
    """Constants of both passes by least squares on relative errors; what comes out negative is left out.

    Returns:
        The kernel, and its mean relative error over the passes of all samples.
    """
    rows = []
    for s in samples:
        counts = range_counts(int_column([0]), int_column([s.length])).map(lambda column: column * s.count)  # noqa: B023
        row, score = s.heads * float(counts.rows[0]), s.heads * float(counts.scores[0])
        rows.append([1.0, float(counts.ranges[0]), row, row * s.head_dim, score, score * s.head_dim])
    matrix = np.array(rows)
    forward_s = np.array([s.forward_s for s in samples])
    backward_s = np.array([s.backward_s for s in samples])
    forward = _positive_least_squares(matrix / forward_s[:, None], np.ones(len(samples)))
    left_s = np.maximum(backward_s - forward[0], 0.1 * backward_s)  # the call's floor is the same in both passes
    backward = _positive_least_squares(matrix[:, 1:] / left_s[:, None], np.ones(len(samples)))
    fitted_s = (matrix @ forward, matrix[:, 1:] @ backward + forward[0])
    errors = [np.abs(fitted_s[0] / forward_s - 1), np.abs(fitted_s[1] / backward_s - 1)]
    kernel = StripKernel(*(float(x) for x in (*forward, *backward)))
    return kernel, float(np.mean(errors))


def _positive_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Coefficients >= 0: columns are dropped one by one while one is negative. Scaled: units differ by powers of 10."""
    scale = np.linalg.norm(matrix, axis=0)
    kept = [i for i in range(matrix.shape[1]) if scale[i] > 0]
    while True:
        solution = np.linalg.lstsq(matrix[:, kept] / scale[kept], target, rcond=None)[0]
        if len(kept) == 1 or float(solution.min()) >= 0:
            found = np.zeros(matrix.shape[1])
            found[kept] = np.maximum(solution, 0.0) / scale[kept]
            return found
        kept.pop(int(solution.argmin()))


def _fit_layers(samples: Samples, peak: float, half_size: float) -> tuple[float, float]:
    """Memory passes that explain what a layer takes beyond its products, and backward over forward."""
    passes, ratios = [], []
    for layer in samples.layers:
        products_s = 0.0
        for rows, columns in layer.products:
            smallest = min(layer.tokens, rows, columns)
            products_s += 2 * layer.tokens * rows * columns / (peak * smallest / (smallest + half_size))
        one_pass_s = layer.tokens * layer.hidden * layer.element_bytes / samples.copy_bytes_per_s
        passes.append(max(0.0, layer.forward_s - products_s) / one_pass_s)
        ratios.append(np.log(layer.backward_s / layer.forward_s))
    return float(np.mean(passes)), float(np.exp(np.mean(ratios)))


def _fit_updates(samples: Samples) -> float:
    return float(np.mean([u.time_s * samples.copy_bytes_per_s / u.parameters for u in samples.updates]))


def _fit_transfers(samples: Sequence[TransferSample], base: DeviceProfile) -> tuple[float, float]:
    """Start and rate of an all-to-all: a line through the times."""
    if len(samples) < 2:
        return base.node_floor_s, base.node_bytes_per_s
    sent = np.array([(s.ranks - 1) * s.size_bytes for s in samples], dtype=np.float64)
    time_s = np.array([s.time_s for s in samples])
    found = _positive_least_squares(np.stack([1 / time_s, sent / time_s], axis=1), np.ones(len(samples)))
    return float(found[0]), float(1 / max(found[1], 1e-15))
