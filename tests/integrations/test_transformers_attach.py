"""A model with our attention gives what its documents give one by one, or says why it cannot."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import transformers_ranks as tiny_models

import steelyard.integrations.transformers as st
from steelyard.balance import Balancer, Kernel
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

attach_module = importlib.import_module("steelyard.integrations.transformers.attach")
LENGTHS = (5, 3, 4)
DOCS = [tiny_models.tokens_of(i, n) for i, n in enumerate(LENGTHS)]


def logits_one_by_one(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([doc])).logits[0] for doc in DOCS])


WAYS: dict[str, dict[str, Any]] = {
    "position ids alone": {"use_cache": False},
    "with the default use_cache": {},
    "with a mask of ones": {"attention_mask": torch.ones(1, 12, dtype=torch.int64)},
    "with cu_seq_lens": {key: st.collate(DOCS)[key] for key in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")},
}


@pytest.mark.parametrize("way", WAYS)
def test_documents_are_isolated(way: str) -> None:
    model = tiny_models.tiny()
    expected = logits_one_by_one(model)
    batch = st.collate(DOCS)
    packed = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], **WAYS[way]}
    st.attach(model)
    with torch.no_grad():
        assert torch.allclose(model(**packed).logits[0], expected, atol=2e-6, rtol=0)
        assert model.model(**packed).last_hidden_state.isfinite().all(), "and the decoder can be called alone"


def test_stock_attention_leaks_in_two_of_those_ways() -> None:
    """The control: what this is for."""
    model = tiny_models.tiny()
    expected = logits_one_by_one(model)
    model.set_attn_implementation("sdpa")
    batch = st.collate(DOCS)
    differences = {}
    for way, extra in WAYS.items():
        packed = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], **extra}
        with torch.no_grad():
            differences[way] = float((model(**packed).logits[0] - expected).abs().max())
    assert differences["position ids alone"] < 1e-5
    assert differences["with the default use_cache"] > 0.1 and differences["with a mask of ones"] > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_honoured(side: str) -> None:
    model = tiny_models.tiny()
    expected = logits_one_by_one(model)
    width = max(LENGTHS)
    tokens, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
    for row, doc in enumerate(DOCS):
        at = slice(width - len(doc), width) if side == "left" else slice(0, len(doc))
        tokens[row, at], mask[row, at] = torch.tensor(doc), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    st.attach(model)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.allclose(logits[mask.bool()], expected, atol=2e-6, rtol=0)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_families_are_exact(name: str) -> None:
    model = tiny_models.tiny(name)
    expected = logits_one_by_one(model)
    st.attach(model)
    batch = st.collate(DOCS)
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits[0], expected, atol=2e-5, rtol=0)


def test_window_as_in_the_case() -> None:
    """A window of 4, documents of 6 and 6: row 6 is the first of its document and sees itself only."""
    model = tiny_models.tiny("mistral-window")
    docs = [tiny_models.tokens_of(i, 6) for i in range(2)]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([doc])).logits[0] for doc in docs])
        st.attach(model)
        assert torch.allclose(model(**st.collate(docs)).logits[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"attention_dropout": 0.1}, r"attention dropout \(attention_dropout=0.1\)"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        ("llama", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
    ],
)
def test_features_that_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    model = tiny_models.tiny(name)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(UsageError, match=says):
        st.attach(model)
    assert model.config._attn_implementation == "eager", "and the model is as it was"


@pytest.mark.parametrize(("name", "says"), [("gemma2", "soft cap"), ("mistral-window", "sliding window")])
def test_a_back_end_that_cannot_is_refused_by_feature(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's kernels on a GPU, which have no soft cap."""
    check = Balancer.check

    def plain_only(self: Balancer, kernel: Kernel, shape: AttentionShape) -> str:
        if kernel != Kernel():
            raise UsageError("attention back end 'plain' cannot")
        return check(self, kernel, shape)

    monkeypatch.setattr(Balancer, "check", plain_only)
    with pytest.raises(UsageError, match=rf"attach: the model uses a {says} \(.*\): .*back end 'plain' cannot"):
        st.attach(tiny_models.tiny(name))


