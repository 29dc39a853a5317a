"""Published kernel and collective measurements against the cost models that step times are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from steelyard.cost.attention_kernels import RangeCounts, TileKernel, range_counts
from steelyard.cost.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from steelyard.cost.profiles import DeviceProfile, load_profile
from steelyard.simulate.published import Role, device_of, points_of


@dataclass(frozen=True)
class Measurement:
    """One row: what the model says and what was measured, in seconds; or why it is left out."""

    source: str
    label: str
    role: Role
    predicted_s: float = 0.0
    measured_s: float = 0.0
    excluded: str = ""


KERNEL_SOURCES = ("kernel_distca_profile", "kernel_flash_attention", "kernel_network_gemm")
_FITTED_LENGTHS = (512, 2048, 8192)
"""Sequence lengths of the FlashAttention tables on which kernels were fitted."""
_BACKWARD_FITTED_FROM = 2048
"""On rows of so many tokens and more of H100 the ratio of backward to forward was fitted."""


def measurements(
    source: str, content: Mapping[str, Any], profiles: Mapping[str, DeviceProfile] | None = None
) -> list[Measurement]:
    """All rows of one of `KERNEL_SOURCES`."""
    read = {
        "kernel_distca_profile": _varlen,
        "kernel_flash_attention": _flash,
        "kernel_network_gemm": _collectives,
    }[source]
    found: list[Measurement] = []
    for table in content["tables"]:
        for point in points_of(table):
            found += read(source, table["title"], point, profiles or {})
    return found


def _profile(name: str, profiles: Mapping[str, DeviceProfile]) -> DeviceProfile:
    return profiles.get(name) or load_profile(name)


def _documents(length: int) -> RangeCounts:
    return range_counts(np.array([0]), np.array([length]))


def _varlen(
    source: str, table: str, point: Mapping[str, Any], profiles: Mapping[str, DeviceProfile]
) -> Iterator[Measurement]:
    length = int(point.get("seg_len") or point.get("doc_len") or 0)
    label = f"{table}: {length} tokens, {point.get('q_heads')} heads, cp {point.get('cp')}"
    if "seg_len" not in point:
        yield Measurement(source, label, "held_out", excluded="single documents with an unknown batch, or layers of an "
                          "unknown shape: ratios only")  # fmt: skip
        return
    if point["cp"] > 1:
        yield Measurement(source, label, "held_out", excluded="which queries of a sharded segment ran is not stated")
        return
    kernel = _profile("h200", profiles).kernel("fa2")
    one = float(kernel.forward_s(_documents(length), point["q_heads"], point["head_dim"]).sum())
    predicted = kernel.floor_s + point["n_segments"] * one
    role: Role = "fitted" if point["file"].endswith("H100.psv") else "held_out"
    yield Measurement(source, label, role, predicted, float(point["total_ms"]) * 1e-3)


def _flash(
    source: str, table: str, point: Mapping[str, Any], profiles: Mapping[str, DeviceProfile]
) -> Iterator[Measurement]:
    length, head_dim = int(point["seq_len"]), int(point["head_dim"])
    label = f"{point['gpu']} {point['impl']} {point['mode']} head {head_dim}, {length}, causal {point.get('causal')}"
    if table != "figures" or head_dim == 256:
        reason = "a head of 256 channels, which no profile has" if head_dim == 256 else "another benchmark's shapes"
        yield Measurement(source, label, "held_out", excluded=reason)
        return
    profile = _profile(device_of(point["gpu"]), profiles)
    kernel = profile.kernel(point["impl"])
    assert isinstance(kernel, TileKernel)
    heads, count = 2048 // head_dim, 16384 // length
    forward = kernel.floor_s + count * _forward(kernel, length, heads, head_dim, causal=bool(point.get("causal")))
    pairs = length * length / (2 if point.get("causal") else 1)
    flops = 4 * heads * head_dim * count * pairs
    factor = {"fwd": 1.0, "bwd": kernel.backward_ratio, "fwd+bwd": 1 + kernel.backward_ratio}[point["mode"]]
    work = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[point["mode"]]
    if "A100" in point["gpu"] or point["mode"] == "fwd":
        fitted = length in _FITTED_LENGTHS
    else:  # `backward_ratio` is the median over all of these
        fitted = length >= _BACKWARD_FITTED_FROM
    role: Role = "fitted" if fitted else "held_out"
    yield Measurement(source, label, role, factor * forward, work * flops / (float(point["tflops"]) * 1e12))


def _forward(kernel: TileKernel, length: int, heads: int, head_dim: int, *, causal: bool) -> float:
    if causal:
        return float(kernel.forward_s(_documents(length), heads, head_dim).sum())
    return kernel.full_forward_s(length, length, heads, head_dim)


def _collectives(
    source: str, table: str, point: Mapping[str, Any], profiles: Mapping[str, DeviceProfile]
) -> Iterator[Measurement]:
    what, device = point.get("op", point.get("dtype")), point.get("gpu", "H200")
    label = f"{table}: {what} {device} × {point.get('n_gpus')}, {point.get('bytes')} B"
    op = point.get("op")
    if op not in ("all_gather", "reduce_scatter", "all_reduce") or not point.get("bytes"):
        yield Measurement(source, label, "held_out", excluded="copies, best matrix products and rates without a size")
        return
    size_bytes, count = float(point["bytes"]), int(point["n_gpus"])
    if size_bytes < 2**23:
        yield Measurement(
            source, label, "held_out", excluded="below 8 MiB: latency algorithms that training seldom meets"
        )
        return
    profile = _profile(device_of(str(point.get("gpu", "H200"))), profiles)
    nodes = int(point.get("nodes") or 1)
    group = Group(count, count // nodes)
    price = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s}[str(op)]
    predicted = price(size_bytes, group, profile)
    moved = (count - 1) / count * size_bytes * (2 if op == "all_reduce" else 1)
    measured = float(point["time_us"]) * 1e-6 if "time_us" in point else moved / (float(point["busbw_gbs"]) * 1e9)
    between_nodes = nodes > 1 and device_of(str(point.get("gpu", "H200"))) == "b200"
    every_other = int(size_bytes).bit_length() % 2 == 0
    fitted = (table.startswith("DistCA") and count == 8) or (between_nodes and every_other)
    yield Measurement(source, label, "fitted" if fitted else "held_out", predicted, measured)
