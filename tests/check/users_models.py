"""A user's file, as `steelyard check --module` is pointed at: sound models, and models with one fault each.

`own_…(balancer)` build a model of plain PyTorch that calls the balancer; `hf_…()` build a Transformers model.

Shapes: T tokens, N heads, H head size, C hidden size, V vocabulary; B rows of a batch, L their length.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCAB, HEADS, HEAD_DIM = 50, 2, 8
HIDDEN = HEADS * HEAD_DIM


class OwnModel(nn.Module):
    """One layer of attention between an embedding and a head."""

    def __init__(self, balancer: Any) -> None:
        super().__init__()
        self.balancer = balancer
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Embedding(128, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=doc_lens)
        return out

    def forward(self, input_ids: Tensor, position_ids: Tensor, doc_lens: list[int]) -> Tensor:
        x_TC = self.tokens(input_ids) + self.positions(position_ids)
        q, k, v = (part.view(-1, HEADS, HEAD_DIM).contiguous() for part in self.qkv(x_TC).chunk(3, dim=-1))
        x_TC = x_TC + self.attend(q, k, v, doc_lens).flatten(1)
        logits_TV: Tensor = self.head(x_TC)
        return logits_TV


class Leaky(OwnModel):
    """All packed tokens are one document to it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=[sum(doc_lens)])
        return out


class Local(OwnModel):
    """Keeps documents apart, but computes them where they are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        parts = []
        for q_D, k_D, v_D in zip(*(x.split(doc_lens) for x in (q, k, v)), strict=True):
            heads_first = (x.transpose(0, 1) for x in (q_D, k_D, v_D))
            parts.append(F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1))
        return torch.cat(parts)


class Blind(OwnModel):
    """Sees no other token at all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=doc_lens)
        return out * 0.0


class HalfBlind(OwnModel):
    """Attention gives nothing in documents of more than 12 tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=doc_lens)
        return out * torch.cat([torch.full((n, 1, 1), float(n <= 12)) for n in doc_lens])


class BlindRow(OwnModel):
    """Attention gives nothing to one token: the 17th of the longest document."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=doc_lens)
        keep = [torch.arange(n) != 16 if n == 96 else torch.ones(n, dtype=torch.bool) for n in doc_lens]
        return out * torch.cat(keep)[:, None, None]


class Windowed(OwnModel):
    """A token sees the one before it, and no other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        out: Tensor = self.balancer.attention(q, k, v, doc_lens=doc_lens, window=2)
        return out


class Pooled(OwnModel):
    """Every token also sees the mean of its document's values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        means = [v_D.mean(0, keepdim=True).expand_as(v_D) for v_D in v.split(doc_lens)]
        return super().attend(q, k, v, doc_lens) + torch.cat(means)


class OneAhead(OwnModel):
    """Every token also sees the next one's value."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, doc_lens: list[int]) -> Tensor:
        following = [F.pad(v_D[1:], (0, 0, 0, 0, 0, 1)) for v_D in v.split(doc_lens)]
        return super().attend(q, k, v, doc_lens) + torch.cat(following)


class Broken(OwnModel):
    """Divides by zero."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) / 0.0


def own_collate(features: list[dict[str, Any]]) -> dict[str, Any]:
    docs = [torch.tensor(feature["input_ids"]) for feature in features]
    labels = [F.pad(doc[1:], (0, 1), value=-100) for doc in docs]
    return {
        "input_ids": torch.cat(docs),
        "position_ids": torch.cat([torch.arange(len(doc)) for doc in docs]),
        "labels": torch.cat(labels),
        "doc_lens": [len(doc) for doc in docs],
    }


def own_loss(model: nn.Module, batch: dict[str, Any], label_count: int) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"], batch["doc_lens"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum") / label_count


def own(balancer: Any) -> nn.Module:
    return OwnModel(balancer)


def own_with_everything(balancer: Any) -> dict[str, Any]:
    return {"model": OwnModel(balancer), "collate": own_collate, "loss": own_loss, "vocab_size": VOCAB}


def own_like_ddp(balancer: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: dict[str, Any], label_count: int, ranks: int) -> Tensor:
        return own_loss(model, batch, label_count) * ranks

    return {"model": OwnModel(balancer), "collate": own_collate, "loss": loss, "gradients": "mean"}


def own_leaky(balancer: Any) -> nn.Module:
    return Leaky(balancer)


def own_mean_of_means(balancer: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["input_ids"], batch["position_ids"], batch["doc_lens"])
        return F.cross_entropy(logits, batch["labels"])

    return {"model": OwnModel(balancer), "loss": loss, "gradients": "mean"}


def own_rolled(balancer: Any) -> dict[str, Any]:
    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = own_collate(features)
        return {**batch, "labels": batch["input_ids"].roll(-1)}

    return {"model": OwnModel(balancer), "collate": collate}


def own_drops_tail(balancer: Any) -> dict[str, Any]:
    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = sum(len(feature["input_ids"]) for feature in features)
        kept, room = [], tokens // 8 * 8 or tokens
        for feature in features:
            kept.append({"input_ids": feature["input_ids"][:room]})
            room -= len(kept[-1]["input_ids"])
        return own_collate([feature for feature in kept if feature["input_ids"]])

    return {"model": OwnModel(balancer), "collate": collate}