def test_what_a_layer_hands_over_and_nobody_honours_is_refused() -> None:
    """Sinks for every token, keys chosen by an index: models of that kind pass them as keywords."""
    model = tiny_models.tiny()
    attached = st.attach(model)
    batch = st.collate(DOCS)
    for name in ("sinks", "indices", "position_bias"):
        with pytest.raises(UsageError, match=f"attention: {name} is given"):
            model(**batch, **{name: torch.zeros(1)})
    attached.detach()


def test_models_that_are_none_or_not_causal_decoders() -> None:
    with pytest.raises(UsageError, match="no Transformers model"):
        st.attach(torch.nn.Linear(2, 2))
    config = transformers.BartConfig(
        vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    with pytest.raises(UsageError, match="cross attention"):
        st.attach(transformers.BartForConditionalGeneration(config))


def test_generation_is_refused_with_advice_and_works_detached() -> None:
    model = tiny_models.tiny()
    prompt = torch.tensor([DOCS[0]])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    attached = st.attach(model)
    with pytest.raises(UsageError, match=r"attached\.detached"):
        model.generate(prompt, max_new_tokens=4, do_sample=False)
    with attached.detached():
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    assert model.config._attn_implementation == "steelyard"
    attached.detach()
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)


def test_masks_of_other_kinds_are_refused() -> None:
    model = tiny_models.tiny()
    st.attach(model)
    tokens = torch.tensor([DOCS[0]])
    with pytest.raises(UsageError, match="only a padding mask"):
        model(input_ids=tokens, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_a_bidirectional_block_is_refused() -> None:
    model = tiny_models.tiny()
    st.attach(model)
    embeds = model.get_input_embeddings()(torch.tensor([DOCS[0]]))
    blocks = torch.tensor([[-1, 0, 0, -1, -1]])
    with pytest.raises(UsageError, match="see later ones"):
        transformers.masking_utils.create_causal_mask(
            config=model.config, inputs_embeds=embeds, attention_mask=None, cache=None, block_sequence_ids=blocks
        )


def test_attention_without_attach_says_what_to_do() -> None:
    st.attach(tiny_models.tiny())  # registers the name
    model = tiny_models.tiny()
    model.set_attn_implementation("steelyard")
    with pytest.raises(UsageError, match="attach the model"):
        model(input_ids=torch.tensor([DOCS[0]]))


def test_a_plan_for_other_documents_is_refused() -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    plan = attached.plan(st.collate(DOCS))
    with pytest.raises(UsageError, match="other documents"):
        model(**st.collate(DOCS[:2]), steelyard_plan=plan)


def test_plans_made_ahead_are_the_same() -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    batches = [st.collate(DOCS[:count]) for count in (1, 2, 3)]
    expected = [float(model(**batch).loss) for batch in batches]
    ahead = list(attached.prefetch(iter(batches)))
    assert [batch["steelyard_plan"].label_count for batch in ahead] == [4, 6, 9]
    assert [float(model(**batch).loss) for batch in ahead] == expected


def test_all_steps_are_reported() -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    batches = [st.collate(DOCS[:count]) for count in (1, 2)]
    for batch in attached.prefetch(batches):
        model(**batch)
        assert batch["steelyard_plan"].label_count
    assert attached.report._steps == 2
    attached.plan(batches[0])
    model(**batches[0])
    assert attached.report._steps == 4
    attached.evaluate(batches)
    assert attached.report._steps == 6


def test_an_error_in_evaluation_leaves_the_model_training() -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    model.train()

    def batches() -> Iterator[dict[str, Any]]:
        yield st.collate(DOCS)
        raise OSError("shard 3 is gone")

    with pytest.raises(OSError, match="shard 3"):
        attached.evaluate(batches())
    assert model.training
    given = attached.prefetch(batches())
    assert next(given)["steelyard_plan"].label_count == 9, "what was read before is still handed out"
    with pytest.raises(OSError, match="shard 3"):
        next(given)


def test_alone_a_rank_computes_as_it_does_with_others() -> None:
    model = tiny_models.tiny(dtype=torch.float64)
    attached = st.attach(model, backend="reference", memory="resend", tolerance=0.2)
    with attached.local():
        alone = attached._balancer()
        assert float(model(**st.collate(DOCS)).loss) > 0
    own = attached.balancer
    assert alone is not own and (alone.memory, alone.tolerance, alone.ranks) == ("resend", 0.2, 1)
    assert alone.backend.name == own.backend.name == "reference" and alone._dtype == torch.float64


@pytest.mark.parametrize("make", [lambda: st.attach(tiny_models.tiny()), Balancer])
def test_before_the_ranks_are_joined(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist.group.WORLD` is None until then: taken for a single process, every rank would go on by itself."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"one of several .* call torch.distributed.init_process_group"):
        make()


def test_attaching_twice_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    with monkeypatch.context() as no_groups:  # refused before anything collective
        no_groups.setattr(attach_module, "Balancer", lambda *_, **__: pytest.fail("a balancer was made"))
        with pytest.raises(UsageError, match="attached already"):
            st.attach(model)
    twin = copy.deepcopy(model)
    batch = st.collate(DOCS)
    expected = model(**batch).logits
    assert torch.equal(twin(**batch).logits, expected)
    attached.detach()
    assert torch.equal(twin(**batch).logits, expected), "the copy is still attached, and balanced by the same"
    twin_attached = twin.steelyard_attachment
    assert twin_attached is not attached and twin_attached.balancer is attached.balancer
    twin_attached.detach()
    for each in (model, twin):
        assert each.config._attn_implementation == "eager" and not each._forward_pre_hooks and not each._forward_hooks
        st.attach(each)


def test_a_copy_is_detached_by_itself() -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    twin = copy.deepcopy(model)
    twin.steelyard_attachment.detach()
    batch = st.collate(DOCS)
    expected = model(**batch).logits
    assert attached.balancer._planned_steps == 1, "the model is attached as before"
    docs = torch.cat([twin(input_ids=torch.tensor([doc])).logits for doc in DOCS], dim=1)
    assert torch.allclose(docs, expected, atol=1e-5)
    assert attached.balancer._planned_steps == 1, "and the copy is not"


def test_a_copy_that_was_dropped_keeps_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.tiny()
    attached = st.attach(model)
    closed: list[str] = []
    monkeypatch.setattr(attached.balancer, "close", lambda: closed.append("balancer"))
    monkeypatch.setattr(type(attached._joined_groups), "release", lambda _: closed.append("groups"))
    gc.disable()  # no collection by chance
    try:
        kept, dropped = copy.deepcopy(model), copy.deepcopy(model)
        del dropped
        attached.detach()
        assert not closed, "a copy still uses them"
        kept.steelyard_attachment.detach()
    finally:
        gc.enable()
    assert closed == ["balancer", "groups"]


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_backward_after_the_model_was_detached_is_refused(checkpointing: bool | None) -> None:
    """Under reentrant checkpointing the layers would be run again with stock attention, and nothing would say so."""
    model = tiny_models.tiny().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    attached = st.attach(model)
    batch = st.collate(DOCS)
    first, second = (model(**batch).loss for _ in range(2))
    with attached.detached(), pytest.raises(UsageError, match="backward after the model was detached"):
        first.backward()
    second.backward()
    loss = model(**batch).loss
    inner = model(**batch, output_hidden_states=True).hidden_states[1].sum()
    attached.detach()
    for each in (loss, inner):
        with pytest.raises(UsageError, match="backward after the model was detached"):
            each.backward()


def test_memory_of_a_forward_pass_is_kept_for_backward_only() -> None:
    """Nothing outlives the graph: out, log-sum-exp and inputs go with it."""
    import weakref

    model = tiny_models.tiny()
    attached = st.attach(model)
    batch = st.collate(DOCS)
    plan = attached.plan(batch)
    passes = []
    begin = plan.begin
    plan.begin = lambda *args: passes.append(weakref.ref(p := begin(*args))) or p  # type: ignore[method-assign]
    loss = model(**batch, steelyard_plan=plan).loss
    loss.backward()
    del loss
    gc.collect()
    assert passes and passes[0]() is None


def test_token_wise_parts_can_be_compiled() -> None:
    model = tiny_models.tiny()
    expected = logits_one_by_one(model)
    st.attach(model)
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager")
        layer.input_layernorm.compile(backend="aot_eager")
    batch = st.collate(DOCS)
    out = model(**batch)
    assert torch.allclose(out.logits[0].detach(), expected, atol=2e-6, rtol=0)
    out.loss.backward()
