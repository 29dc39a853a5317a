"""Which documents are read from a batch, and what is refused."""

from __future__ import annotations

import pytest
import torch

from steelyard.errors import UsageError
from steelyard.integrations.transformers.documents import read_documents


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.int64)


def test_every_row_is_a_document_without_anything_else() -> None:
    found = read_documents({"input_ids": ids(2, 5)})
    assert found.lengths == (5, 5) and found.rows is None and found.batch_shape == (2, 5)


def test_positions_that_restart() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert read_documents({"input_ids": ids(1, 6), "position_ids": positions}).lengths == (3, 2, 1)
    # One row of positions for all rows, as models make them themselves.
    assert read_documents({"input_ids": ids(2, 6), "position_ids": positions}).lengths == (3, 2, 1, 3, 2, 1)


def test_a_mask_of_ones_changes_nothing() -> None:
    batch = {"input_ids": ids(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.ones(1, 4)}
    assert read_documents(batch).lengths == (2, 2)


def test_cu_seq_lens_win_over_positions_and_empty_documents_are_left_out() -> None:
    for bounds in ([0, 5, 8], [0, 0, 5, 5, 8, 8, 8]):
        batch = {"input_ids": ids(1, 8), "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32)}
        assert read_documents(batch).lengths == (5, 3)


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], [0, 1, 2, 5, 6, 7, 8, 9]),
        ([[0, 0, 1, 1, 1], [1] * 5], [2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_padding_is_left_out(mask: list[list[int]], rows: list[int]) -> None:
    found = read_documents({"input_ids": ids(2, 5), "attention_mask": torch.tensor(mask)})
    assert found.lengths == (3, 5)
    assert found.rows is not None and found.rows.tolist() == rows


def test_left_padding_with_the_positions_that_generate_makes() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    assert read_documents({"input_ids": ids(1, 5), "attention_mask": mask, "position_ids": positions}).lengths == (3,)


def test_documents_between_padding() -> None:
    batch = {
        "input_ids": ids(1, 6),
        "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
    }
    assert read_documents(batch).lengths == (2, 2)


def test_a_row_of_padding_only() -> None:
    found = read_documents({"input_ids": ids(2, 2), "attention_mask": torch.tensor([[0, 0], [1, 1]])})
    assert found.lengths == (2,) and found.rows is not None and found.rows.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, "only a padding mask"),
        ({"attention_mask": {"full_attention": None}}, "only a padding mask"),
        ({"attention_mask": torch.ones(1, 9)}, "cache"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "in the middle of row 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "from 0 to 6"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 2, 6])}, "ascending"),
        ({"cu_seq_lens_q": torch.tensor([0, 6]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, "contradict"),
        ({"position_ids": torch.zeros(3, 1, 6)}, "one position per token"),
        ({"input_ids": None}, "no documents"),
    ],
)
def test_what_cannot_be_honoured_is_refused(batch: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_documents({"input_ids": ids(1, 6), **batch})


def test_a_document_must_not_run_on_into_the_next_row() -> None:
    with pytest.raises(UsageError, match="from one row of the batch to the next"):
        read_documents({"input_ids": ids(2, 4), "cu_seq_lens_q": torch.tensor([0, 3, 8])})