def own_local(balancer: Any) -> nn.Module:
    return Local(balancer)


def own_blind(balancer: Any) -> nn.Module:
    return Blind(balancer)


def own_half_blind(balancer: Any) -> nn.Module:
    return HalfBlind(balancer)


def own_blind_row(balancer: Any) -> nn.Module:
    return BlindRow(balancer)


def own_pooled(balancer: Any) -> nn.Module:
    return Pooled(balancer)


def own_one_ahead(balancer: Any) -> nn.Module:
    return OneAhead(balancer)


def own_windowed(balancer: Any) -> nn.Module:
    return Windowed(balancer)


def own_broken(balancer: Any) -> nn.Module:
    return Broken(balancer)


def own_loses_gradients(balancer: Any) -> dict[str, Any]:
    """The loss is right on any number of ranks; its gradient is divided by their number."""

    def loss(model: nn.Module, batch: dict[str, Any], label_count: int, ranks: int) -> Tensor:
        value = own_loss(model, batch, label_count)
        return value / ranks + (value - value / ranks).detach()

    return {"model": OwnModel(balancer), "loss": loss}


def own_one_wrong_gradient(balancer: Any) -> nn.Module:
    """With several ranks the last parameter's gradient is a tenth too large on each."""
    model = OwnModel(balancer)
    model.head.bias.register_hook(lambda gradient: gradient * (1.1 if balancer.ranks > 1 else 1.0))
    return model


def st_collate(features: list[dict[str, Any]]) -> dict[str, Any]:
    from steelyard.integrations.transformers import collate  # here: it loads Transformers' models, which takes seconds

    return collate(features)


def hf(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "initializer_range": 0.2}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def hf_opt() -> Any:
    """Its layers drop values by a call of their own, and its decoder layers."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 128, "init_std": 0.2, "dropout": 0.1, "layerdrop": 0.5}  # fmt: skip
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def hf_leaky() -> Any:
    """Its attention is its own: causal over the whole row."""
    model = hf()

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    for layer in model.model.layers:
        layer.self_attn.forward = forward.__get__(layer.self_attn)
    return model


def hf_mean_of_means() -> dict[str, Any]:
    return {"model": hf(), "loss": lambda model, batch: model(**batch).loss, "gradients": "mean"}


def hf_rolled() -> dict[str, Any]:
    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = st_collate(features)
        return {**batch, "shift_labels": batch["input_ids"].roll(-1, dims=1)}

    return {"model": hf(), "collate": collate}


def hf_shifted_twice() -> dict[str, Any]:
    """The collator shifts, and the model's loss shifts once more."""

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = st_collate(features)
        shifted = batch.pop("shift_labels")
        return {**batch, "labels": shifted}

    return {"model": hf(), "collate": collate}


def hf_drops_tail() -> dict[str, Any]:
    """Every rank trains on whole blocks of 16 tokens only, if it has one."""

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = st_collate(features)
        keep = batch["input_ids"].shape[1] // 16 * 16 or None
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        return {name: batch[name][:, :keep] for name in names}

    return {"model": hf(), "collate": collate}


def hf_flattened() -> dict[str, Any]:
    """Transformers' own packing collator."""
    return {"model": hf(), "collate": transformers.DataCollatorWithFlattening(return_tensors="pt")}


def hf_padded() -> dict[str, Any]:
    """One document a row, padded at the right."""

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        docs = [torch.tensor(feature["input_ids"]) for feature in features]
        rows = nn.utils.rnn.pad_sequence(docs, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(doc) for doc in docs], batch_first=True)
        return {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, -100)}

    return {"model": hf(), "collate": collate}


# What a user may get wrong about the function itself.

counter = itertools.count()


def returns_a_number() -> int:
    return 7


def unknown_key() -> dict[str, Any]:
    return {"model": hf(), "colate": st_collate}


def needs_two(balancer: Any, size: int) -> None:
    raise AssertionError("never called")


def raises() -> None:
    raise RuntimeError("no such checkpoint\nwith a second line")


def unseeded(balancer: Any) -> nn.Module:
    torch.manual_seed(next(counter))
    return OwnModel(balancer)


def loss_is_a_number() -> dict[str, Any]:
    return {"model": hf(), "loss": lambda model, batch: 3.0}


def has_dropout() -> Any:
    return hf(attention_dropout=0.1)


def refuses_halves() -> dict[str, Any]:
    model = hf()

    def loss(called: nn.Module, batch: dict[str, Any], label_count: int) -> Tensor:
        if called is not model:
            raise RuntimeError("run in halves")
        result: Tensor = called(**batch, num_items_in_batch=label_count).loss
        return result

    return {"model": model, "loss": loss}


def short_context() -> Any:
    return hf(max_position_embeddings=32)


def killed_on_two(balancer: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: dict[str, Any], label_count: int, ranks: int) -> Tensor:
        if ranks > 1 and balancer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own_loss(model, batch, label_count)

    return {"model": OwnModel(balancer), "loss": loss}


def fails_on_two(balancer: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: dict[str, Any], label_count: int, ranks: int) -> Tensor:
        if ranks > 1 and balancer.rank == 1:
            raise RuntimeError("only here")
        return own_loss(model, batch, label_count)

    return {"model": OwnModel(balancer), "loss": loss}
