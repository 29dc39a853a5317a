"""The fit of a profile: it finds the constants that made the samples, and says where each comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steelyard.cost.attention_kernels import StripKernel, range_counts
from steelyard.cost.profiles import load_profile, profile_toml
from steelyard.domain.arrays import int_column
from steelyard.errors import UsageError
from steelyard.simulate.calibrate import (
    AttentionSample,
    LayerSample,
    ProductSample,
    Samples,
    TransferSample,
    UpdateSample,
    fit_attention,
    fit_profile,
)

KERNEL = StripKernel(1e-4, 5e-6, 2e-7, 6e-9, 4e-10, 3e-11, 9e-6, 3e-7, 1e-8, 9e-10, 7e-11)
PEAK, HALF, COPY = 1e11, 20.0, 5e9
DOCUMENTS = ((32, 128), (64, 16), (128, 32), (200, 7), (512, 2), (1024, 4), (4096, 1), (64, 2), (4096, 2))


def attention(length: int, count: int, heads: int, head_dim: int) -> AttentionSample:
    counts = range_counts(int_column([0] * count), int_column([length] * count)).map(lambda c: c.sum(keepdims=True))
    forward = KERNEL.floor_s + KERNEL.forward_s(counts, heads, head_dim)
    backward = KERNEL.backward_s(forward, counts, heads, head_dim)
    return AttentionSample(length, count, heads, head_dim, float(forward[0]), float(backward[0]))


def product_s(tokens: int, rows: int, columns: int) -> float:
    small = min(tokens, rows, columns)
    return 2 * tokens * rows * columns / (PEAK * small / (small + HALF))


def samples() -> Samples:
    layer_s = product_s(1024, 256, 256) + 30 * 1024 * 256 * 4 / COPY
    return Samples(
        device="test", precision="fp32", memory_bytes=10**9, copy_bytes_per_s=COPY,
        products=tuple(
            ProductSample(*s, product_s(*s)) for s in ((512, 64, 64), (512, 256, 256), (2048, 1024, 1024))
        ),
        attention=tuple(attention(*d, *h) for d in DOCUMENTS for h in ((8, 32), (2, 128))),
        layers=(LayerSample(1024, 256, 4, ((256, 256),), layer_s, 1.7 * layer_s),),
        transfers=tuple(TransferSample(2, n, 2e-4 + n / 1e9) for n in (1000, 10**6)),
        updates=(UpdateSample(10**6, 50 * 10**6 / COPY),), step_overhead_s=0.012,
    )  # fmt: skip


def test_a_profile_of_a_restless_machine_can_be_read_again(tmp_path: Path) -> None:
    """Times that fit nothing: the error is large, and still one that a profile may have."""
    shaken = [replace(p, time_s=p.time_s * f) for p, f in zip(samples().products, (1, 100, 1), strict=True)]
    profile = fit_profile(replace(samples(), products=tuple(shaken)), load_profile("cpu-local"), name="own")
    assert profile.time_error == 1.0
    path = tmp_path / "own.toml"
    path.write_text(profile_toml(profile))
    assert load_profile(path).time_error == 1.0


def test_a_fit_finds_the_constants_that_made_the_samples(tmp_path: Path) -> None:
    profile = fit_profile(samples(), load_profile("cpu-local"), name="own")
    assert profile.peak_fp32_flops == pytest.approx(PEAK, rel=0.02)
    assert profile.gemm_half_size == pytest.approx(HALF, rel=0.1)
    assert profile.token_wise_transfers == pytest.approx(30, rel=0.02)
    assert profile.token_wise_backward == pytest.approx(1.7)
    assert profile.optimizer_bytes == pytest.approx(50)
    assert profile.step_overhead_s == 0.012
    assert (profile.node_floor_s, profile.node_bytes_per_s) == pytest.approx((2e-4, 1e9), rel=0.01)
    path = tmp_path / "own.toml"
    path.write_text(profile_toml(profile))
    again = load_profile(path)
    assert again.kernels == profile.kernels
    assert "measured on test" in again.sources["constants.token_wise_backward"]
    assert "taken from" in again.sources["constants.network_hop_s"]


def test_the_kernel_of_a_fit_is_the_one_that_was_measured() -> None:
    kernel, error = fit_attention(samples().attention)
    assert error < 1e-6
    assert np.array([*vars(kernel).values()]) == pytest.approx(np.array([*vars(KERNEL).values()]), rel=1e-3)


def test_what_was_not_measured_stays_as_it_was() -> None:
    base = load_profile("cpu-local")
    few = Samples("t", "fp32", 1, COPY, samples().products, samples().attention, (), ())
    profile = fit_profile(few, base, name="own")
    assert profile.token_wise_transfers == base.token_wise_transfers
    assert profile.node_bytes_per_s == base.node_bytes_per_s
    assert profile.step_overhead_s == base.step_overhead_s


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="expected at least 3 and 4"):
        fit_profile(Samples("t", "fp32", 1, 1.0, (), (), (), ()), load_profile("cpu-local"), name="x")
