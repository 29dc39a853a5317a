"""Into how many parts each axis of a run is divided, and what must divide what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from steelyard.domain.model_shape import ModelShape
from steelyard.errors import UsageError

Sharding: TypeAlias = Literal["none", "optimizer", "full"]
"""What data parallelism shards: nothing (DDP), the optimizer state (ZeRO-1), or parameters too (FSDP2, ZeRO-3)."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of the mesh axes of one replica.

    Attributes:
        data, tensor, context, stage: devices along each axis.
        virtual_stages: model chunks per pipeline stage (interleaved schedule).
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    stage: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "tensor", "context", "stage", "virtual_stages"):
            if getattr(self, axis) < 1:
                raise UsageError(f"degrees: {axis}={getattr(self, axis)}, expected at least 1")

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.context * self.stage

    @property
    def lanes(self) -> int:
        """Ranks that hold different tokens of one stage: data × context."""
        return self.data * self.context

    def __str__(self) -> str:
        parts = [f"data {self.data}", f"tensor {self.tensor}", f"context {self.context}", f"stage {self.stage}"]
        return ", ".join(parts) + (f" × {self.virtual_stages} virtual" if self.virtual_stages > 1 else "")


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _nearest_tensor(model: ModelShape, wanted: int, *, node_size: int, devices: int | None = None) -> int:
    """A tensor degree that suits the heads and a node; with `devices` it divides these too."""
    heads, kv = model.heads, model.kv_heads
    suited = (
        d
        for d in range(1, min(heads, node_size if node_size > 1 else heads) + 1)
        if heads % d == 0 and (kv % d == 0 or d % kv == 0) and (devices is None or devices % d == 0)
    )
    return min(suited, key=lambda d: (abs(d - wanted), d))


def _nearest_stage(model: ModelShape, degrees: Degrees, rest: int) -> int:
    """A number of stages that divides `rest` devices and that the layers suit; 1 if none does."""
    virtual = degrees.virtual_stages
    suited = [
        d
        for d in range(1, min(rest, model.layers) + 1)
        if rest % d == 0 and d * virtual <= model.layers and (virtual == 1 or model.layers % (d * virtual) == 0)
    ]
    return min(suited or [1], key=lambda d: (abs(d - degrees.stage), d))


def check_degrees(degrees: Degrees, model: ModelShape, devices: int, *, node_size: int = 1) -> None:
    """Refuse degrees that cannot be laid out, and name the nearest value that can.

    Raises:
        UsageError: the product is not the number of devices; heads or layers are not divisible; the tensor axis would
            leave a node.
    """
    heads = model.kv_heads
    if model.heads % degrees.tensor:
        raise UsageError(
            f"degrees: tensor={degrees.tensor} does not divide the {model.heads} heads of {model.name}; nearest: "
            f"tensor={_nearest_tensor(model, degrees.tensor, node_size=node_size)}"
        )
    if heads % degrees.tensor and degrees.tensor % heads:
        raise UsageError(
            f"degrees: tensor={degrees.tensor} and the {heads} key/value heads of {model.name} do not divide each "
            f"other; nearest: tensor={_nearest_tensor(model, degrees.tensor, node_size=node_size)}"
        )
    if degrees.tensor > node_size > 1:
        raise UsageError(
            f"degrees: tensor={degrees.tensor} is more than the {node_size} devices of a node; nearest: "
            f"tensor={_nearest_tensor(model, node_size, node_size=node_size)}"
        )
    chunks = degrees.stage * degrees.virtual_stages
    if chunks > model.layers:
        raise UsageError(
            f"degrees: stage={degrees.stage} × virtual_stages={degrees.virtual_stages} needs {chunks} layers, "
            f"{model.name} has {model.layers}; nearest: stage={_nearest_divisor(model.layers, degrees.stage)}, "
            "virtual_stages=1"
        )
    if degrees.virtual_stages > 1 and model.layers % chunks:
        fit = _nearest_divisor(max(1, model.layers // degrees.stage), degrees.virtual_stages)
        raise UsageError(
            f"degrees: {model.layers} layers of {model.name} do not divide into stage={degrees.stage} × "
            f"virtual_stages={degrees.virtual_stages} equal chunks; nearest: virtual_stages={fit}"
        )
    if degrees.devices != devices:
        rest = degrees.tensor * degrees.context * degrees.stage
        if devices % rest == 0:
            advice = f"nearest: data={devices // rest}"
        else:
            tensor = _nearest_tensor(model, degrees.tensor, node_size=node_size, devices=devices)
            context = _nearest_divisor(devices // tensor, degrees.context)
            stage = _nearest_stage(model, degrees, devices // (tensor * context))
            data = devices // (tensor * context * stage)
            advice = f"nearest: data={data}, tensor={tensor}, context={context}, stage={stage}"
        raise UsageError(f"degrees: {degrees} makes {degrees.devices} devices, the cluster has {devices}; {advice}")
