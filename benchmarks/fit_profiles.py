"""Fit constants of device profiles on the published rows whose role is `fitted`, and print them beside the profile's.

    python benchmarks/fit_profiles.py [h100 | a100 | b200 | triton | kernels | collectives]

Nothing is written: a fitted value goes into `src/steelyard/cost/data/*.toml` by hand, with its source. Held-out rows
are never read here; the roles are those of `simulate.published` and `simulate.microbenchmarks`. Needs scipy.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from steelyard.cost import collectives
from steelyard.cost.attention_kernels import TileKernel
from steelyard.cost.profiles import DeviceProfile, load_profile
from steelyard.simulate import passes
from steelyard.simulate.documents import uniform_documents
from steelyard.simulate.microbenchmarks import measurements
from steelyard.simulate.published import Case, cases_of
from steelyard.simulate.step import simulate_step
from steelyard.simulate.validate import load_tables

TABLES = load_tables()
Bounds = tuple[float, float]


TENSOR_LAUNCHES, SWITCH_START = "TENSOR_LAUNCHES", "SWITCH_START"
MODULES: Mapping[str, Any] = {TENSOR_LAUNCHES: passes, SWITCH_START: collectives}
"""Constants of a module, not of a profile, that are fitted too."""


def with_values(profile: DeviceProfile, names: Sequence[str], values: Sequence[float]) -> DeviceProfile:
    """A profile with other constants; `kernel.field` names one of a kernel."""
    constants: dict[str, float] = {}
    kernels = dict(profile.kernels)
    for name, value in zip(names, values, strict=True):
        kernel, dot, field = name.partition(".")
        if name in MODULES:
            setattr(MODULES[name], name, float(value))
        elif dot:
            kernels[kernel] = dataclasses.replace(kernels[kernel], **{field: float(value)})
        else:
            constants[name] = float(value)
    return profile.replace(kernels=kernels, **constants)


def fit(
    device: str,
    sources: Sequence[str],
    bounds: Mapping[str, Bounds],
    chosen: Callable[[Case], bool] = lambda case: True,
) -> None:
    """Least squares of the logarithm of predicted over measured step times, softened against outliers."""
    base, names = load_profile(device), list(bounds)
    cases = [
        case
        for source in sources
        for case in cases_of(source, TABLES[source])
        if case.role == "fitted" and case.scenario is not None and case.step_time_s and chosen(case)
    ]

    def errors(values: Sequence[float]) -> np.ndarray:
        profile = with_values(base, names, values)
        predicted = [
            simulate_step(c.scenario.replace(profile=profile), uniform_documents(c.document_tokens)).step_time_s
            for c in cases
            if c.scenario is not None
        ]
        return np.log(np.array(predicted) / np.array([c.step_time_s for c in cases]))

    start = [value_of(base, name) for name in names]
    low, high = zip(*bounds.values(), strict=True)
    found = least_squares(
        errors, np.clip(start, low, high), bounds=(low, high), x_scale=np.abs(start), loss="soft_l1", f_scale=0.1,
        diff_step=0.03, max_nfev=12,
    )  # fmt: skip
    report(
        f"{device}, {len(cases)} rows of {', '.join(sources)}", names, start, found.x, errors(start), errors(found.x)
    )


def value_of(profile: DeviceProfile, name: str) -> float:
    if name in MODULES:
        return float(getattr(MODULES[name], name))
    kernel, dot, field = name.partition(".")
    return float(getattr(profile.kernels[kernel], field) if dot else getattr(profile, name))


def fit_kernel(device: str, kernel: str, source: str, label: str) -> None:
    """Floor and tile constants of one kernel generation."""
    base = load_profile(device)
    names = [f"{kernel}.{f}" for f in ("floor_s", "tile_s", "block_s", "masked_block_s")]

    def errors(values: Sequence[float]) -> np.ndarray:
        profile = with_values(base, names, np.maximum(values, 0.0))
        rows = [
            m
            for m in measurements(source, TABLES[source], {device: profile})
            if m.role == "fitted" and not m.excluded and label in m.label
        ]
        return np.log([m.predicted_s / m.measured_s for m in rows])

    assert isinstance(base.kernels[kernel], TileKernel)
    start = [value_of(base, n) for n in names]
    found = least_squares(
        errors, start, bounds=(0, np.inf), x_scale=np.maximum(start, 1e-7), loss="soft_l1", f_scale=0.05
    )
    report(f"{device} {kernel} on {source}, {label}", names, start, found.x, errors(start), errors(found.x))


def fit_collectives(device: str, constant: str, bounds: Bounds, label: str, smallest_bytes: int) -> None:
    """One constant of the collectives, on rows of one kind from a size on."""
    base = load_profile(device)

    def errors(values: Sequence[float]) -> np.ndarray:
        profile = with_values(base, [constant], values)
        rows = [
            m
            for m in measurements("kernel_network_gemm", TABLES["kernel_network_gemm"], {device: profile})
            if m.role == "fitted" and label in m.label and int(m.label.split()[-2]) >= smallest_bytes
        ]
        return np.log([m.predicted_s / m.measured_s for m in rows])

    start = [value_of(base, constant)]
    found = least_squares(errors, start, bounds=([bounds[0]], [bounds[1]]), x_scale=start, loss="soft_l1", f_scale=0.1)
    report(f"{device} on {label}", [constant], start, found.x, errors(start), errors(found.x))


def report(
    title: str,
    names: Sequence[str],
    start: Sequence[float],
    found: Sequence[float],
    before: np.ndarray,
    after: np.ndarray,
) -> None:
    print(f"{title}: mean error {np.abs(before).mean():.1%} with the profile, {np.abs(after).mean():.1%} fitted")
    for name, old, new in zip(names, start, found, strict=True):
        print(f"    {name:<28} profile {old:.6g}   fitted {new:.6g}")


def main(chosen: Sequence[str]) -> None:
    what = chosen or ["kernels", "collectives", "h100", "triton", "a100", "b200"]
    if "kernels" in what:
        fit_kernel("h200", "fa2", "kernel_distca_profile", "")
        for kernel in ("fa2", "fa3", "cudnn"):
            fit_kernel("h100", kernel, "kernel_flash_attention", f"H100-80GB-SXM {kernel} fwd head 128")
        fit_kernel("a100", "fa2", "kernel_flash_attention", "A100-80GB-SXM fa2 fwd+bwd head 128")
    if "h100" in what:
        bounds = {"gemm_efficiency": (0.4, 0.8), "gemm_efficiency_fp8": (0.3, 0.75), "fp8_transfers": (0.0, 40.0)}
        fit("h100", ["nvidia_dgxc_h100_weak_scaling"], bounds)
    if "collectives" in what:
        fit_collectives("h200", "switch_all_reduce_bytes_per_s", (1e11, 1e12), "all_reduce H200 × 8", 2**26)
        fit_collectives("h200", SWITCH_START, (0.5, 4.0), "all_reduce H200 × 8", 2**23)
        fit_collectives("b200", "network_hop_s", (1e-6, 2e-4), "all_reduce B200 × 32", 0)
    if "triton" in what:
        for device, gpu in (("h100", "H100"), ("a100", "A100")):
            bounds = {"triton.block_s": (1e-6, 1e-5)}
            fit(device, ["mosaicml_llm_foundry_mpt"], bounds, lambda case, gpu=gpu: gpu in case.label)
    if "a100" in what:
        bounds = {
            "gemm_efficiency": (0.6, 0.86), "eager_transfers": (12.0, 80.0), "unfused.score_bytes": (4.0, 60.0),
            "eager_host_s": (1e-4, 3e-3), "gemm_half_size": (10.0, 800.0), TENSOR_LAUNCHES: (0.0, 0.6),
        }  # fmt: skip
        fit("a100", ["vtrain_a100_multi_node", "vtrain_a100_single_node"], bounds)
    if "b200" in what:
        bounds = {"gemm_efficiency_fp8": (0.3, 0.75), "cudnn.block_s": (1e-7, 2e-6)}
        fit("b200", ["nvidia_nemo_long_sequence"], bounds)


if __name__ == "__main__":
    main(sys.argv[1:])
