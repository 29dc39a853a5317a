"""The collator: labels are shifted once, inside documents."""

from __future__ import annotations

import pytest
import torch
import transformers_ranks as tiny_models

import steelyard.integrations.transformers as st
from steelyard.errors import UsageError


def test_labels_positions_and_bounds() -> None:
    batch = st.collate([[10, 11, 12], [], [20, 21]])
    assert batch["shift_labels"].tolist() == [[11, 12, -100, 21, -100]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5] and batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == 3
    assert st.label_count(batch) == 3
    without = {key: value for key, value in batch.items() if key != "shift_labels"}
    assert st.label_count(without) == 3, "a loss that shifts labels itself counts the same"


def test_prompts_that_are_not_learned_and_padded_features() -> None:
    batch = st.collate([{"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    assert batch["shift_labels"].tolist() == [[6, 7, -100]]


def test_no_document_is_a_token_that_does_not_count() -> None:
    batch = st.collate([[], []])
    assert batch["input_ids"].shape == (1, 1) and st.label_count(batch) == 0


def test_labels_of_another_length() -> None:
    with pytest.raises(UsageError, match="document 0 has 2 tokens and 1 labels"):
        st.collate([{"input_ids": [1, 2], "labels": [1]}])


def test_loss_through_the_model_is_the_loss_per_document() -> None:
    """Not shifted twice: the model's own loss of the packed batch is the mean over the documents' tokens."""
    model = tiny_models.tiny()
    docs = [tiny_models.tokens_of(i, n) for i, n in enumerate((5, 3, 4))]
    sums = [model(input_ids=torch.tensor([doc]), labels=torch.tensor([doc])).loss * (len(doc) - 1) for doc in docs]
    st.attach(model)
    for batch in (st.collate(docs), {k: v for k, v in st.collate(docs).items() if k != "shift_labels"}):
        assert float(model(**batch).loss) == pytest.approx(float(sum(sums)) / 9, rel=1e-6)
