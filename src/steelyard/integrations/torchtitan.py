"""Balanced core attention for torchtitan 0.3, by one line in the trainer's configuration.

    config.model_spec = steelyard.integrations.torchtitan.balance(config.model_spec)

The attention inside each block (`inner_attention`) is replaced in the model's configuration, by a converter; documents
are those that torchtitan's data loaders mark by positions that restart, which it hands to every layer as
`VarlenMetadata`. The ranks of the "batch" mesh share the work: all data-parallel ones, replicated or sharded.

B: rows of a batch, L: their length, T = B · L, N: query heads, K: key/value heads, H: head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.balance import Kernel
from steelyard.errors import UsageError
from steelyard.integrations.offset_passes import BalancerOptions, OffsetPasses
from steelyard.observe.meter import Meter
from steelyard.runtime.dispatch import Memory

try:
    from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention, VarlenMetadata
    from torchtitan.protocols.model import ModelConfigConverter
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        f"steelyard.integrations.torchtitan needs torchtitan 0.3 and triton: pip install 'steelyard[torchtitan]' "
        f"[{error}]"
    ) from error

_CAUSAL = 0
_UNLIMITED = -1


class BalancedAttention(VarlenAttention):  # type: ignore[misc]
    """Takes the place of `VarlenAttention`; being one, it is given documents by torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        layer: int
        """Number of the layer in the model."""

    def __init__(self, config: BalancedAttention.Config) -> None:
        Module.__init__(self)
        self.layer = config.layer
        self.window_size = config.window_size
        self._window = _window_of(config.window_size)
        self._passes: OffsetPasses | None = None

    def bind(self, passes: OffsetPasses) -> None:
        """Say with whom this layer is computed."""
        passes.add_layer(self.layer, self._window)
        self._passes = passes

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """(B, L, N, H); k and v have K heads. Grouped heads are seen from the shapes, so `enable_gqa` says
        nothing new. The arguments have torchtitan's names, by which its tensor parallelism shards them.

        Raises:
            UsageError: what would change the result and is not honoured; names the argument.
        """
        del enable_gqa
        if self._passes is None:
            raise UsageError(
                f"attention of layer {self.layer} does not know its ranks: use balance(model_spec) in the "
                "configuration, or bind(model, group) after the model is built"
            )
        q_TNH, k_TKH, v_TKH = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        options["out_transform"] = out_transform
        with self._passes.telling_others(q_TNH, k_TKH, layer=self.layer):
            _check_call(self.layer, attention_masks, options)
        out_TNH = self._passes.attention(
            q_TNH,
            k_TKH,
            v_TKH,
            attention_masks.cu_seq_q,
            layer=self.layer,
            kernel=Kernel(scale, self._window),
            training=self.training,
        )
        out_BLNH: Tensor = out_TNH.view(q_BLNH.shape)
        return out_BLNH


def _check_call(layer: int, attention_masks: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments that would change the result and are not honoured, and a batch without documents."""
    refused = [name for name, value in options.items() if value is not None]
    if refused:
        raise UsageError(f"attention of layer {layer}: {', '.join(refused)} cannot be honoured")
    if not isinstance(attention_masks, VarlenMetadata):
        raise UsageError(
            f"attention of layer {layer}: attention_masks of type {type(attention_masks).__name__}, expected "
            "VarlenMetadata: batches need positions that restart at 0 with every document"
        )


class BalancedAttentionConverter(ModelConfigConverter):  # type: ignore[misc]
    """Replaces the attention of every block in a model's configuration, as torchtitan's converters do.

    `balance` uses it. On its own it is for training loops that build the model themselves: call `bind` after that.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: BalancedAttentionConverter.Config) -> None:
        del config

    def convert(self, model_config: Any) -> Any:
        """The same configuration, changed in place.

        Raises:
            UsageError: an attention that is not computed exactly; it is named.
        """
        found = [
            (name, inner, owner)
            for name, inner, owner, attribute in model_config.traverse(Module.Config, recurse=True)
            if attribute == "inner_attention"
        ]
        if not found:
            raise UsageError(
                f"balance: {type(model_config).__qualname__} has no inner_attention, so there is nothing to balance"
            )
        for name, inner, owner in found:
            _check(name, inner, owner)
        for layer, (_, inner, owner) in enumerate(found):
            window_size = inner.window_size if isinstance(inner, VarlenAttention.Config) else (_UNLIMITED, _CAUSAL)
            owner.inner_attention = BalancedAttention.Config(
                layer=layer,
                window_size=window_size,
                param_init=inner.param_init,
                sharding_config=inner.sharding_config,
            )
        return model_config


