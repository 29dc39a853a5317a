"""What a device, its node and its network can do: the constants of every cost model, each with its source.

A profile is a TOML file. The built-in ones lie in `cost/data`; `steelyard calibrate` writes one for the user's own
device in the same form:

    name = "H100"
    [constants.peak_bf16_flops]
    value = 989.4e12
    source = "NVIDIA H100 data sheet, dense"
    [kernels.fa3.block_s]
    value = 1.1e-6
    source = "fitted on …"

A profile that lacks a constant is refused and the constant named: an estimate never runs on a silent default.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard.cost.attention_kernels import AttentionKernel, StripKernel, TileKernel, UnfusedKernel
from steelyard.domain.limits import MAX_RANKS
from steelyard.errors import UsageError

Precision: TypeAlias = Literal["bf16", "fp8", "fp32"]
BUILT_IN = ("a100", "h100", "h200", "b200", "cpu-local")
_ALIASES = {"a100-80gb": "a100", "a800": "a100", "h800": "h100", "cpu": "cpu-local", "local": "cpu-local"}


@dataclass(frozen=True)
class DeviceProfile:
    """Constants of one kind of device in its node. Seconds, bytes and operations.

    Attributes:
        name: how reports call it.
        peak_bf16_flops, peak_fp8_flops, peak_fp32_flops: dense matrix rate by data type; 0: not supported.
        memory_bytes, memory_bytes_per_s: device memory and its rate.
        gemm_efficiency, gemm_efficiency_fp8: share of the peak that large matrix products reach in a whole step.
        gemm_half_size: a product whose smallest dimension is this reaches half of that.
        token_wise_transfers: memory passes of norms, rotation, activation and residuals, in elements per token and
            hidden channel of one layer's forward pass.
        eager_transfers: the same where these are separate kernels (frameworks without fusion or compilation).
        fp8_transfers: memory passes that casts and scales add under FP8, in the same unit.
        token_wise_backward: time of a layer's token-wise backward pass over that of its forward pass.
        optimizer_bytes: that the optimizer step moves through memory per parameter.
        layer_host_s, eager_host_s: time the host needs to launch one layer's pass, with fused kernels and one by one:
            no pass is faster.
        step_overhead_s: the same of a step: data, norms of gradients, logging.
        tensor_overlap: share of the tensor-parallel transfers that overlapped implementations hide.
        node_size: devices of a node.
        node_floor_s, node_bytes_per_s: of a collective inside a node: start, and bus rate per device.
        switch_all_reduce_bytes_per_s: rate of an all-reduce of all devices of a node whose switch adds; 0: it does not.
        network_hop_s, network_bytes_per_s: per node on the way of a ring, and rate of a device's port.
        reserved_bytes: what driver, libraries and communication buffers take.
        fragmentation_low, fragmentation_high: what the allocator cannot use, as a share of what is live.
        time_error: relative error of predicted step times on published runs that no constant was fitted on.
        kernels: attention kernel generations by name, best first.
        sources: where each constant comes from, by name.
    """

    name: str
    peak_bf16_flops: float
    peak_fp8_flops: float
    peak_fp32_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    gemm_efficiency: float
    gemm_efficiency_fp8: float
    gemm_half_size: float
    token_wise_transfers: float
    eager_transfers: float
    fp8_transfers: float
    token_wise_backward: float
    optimizer_bytes: float
    layer_host_s: float
    eager_host_s: float
    step_overhead_s: float
    tensor_overlap: float
    node_size: int
    node_floor_s: float
    node_bytes_per_s: float
    switch_all_reduce_bytes_per_s: float
    network_hop_s: float
    network_bytes_per_s: float
    reserved_bytes: float
    fragmentation_low: float
    fragmentation_high: float
    time_error: float
    kernels: Mapping[str, AttentionKernel]
    sources: Mapping[str, str]

    def peak_flops(self, precision: Precision) -> float:
        """Dense peak of the matrix units.

        Raises:
            UsageError: the device has none for this data type.
        """
        peak: float = getattr(self, f"peak_{precision}_flops")
        if peak <= 0:
            able = [p for p in ("bf16", "fp8", "fp32") if getattr(self, f"peak_{p}_flops") > 0]
            raise UsageError(f"{self.name} has no {precision} matrix units; choose one of {', '.join(able)}")
        return peak

    def kernel(self, name: str = "auto") -> AttentionKernel:
        """An attention kernel generation; `auto` is the profile's first.

        Raises:
            UsageError: the profile has no such kernel.
        """
        if name == "auto":
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise UsageError(f"{self.name} has no attention kernel {name!r}; expected {', '.join(self.kernels)}")
        return self.kernels[name]

    def replace(self, **changes: Any) -> DeviceProfile:
        """A copy with other constants."""
        return dataclasses.replace(self, **changes)


_POSITIVE = frozenset(
    (
        "memory_bytes", "memory_bytes_per_s", "node_size", "node_bytes_per_s", "network_bytes_per_s",
        "multiprocessors", "gemm_efficiency",
    )
)  # fmt: skip
"""Constants by which something is divided."""
_SHARES = frozenset(
    (
        "gemm_efficiency",
        "gemm_efficiency_fp8",
        "tensor_overlap",
        "fragmentation_low",
        "fragmentation_high",
        "time_error",
    )
)
"""Constants that are no more than 1."""
_MOST_S, _MOST = 3600.0, 1e18
"""No constant in seconds is longer, and none at all larger: a slip in a unit would show as absurd an answer."""
_CONSTANTS = tuple(f.name for f in dataclasses.fields(DeviceProfile) if f.name not in ("name", "kernels", "sources"))
_KERNEL_CLASSES: Mapping[str, type[TileKernel] | type[UnfusedKernel] | type[StripKernel]] = {
    "tiles": TileKernel,
    "unfused": UnfusedKernel,
    "strips": StripKernel,
}


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """A built-in profile by name (any case), or one from a TOML file.

    Raises:
        UsageError: unknown name (the nearest is named), no such file, or a profile with missing or unknown entries.
    """
    text = str(name_or_path)
    key = text.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in BUILT_IN:
        return _parse(resources.files("steelyard.cost").joinpath("data", f"{key}.toml").read_text("utf-8"), key)
    path = Path(text).expanduser()
    if path.suffix == ".toml":
        try:
            return _parse(path.read_text("utf-8"), text)
        except FileNotFoundError as error:
            raise UsageError(f"device profile {text}: there is no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"device profile {text}: cannot be read as a TOML file ({error})") from error
    close = get_close_matches(key, BUILT_IN, n=1, cutoff=0.3)
    hint = f"did you mean {close[0]!r}? " if close else ""
    known = f"known are {', '.join(BUILT_IN)}, or a profile file *.toml"
    raise UsageError(f"unknown device {text!r}; {hint}{f'({known})' if close else known}")


def _parse(text: str, where: str) -> DeviceProfile:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"device profile {where}: not valid TOML: {error}") from error
    sources: dict[str, str] = {}
    constants = _values(table.get("constants", {}), _CONSTANTS, where, "constants", sources)
    kernels: dict[str, AttentionKernel] = {}
    for name, entries in table.get("kernels", {}).items():
        form = entries.get("form", "tiles")
        if form not in _KERNEL_CLASSES:
            known = ", ".join(_KERNEL_CLASSES)
            raise UsageError(f"device profile {where}: kernels.{name}.form={form!r}, expected one of {known}")
        cls = _KERNEL_CLASSES[form]
        wanted = tuple(f.name for f in dataclasses.fields(cls))
        given = {k: v for k, v in entries.items() if k != "form"}
        kernels[name] = cls(**_values(given, wanted, where, f"kernels.{name}", sources))
    if not kernels:
        raise UsageError(f"device profile {where}: no attention kernel; add a table [kernels.NAME] (see `calibrate`)")
    constants["node_size"] = int(constants["node_size"])
    return DeviceProfile(
        name=str(table.get("name", where)),
        kernels=kernels,
        sources=sources,
        **constants,
    )


def _values(
    table: Mapping[str, Any], wanted: tuple[str, ...], where: str, section: str, sources: dict[str, str]
) -> dict[str, Any]:
    missing = [name for name in wanted if name not in table]
    unknown = [name for name in table if name not in wanted]
    if unknown:
        close = get_close_matches(unknown[0], wanted, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; expected {', '.join(wanted)}"
        raise UsageError(f"device profile {where}: unknown entry {section}.{unknown[0]}{hint}")
    if missing:
        raise UsageError(
            f"device profile {where}: {section} lacks {', '.join(missing)}; add each with value and source, "
            "or run `steelyard calibrate`"
        )
    found: dict[str, Any] = {}
    for name in wanted:
        entry = table[name]
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            raise UsageError(f"device profile {where}: {section}.{name} needs exactly `value` and `source`")
        value, expected = entry["value"], "more than 0" if name in _POSITIVE else "0 or more"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and name in _POSITIVE):
            raise UsageError(f"device profile {where}: {section}.{name}={value!r}, expected a number, {expected}")
        most = MAX_RANKS if name == "node_size" else 1.0 if name in _SHARES else _MOST_S if _is_seconds(name) else _MOST
        if value > most:
            raise UsageError(f"device profile {where}: {section}.{name}={value!r}, expected at most {most:g}")
        found[name] = float(value)
        sources[f"{section}.{name}"] = str(entry["source"])
    return found


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def profile_toml(profile: DeviceProfile) -> str:
    """The text from which `load_profile` makes an equal profile."""
    lines = [f'name = "{profile.name}"', ""]
    for name in _CONSTANTS:
        lines += _entry(f"constants.{name}", getattr(profile, name), profile.sources)
    for kernel_name, kernel in profile.kernels.items():
        form = next(f for f, cls in _KERNEL_CLASSES.items() if isinstance(kernel, cls))
        lines += [f"[kernels.{kernel_name}]", f'form = "{form}"']
        for f in dataclasses.fields(kernel):
            lines += _entry(f"kernels.{kernel_name}.{f.name}", getattr(kernel, f.name), profile.sources)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: float, sources: Mapping[str, str]) -> list[str]:
    source = sources.get(name, "given").replace("\\", "/").replace('"', "'")
    return [f"[{name}]", f"value = {float(value)!r}", f'source = "{source}"', ""]
