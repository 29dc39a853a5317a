"""`PingPong` in one process; several ranks are in tests/multiprocess/test_transformers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers_ranks as tiny_models

import steelyard.integrations.transformers as st
from steelyard.errors import UsageError
from steelyard.integrations.transformers.ping_pong import split

DOCS = [tiny_models.tokens_of(i, n) for i, n in enumerate((5, 3, 4, 9))]


def attached_model() -> Any:
    model = tiny_models.tiny()
    st.attach(model)
    return model


def test_split_is_between_documents_near_the_middle() -> None:
    (one, other), padded = split(st.collate(DOCS))
    assert not padded
    assert one["cu_seq_lens_q"].tolist() == [0, 5, 8, 12] and other["cu_seq_lens_q"].tolist() == [0, 9]
    assert torch.equal(torch.cat([one["input_ids"], other["input_ids"]], 1), st.collate(DOCS)["input_ids"])
    assert (one["max_length_q"], other["max_length_k"]) == (5, 9)
    assert one["shift_labels"].shape == (1, 12) and other["position_ids"].tolist() == [list(range(9))]


def test_a_single_document_is_not_cut() -> None:
    (one, other), padded = split(st.collate(DOCS[:1]))
    assert padded and one["input_ids"].shape == (1, 5) and other["input_ids"].shape == (1, 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_loss_and_logits_are_the_model_s_own(count: int) -> None:
    model = attached_model()
    batch = st.collate(DOCS[:count])
    together = st.PingPong(model)
    expected = model(**batch)
    assert float(together(**batch).loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert float(together(**batch, num_items_in_batch=7).loss) == pytest.approx(
        float(model(**batch, num_items_in_batch=7).loss), rel=1e-6
    )
    with torch.no_grad():
        assert torch.allclose(together(**batch).logits, expected.logits, atol=1e-6)


def test_batches_of_several_rows_are_split_by_rows() -> None:
    model = attached_model()
    tokens = torch.tensor([DOCS[0], DOCS[3][:5], DOCS[3][4:]])
    batch = {"input_ids": tokens, "labels": tokens}
    assert float(st.PingPong(model)(**batch).loss) == pytest.approx(float(model(**batch).loss), rel=1e-6)


def test_attributes_are_the_model_s() -> None:
    model = attached_model()
    assert st.PingPong(model).config is model.config
    with pytest.raises(AttributeError):
        st.PingPong(model).no_such_attribute  # noqa: B018


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    model = attached_model()
    model.model.layers[0].mlp.register_forward_hook(lambda *call: torch.nn.functional.dropout(call[-1], 0.1))
    model.train()
    with pytest.raises(UsageError, match="draws random numbers"):
        st.PingPong(model)(**st.collate(DOCS))


def test_dropout_is_refused_before_anything_is_computed() -> None:
    model = attached_model()
    model.model.layers[0].mlp.extra = torch.nn.Dropout(0.25)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(UsageError, match=r"layers.0.mlp.extra is Dropout, p=0.25"):
        st.PingPong(model.train())(**st.collate(DOCS))


def test_what_is_not_attached_or_given_twice() -> None:
    with pytest.raises(UsageError, match="not attached"):
        st.PingPong(tiny_models.tiny())
    together = st.PingPong(attached_model())
    batch = st.collate(DOCS)
    with pytest.raises(UsageError, match="one or the other"):
        together(halves=[batch, batch], **batch)
    with pytest.raises(UsageError, match="1 halves"):
        together(halves=[batch])
    with pytest.raises(UsageError, match="without input_ids; give"):
        together()
    embeds = {"inputs_embeds": torch.zeros(1, 12, 32), "labels": batch["labels"]}
    for given in (embeds, {"halves": [batch, embeds]}):
        with pytest.raises(UsageError, match=r"without input_ids \(inputs_embeds cannot be split\)"):
            together(**given)