def balance(
    model_spec: ModelSpec,
    *,
    tolerance: float = 0.05,
    policy: str = "balanced",
    backend: str = "auto",
    memory: Memory = "keep",
    speeds: Sequence[float] = (),
    timeout_s: float = 300.0,
    meter: Meter | None = None,
) -> ModelSpec:
    """A model specification whose core attention is balanced over the data-parallel ranks.

    Args:
        model_spec: as from torchtitan's `model_registry`; its configuration is converted in place.
        tolerance, policy, backend, memory, speeds, timeout_s, meter: as for `steelyard.Balancer`.

    Returns:
        The specification, for `Trainer.Config.model_spec`. Its parallelisation binds the attention to the ranks.

    Raises:
        UsageError: an attention that is not computed exactly, or, when the trainer parallelises the model, a setting
            under which it cannot be balanced; names it.
    """
    converter = BalancedAttentionConverter.Config().build()
    options = BalancerOptions(tolerance, policy, backend, memory, speeds, timeout_s, meter)
    return replace(
        model_spec,
        model=converter.convert(model_spec.model),
        parallelize_fn=functools.partial(_parallelize, model_spec.parallelize_fn, options),
    )


def bind(model: nn.Module, group: dist.ProcessGroup | None, options: BalancerOptions | None = None) -> OffsetPasses:
    """Tell a model's attention with which ranks it shares work; `balance` does it by itself.

    Args:
        model: built from a configuration that `BalancedAttentionConverter` changed; wrapped or not.
        group: the data-parallel ranks; with tensor parallelism those of the same tensor index. None: alone.
        options: of the balancer; None: its defaults.

    Raises:
        UsageError: the model has no such attention.
    """
    layers = [module for module in model.modules() if isinstance(module, BalancedAttention)]
    if not layers:
        raise UsageError(
            f"bind: {type(model).__name__} has no balanced attention; convert its configuration before it is built"
        )
    passes = OffsetPasses(group, options if options is not None else BalancerOptions())
    for layer in layers:
        layer.bind(passes)
    return passes


def _parallelize(
    parallelize: Callable[..., nn.Module], options: BalancerOptions, model: nn.Module, **given: Any
) -> Any:
    """Run torchtitan's parallelisation, and bind the attention to the ranks of its mesh."""
    dims, compile_config, training = given["parallel_dims"], given["compile_config"], given["training"]
    if dims.cp_enabled:
        raise UsageError(
            "context_parallel_degree > 1: balanced attention takes the place of context parallelism; set it to 1 and "
            "leave its ranks to data parallelism"
        )
    if dims.pp_enabled:
        raise UsageError("pipeline_parallel_degree > 1 is not supported with balanced attention; set it to 1")
    if compile_config.enable and "model" in compile_config.components:
        raise UsageError(
            "compile.components contains 'model': torchtitan compiles blocks as one graph each, and a transfer between "
            "ranks cannot be part of one; leave 'model' out of compile.components ('loss' may stay)"
        )
    if not training.disable_cuda_graphs and torch.cuda.is_available():
        raise UsageError(
            "training.disable_cuda_graphs=False: work differs from step to step and cannot be replayed from a graph; "
            "set training.disable_cuda_graphs = True"
        )
    parallel = parallelize(model, **given)
    group = dims.get_mesh("batch").get_group() if dims.dp_enabled else None
    bind(parallel, group, options)
    return parallel


def _check(name: str, inner: Any, owner: Any) -> None:
    """Refuse what is not plain causal attention inside documents, with or without a window."""
    if not isinstance(owner, GQAttention.Config):
        raise UsageError(
            f"balance: {name} belongs to {type(owner).__qualname__}, whose attention is not known to be computed "
            "exactly; models built from GQAttention (Llama 3, Qwen 3) are"
        )
    if not isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        raise UsageError(
            f"balance: {name} is {type(inner).__qualname__}, which sees no documents; build the model with "
            "attn_backend='varlen' or 'flex'"
        )
    if isinstance(inner, VarlenAttention.Config):
        _window_of(inner.window_size)


def _window_of(window_size: tuple[int, int]) -> int | None:
    """Keys that a query sees at most, its own included; None: all earlier ones."""
    left, right = window_size
    if right != _CAUSAL:
        raise UsageError(f"balance: window_size={window_size} lets queries see later keys; only (…, 0) is computed")
    return None if left == _UNLIMITED else left + 1
