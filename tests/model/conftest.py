"""A dense, obvious core attention for packed documents, and chunks to run a model on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from steelyard.model.config import ModelConfig
from steelyard.model.transformer import Decoder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class DenseAttention:
    """Block-diagonal causal attention through a full mask; remembers the layers it was called for."""

    def __init__(self, lengths: Sequence[int]) -> None:
        doc_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        row_T = torch.arange(len(doc_T))
        self.visible_TT = (doc_T[:, None] == doc_T[None]) & (row_T[:, None] >= row_T[None])
        self.layers: list[int] = []

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int) -> Tensor:
        self.layers.append(layer)
        group = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH, v_TNH = (x.repeat_interleave(group, dim=1) for x in (k_TKH, v_TKH))
        scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * q_TNH.shape[-1] ** -0.5
        weights_NTT = scores_NTT.masked_fill(~self.visible_TT, -torch.inf).softmax(-1)
        return torch.einsum("nts,snh->tnh", weights_NTT.to(v_TNH.dtype), v_TNH)


@dataclass(frozen=True)
class PackedChunk:
    """Random documents of the given lengths, packed; labels are shifted per document."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    @property
    def attention(self) -> DenseAttention:
        return DenseAttention(self.lengths)

    def documents(self) -> list[PackedChunk]:
        parts = zip(*(t.split(self.lengths) for t in (self.tokens, self.positions, self.labels)), strict=True)
        return [PackedChunk(*part, (len(part[0]),)) for part in parts]


def pack(lengths: Sequence[int], vocab_size: int = 61, seed: int = 0) -> PackedChunk:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]
    ignored = torch.tensor([-100])
    return PackedChunk(
        torch.cat([*documents, torch.empty(0, dtype=torch.int64)]),
        torch.cat([*(torch.arange(n) for n in lengths), torch.empty(0, dtype=torch.int64)]),
        torch.cat([*(torch.cat((d[1:], ignored)) for d in documents if len(d)), torch.empty(0, dtype=torch.int64)]),
        tuple(lengths),
    )


SMALL = {"vocab_size": 61, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}


def build(dtype: torch.dtype = torch.float32, seed: int = 0, *, recompute: bool = False, **changes: object) -> Decoder:
    """A small decoder, by default with weights large enough that every path matters."""
    values = {**SMALL, "initializer_range": 0.3, **changes}
    model = Decoder(ModelConfig(**values), checkpoint_token_wise=recompute)  # type: ignore[arg-type]
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # norms and biases start at 1 and 0: move them, or a forgotten one would not show
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model.to(dtype)


@pytest.fixture
def make_model() -> Callable[..., Decoder]:
    return build


@pytest.fixture
def make_chunk() -> Callable[..., PackedChunk]:
    return pack
