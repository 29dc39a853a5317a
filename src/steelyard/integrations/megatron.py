"""Balanced core attention for Megatron-Core, by one line where the layers are specified.

    spec = steelyard.integrations.megatron.balance(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, …)

`core_attention` is replaced in the specification of every layer. Documents are said by `PackedSeqParams` in the "thd"
format, as for Transformer Engine's attention; the data-parallel ranks share the work.

T: tokens of the rank, N: query heads of the partition, K: key/value heads, H: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from steelyard.balance import Kernel
from steelyard.errors import UsageError
from steelyard.integrations.offset_passes import BalancerOptions, OffsetPasses
from steelyard.observe.meter import Meter
from steelyard.runtime.dispatch import Memory

try:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention
except ImportError as error:
    raise ImportError(
        f"steelyard.integrations.megatron needs Megatron-Core: pip install 'steelyard[megatron]' [{error}]"
    ) from error

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class Shared:
    """What the layers of one model share: made by `balance`, known to the specification and so to each layer.

    Args:
        group: the data-parallel ranks; None: those of Megatron's `parallel_state`.
        options: of the balancer.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: BalancerOptions) -> None:
        self._group, self._options = group, options
        self._passes: OffsetPasses | None = None
        self._equal: list[tuple[TensorWeakRef, TensorWeakRef]] = []

    @property
    def passes(self) -> OffsetPasses:
        """The forward passes, once Megatron's groups exist."""
        if self._passes is None:
            group = self._group if self._group is not None else parallel_state.get_data_parallel_group()
            self._passes = OffsetPasses(group, self._options)
        return self._passes

    def offsets_of(self, where: str, packed: PackedSeqParams | None, *, begins: bool) -> Tensor:
        """Offsets of documents. Comparing tensors waits for the device: it is done where a forward pass begins, and
        later only for tensors that were not compared there.

        Raises:
            UsageError: none are given, or ones that are not the same for queries and keys, or with padding between.
        """
        if packed is None or packed.qkv_format != "thd":
            given = "None" if packed is None else f"qkv_format={packed.qkv_format!r}"
            raise UsageError(
                f"{where}: packed_seq_params {given}; give PackedSeqParams(qkv_format='thd', cu_seqlens_q=…) with the "
                "bounds of the documents of a batch of one row"
            )
        offsets: Tensor = packed.cu_seqlens_q
        if begins:
            self._equal = []
        for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            other = getattr(packed, name)
            if other is None or other is offsets:
                continue
            if any(of() is offsets and equal() is other for of, equal in self._equal):
                continue
            if not torch.equal(other, offsets):
                raise UsageError(
                    f"{where}: {name} differs from cu_seqlens_q; padding between documents is not supported"
                )
            if begins:
                self._equal.append((TensorWeakRef(offsets), TensorWeakRef(other)))
        return offsets

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self  # Megatron copies specifications; process groups cannot be copied


class BalancedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of `DotProductAttention` or `TEDotProductAttention`; `balance` puts it there.

    Raises:
        UsageError: a setting that would change the result and is not honoured; names it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        shared: Shared,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type, pg_collection
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_config(config, attn_mask_type, attention_type, dropout, options)
        self.layer_number = layer_number
        self._kernel = Kernel(softmax_scale, _window_of(config, layer_number))
        self._shared = shared
        shared.passes.add_layer(layer_number, self._kernel.window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """(T, N · H), from query (T, N, H), key and value (T, K, H).

        Raises:
            UsageError: documents, masks or biases that cannot be honoured; names the argument.
        """
        where = f"attention of layer {self.layer_number}"
        passes = self._shared.passes
        with passes.telling_others(query, key, layer=self.layer_number):
            if attention_mask is not None or attention_bias is not None:
                name = "attention_mask" if attention_mask is not None else "attention_bias"
                raise UsageError(
                    f"{where}: {name} cannot be honoured; say the documents by packed_seq_params and give None"
                )
            if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
                raise UsageError(f"{where}: attn_mask_type={attn_mask_type} is not causal, and only causal is computed")
            offsets = self._shared.offsets_of(where, packed_seq_params, begins=passes.begins(self.layer_number))
            if query.dim() != 3:
                raise UsageError(f"{where}: query of shape {tuple(query.shape)}, expected (tokens, heads, head size)")
        out_TNH: Tensor = passes.attention(
            query, key, value, offsets, layer=self.layer_number, kernel=self._kernel, training=self.training
        )
        return out_TNH.flatten(1)


def balance(
    spec: Any,
    group: dist.ProcessGroup | None = None,
    *,
    tolerance: float = 0.05,
    policy: str = "balanced",
    backend: str = "auto",
    memory: Memory = "keep",
    speeds: Sequence[float] = (),
    timeout_s: float = 300.0,
    meter: Meter | None = None,
    planning_group: dist.ProcessGroup | None = None,
) -> Any:
    """A specification of layers whose core attention is balanced over the data-parallel ranks.

    Args:
        spec: of a layer or a block (`get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`,
            `get_gpt_decoder_block_spec`, …); it is not changed. One specification per model.
        group: ranks that share attention work; None: Megatron's data-parallel group.
        tolerance, policy, backend, memory, speeds, timeout_s, meter: as for `steelyard.Balancer`.
        planning_group: a gloo group of the same ranks for lengths; with it no group is made, and transfers run on
            `group`, which must then not be the one that sums gradients.

    Raises:
        UsageError: the specification has no self-attention whose core can be replaced.
    """
    options = BalancerOptions(tolerance, policy, backend, memory, speeds, timeout_s, meter, planning_group)
    shared = Shared(group, options)
    core = ModuleSpec(module=BalancedCoreAttention, params={"shared": shared})
    replaced = _replaced(spec, core)
    if replaced is spec:
        raise UsageError(
            f"balance: {type(spec).__name__} holds no SelfAttention, so there is no core_attention to replace; latent "
            "attention (MLA) is not supported"
        )
    return replaced


def _replaced(spec: Any, core: ModuleSpec) -> Any:
    """A copy of a tree of specifications with another core in every self-attention; the tree itself if it has none."""
    if isinstance(spec, SelfAttentionSubmodules):
        return replace(spec, core_attention=core)
    if isinstance(spec, list):
        parts = [_replaced(part, core) for part in spec]
        return parts if any(new is not old for new, old in zip(parts, spec, strict=True)) else spec
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    changes = {}
    for field in fields(spec):
        old = getattr(spec, field.name)
        new = _replaced(old, core) if is_dataclass(old) or isinstance(old, list) else old
        if new is not old:
            changes[field.name] = new
    return replace(spec, **changes) if changes else spec


def _check_config(
    config: TransformerConfig, mask_type: AttnMaskType, attention_type: str, dropout: float, options: dict[str, Any]
) -> None:
    """Refuse settings of a model that are not honoured."""
    advice = {
        "attention_dropout": (dropout != 0, f"{dropout}", "no attention weights are dropped; set it to 0"),
        "context_parallel_size": (
            config.context_parallel_size > 1,
            f"{config.context_parallel_size}",
            "balanced attention takes its place; set it to 1 and leave the ranks to data parallelism",
        ),
        "pipeline_model_parallel_size": (
            config.pipeline_model_parallel_size > 1,
            f"{config.pipeline_model_parallel_size}",
            "pipelines are not supported; set it to 1",
        ),
        "softmax_type": (config.softmax_type != "vanilla", repr(config.softmax_type), "sinks are not computed"),
        "qk_clip": (bool(config.qk_clip), "True", "the largest scores are not reported; set it to False"),
        "cuda_graph_impl": (
            config.cuda_graph_impl != "none",
            repr(config.cuda_graph_impl),
            "work differs from step to step and cannot be replayed from a graph; set it to 'none'",
        ),
        "attn_mask_type": (mask_type not in _CAUSAL, f"{mask_type}", "only causal attention is computed"),
        "attention_type": (attention_type != "self", repr(attention_type), "only self-attention is computed"),
    }
    for name, (wrong, given, what) in advice.items():
        if wrong:
            raise UsageError(f"core_attention: {name}={given}: {what}")
    refused = [name for name, value in options.items() if value is not None]
    if refused:
        raise UsageError(f"core_attention: {', '.join(refused)} cannot be honoured")


def _window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Keys that a query of a layer sees at most, its own included; None: all earlier ones."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if right > 0:
        raise UsageError(f"core_attention: window_size={config.window_size} lets queries see later keys")
    return None if left < 0 else int(left) + 1
