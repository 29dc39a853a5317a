"""Cases from practice (`shared/cases.md`) through a Transformers model on one to four ranks.

What is right is always the same: the documents one by one, through the stock model, in one process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases_ranks as on_rank
import numpy as np
import pytest
import torch
import transformers_ranks as tiny_models

import steelyard.integrations.transformers as st
from steelyard.testing.pool import WorkerPool

HERE = Path(__file__).parent
CASES: dict[str, tuple[str, ...]] = {
    "isolation": (
        "test_transformers_cases::test_isolation_on_any_number_of_ranks",
        "test_transformers_attach::test_documents_are_isolated",
        "test_transformers_attach::test_stock_attention_leaks_in_two_of_those_ways",
    ),
    "any number of ranks": (
        "test_transformers_cases::test_the_same_numbers_with_1_2_3_and_4_ranks",
        "test_transformers::test_any_number_of_ranks",
    ),
    "positions": (
        "test_transformers_cases::test_parts_of_documents_are_refused_not_taken_for_documents",
        "test_layout::test_case_positions_of_a_head_tail_layout",
    ),
    "label shift": ("test_transformers_cases::test_labels_are_shifted_alike_whatever_the_cut_into_ranks",),
    "token-weighted loss": ("test_transformers_cases::test_loss_weighs_tokens_not_ranks",),
    "empty and masked": (
        "test_transformers_cases::test_empty_documents_and_ranks_and_masked_labels",
        "test_transformers::test_a_rank_without_documents_and_one_without_labels",
        "test_transformers_documents::test_cu_seq_lens_win_over_positions_and_empty_documents_are_left_out",
    ),
    "balance, small": ("test_transformers_cases::test_balance_of_small_documents",),
    "balance, one giant": (
        "test_transformers_cases::test_balance_with_one_giant",
        "test_plans::test_case_one_giant",
    ),
    "uneven counts": ("test_transformers_cases::test_uneven_counts_take_the_same_number_of_rounds",),
    "stricter masks": (
        "test_transformers_cases::test_stricter_masks_on_any_number_of_ranks",
        "test_transformers_cases::test_window_of_the_case",
        "test_transformers_attach::test_features_that_are_refused",
    ),
    "odd lengths": (
        "test_transformers_cases::test_odd_lengths",
        "test_transformers_cases::test_odd_lengths_in_full",
    ),
    "padding mask": (
        "test_transformers_cases::test_padding_on_several_ranks",
        "test_transformers_attach::test_padding_is_honoured",
        "test_transformers_documents::test_what_cannot_be_honoured_is_refused",
    ),
    "checkpointing": (
        "test_transformers_cases::test_bytes_are_sent_as_the_plan_says_with_checkpointing_too",
        "test_transformers::test_checkpointing_sends_and_plans_nothing_twice",
        "test_transformers::test_under_data_parallelism",
    ),
    "only some ranks": (
        "test_transformers::test_what_only_some_ranks_do",
        "test_transformers_cases::test_attaching_alone_names_who_is_missing",
    ),
    "double shift": ("test_transformers_collate::test_loss_through_the_model_is_the_loss_per_document",),
    "repeatability": ("test_transformers::test_ten_steps_twice_are_the_same_bits",),
    "straggler": ("test_transformers_frameworks::test_log_lines_name_the_balance_and_a_slow_rank",),
}
"""For each row of the table, the tests that hold it (module::function)."""

LENGTHS = [7, 1, 13, 4, 0, 30]


def dealt(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Documents in blocks over the ranks."""
    per_rank: list[list[int]] = [[] for _ in range(ranks)]
    for doc, length in enumerate(lengths):
        per_rank[min(ranks - 1, doc * ranks // len(lengths))].append(length)
    return per_rank


def docs_of(lengths_by_rank: Sequence[Sequence[int]]) -> list[list[int]]:
    return [doc for rank in range(len(lengths_by_rank)) for doc in tiny_models.docs_of(lengths_by_rank, rank)]


def assert_same(result: dict[str, Any], loss: float, gradients: dict[str, np.ndarray], bound: float) -> None:
    assert result["loss"] == pytest.approx(loss, rel=bound, abs=bound)
    assert result["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert np.isfinite(result["gradients"][name]).all()
        scale = max(1.0, float(np.abs(gradient).max()))
        np.testing.assert_allclose(result["gradients"][name], gradient, rtol=0, atol=bound * scale, err_msg=name)


def test_every_row_of_the_table_has_its_tests(shared_dir: Path) -> None:
    rows = re.findall(r"^\| ([^|]+?) \| ", (shared_dir / "cases.md").read_text(), flags=re.MULTILINE)
    assert [row for row in rows if row != "case"] == list(CASES)
    tests: dict[str, str] = {}
    for path in HERE.parent.rglob("test_*.py"):
        tests[path.stem] = tests.get(path.stem, "") + path.read_text()
    for row, names in CASES.items():
        for name in names:
            module, function = name.split("::")
            assert f"def {function}(" in tests.get(module, ""), f"{row}: {name} is not there"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_isolation_on_any_number_of_ranks(pool: WorkerPool, ranks: int) -> None:
    for found in pool.run(on_rank.isolation, ranks, [[5, 3, 4, 50], *[[5, 3, 4]] * (ranks - 1)]):
        assert set(found) == set(on_rank.WAYS)
        assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize(
    ("name", "dtype", "bound"), [("all-fp64", torch.float64, 1e-12), ("llama", torch.float32, 5e-6)]
)
def test_the_same_numbers_with_1_2_3_and_4_ranks(pool: WorkerPool, name: str, dtype: torch.dtype, bound: float) -> None:
    docs = [doc for doc in docs_of([LENGTHS]) if doc]
    loss, gradients, logits = on_rank.one_by_one(docs, name, dtype)
    for ranks in (1, 2, 3, 4):
        results = pool.run(on_rank.step, ranks, dealt(LENGTHS, ranks), name, dtype)
        for result in results:
            assert_same(result, loss, gradients, bound)
            assert result["planned"] == 1
        kept = [r for r, own in enumerate(dealt(LENGTHS, ranks)) if sum(own)]
        got = np.concatenate([results[r]["logits"] for r in kept])
        np.testing.assert_allclose(got, logits, rtol=0, atol=bound * max(1.0, float(np.abs(logits).max())))
        assert ranks == 1 or results[0]["bytes"], "something must travel, or this test shows nothing"


def test_parts_of_documents_are_refused_not_taken_for_documents(pool: WorkerPool) -> None:
    """Rank 0 of a head–tail layout holds positions 0, 3, 0, 3 of documents of 4; on this surface they stay whole."""
    one, other = pool.run(on_rank.head_tail, 2)
    assert "position_ids go from 0 to 3 at column 1 of row 0" in one
    assert "position_ids go from 2 to 1 at column 2 of row 0" in other


def test_labels_are_shifted_alike_whatever_the_cut_into_ranks() -> None:
    docs = [[10, 11, 12], [20, 21]]
    for cut in itertools.product(range(2), repeat=2):
        batches = [st.collate([doc for doc, rank in zip(docs, cut, strict=True) if rank == r]) for r in range(2)]
        shifted = {
            tuple(batch["input_ids"][0, low:high].tolist()): batch["shift_labels"][0, low:high].tolist()
            for batch in batches
            for low, high in itertools.pairwise(batch["cu_seq_lens_q"].tolist())
        }
        assert shifted[10, 11, 12] == [11, 12, -100] and shifted[20, 21] == [21, -100]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("micro_batches", [[[[2], [10]] * 2], [[[2], [10]] * 2, [[6, 9], [3]] * 2]])
def test_loss_weighs_tokens_not_ranks(pool: WorkerPool, kind: str, micro_batches: list[list[list[int]]]) -> None:
    """Ranks with 1, 9, 1 and 9 labels, also with another micro-batch: the loss and gradient of one batch of all."""
    flat = [length for lengths in micro_batches for own in lengths for length in own]
    loss, gradients, _ = on_rank.one_by_one(docs_of([flat]))
    for result in pool.run(on_rank.parallel, 4, micro_batches, kind):
        assert_same(result, loss, gradients, 5e-6)
    means, number = [], 0
    for lengths in micro_batches:
        for own in lengths:
            means.append(on_rank.one_by_one([tiny_models.tokens_of(number + i, n) for i, n in enumerate(own)])[0])
            number += len(own)
    assert abs(float(np.mean(means)) - loss) > 0.01, "a mean of means is another number"


def test_empty_documents_and_ranks_and_masked_labels(pool: WorkerPool) -> None:
    loss, gradients, _ = on_rank.one_by_one(docs_of([[5, 3]]))
    results = pool.run(on_rank.empty_and_masked, 3)
    assert [result["loss"] for result in results] == pytest.approx([loss, 0, 0], rel=1e-6)
    for result in results:
        assert_same({**result, "loss": loss}, loss, gradients, 5e-6)


def test_balance_of_small_documents(pool: WorkerPool) -> None:
    loss, gradients, _ = on_rank.one_by_one(docs_of([[4], [12]]))
    for result in pool.run(on_rank.step, 2, [[4], [12]]):
        assert result["work"] == [44, 44] and result["home"] == [10, 78]
        assert_same(result, loss, gradients, 5e-6)


def test_balance_with_one_giant(pool: WorkerPool) -> None:
    """The case's 64 ranks are the planner's; here its shape on four: one document as long as two of each other rank."""
    lengths = [[96], [48, 48], [48, 48], [48, 48]]
    loss, gradients, _ = on_rank.one_by_one(docs_of(lengths))
    for result in pool.run(on_rank.step, 4, lengths, "llama", torch.float32, 0.02):
        mean = sum(result["work"]) / 4
        assert max(result["work"]) <= 1.02 * mean < max(result["home"])
        assert_same(result, loss, gradients, 5e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_counts_take_the_same_number_of_rounds(pool: WorkerPool, ranks: int) -> None:
    """Five documents of 95 on rank 0, five of 20 on rank 1, at most 100 tokens at once; and no document on rank 2."""
    batches = [[[95]] * 5, [[20] * 5], []][:ranks]
    docs = [tiny_models.tokens_of(i, n) for i, n in enumerate([95] * 5 + [20] * 5)]
    loss, gradients, _ = on_rank.one_by_one(docs)
    for result in pool.run(on_rank.uneven, 4, batches, sum(len(doc) - 1 for doc in docs))[:ranks]:
        assert result["rounds"] == result["reported"] == 5
        assert_same(result, loss, gradients, 5e-6)


def test_planning_ahead_needs_a_group_for_lengths(pool: WorkerPool) -> None:
    for said in pool.run(on_rank.prefetch_on_one_group, 2):
        assert said.startswith("UsageError: prefetch") and "planning_group" in said


def test_different_numbers_of_nano_batches_are_an_error_on_every_rank(pool: WorkerPool) -> None:
    for said in pool.run(on_rank.different_numbers_of_nano_batches, 2):
        assert "the ranks came with 2, 1 batches" in said


@pytest.mark.parametrize("memory", ["keep", "resend"])
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_stricter_masks_on_any_number_of_ranks(pool: WorkerPool, name: str, backend: str, memory: str) -> None:
    """A window of 4, a soft cap, sinks (with their gradients), each by both back ends."""
    loss, gradients, _ = on_rank.one_by_one([doc for doc in docs_of([LENGTHS]) if doc], name)
    for ranks in (1, 2, 3, 4) if memory == "keep" else (3,):
        results = pool.run(on_rank.step, ranks, dealt(LENGTHS, ranks), name, torch.float32, 0.0, backend, memory)
        for result in results:
            assert_same(result, loss, gradients, 1e-5)
        assert ranks == 1 or results[0]["bytes"]
    if name == "gpt-oss":
        sinks = [gradient for key, gradient in gradients.items() if key.endswith("sinks")]
        assert len(sinks) == 2 and all(np.abs(gradient).max() > 1e-3 for gradient in sinks)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(("memory", "ping_pong"), [("keep", False), ("keep", True), ("resend", True)])
def test_sinks_with_checkpointing_and_ping_pong(
    pool: WorkerPool, checkpointing: str, memory: str, ping_pong: bool
) -> None:
    lengths = dealt(LENGTHS, 3)
    loss, gradients, _ = on_rank.one_by_one([doc for doc in docs_of(lengths) if doc], "gpt-oss")
    results = pool.run(tiny_models.step, 3, lengths, "gpt-oss", torch.float32, checkpointing, memory, ping_pong)
    for result in results:
        assert_same(result, loss, gradients, 1e-5)
        assert result["order"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_sinks_under_data_parallelism(pool: WorkerPool, kind: str) -> None:
    """FSDP2 frees the sinks after each layer's forward pass, as all parameters, and gathers them for backward."""
    micro_batches = [dealt(LENGTHS, 4), [[9], [], [33], [2, 2]]]
    docs = [tiny_models.tokens_of(i, n) for i, n in enumerate([*LENGTHS, 9, 33, 2, 2]) if n]
    loss, gradients, _ = on_rank.one_by_one(docs, "gpt-oss")
    for result in pool.run(on_rank.parallel, 4, micro_batches, kind, "gpt-oss"):
        assert_same(result, loss, gradients, 1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_window_of_the_case(pool: WorkerPool, ranks: int) -> None:
    """Keys per query 1, 2, 3, 4, 4, 4 in each document of 6; row 6, the first of its document, is its own v."""
    v, out = pool.run(on_rank.uniform_window, ranks)[0]
    for row, keys in enumerate([1, 2, 3, 4, 4, 4] * 2):
        np.testing.assert_allclose(out[row], v[row - keys + 1 : row + 1].mean(0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(out[6], v[6], rtol=0, atol=1e-12)


def test_odd_lengths(pool: WorkerPool) -> None:
    for result in pool.run(on_rank.odd_lengths, 2, [[2047], [385, 1]]):
        assert_odd(result)


@pytest.mark.nightly
def test_odd_lengths_in_full(pool: WorkerPool) -> None:
    for result in pool.run(on_rank.odd_lengths, 2, [[65_535], [12_345, 1]], timeout_s=1200.0):
        assert_odd(result)


def assert_odd(result: dict[str, Any]) -> None:
    one, other = result["losses"]
    assert other == pytest.approx(one, rel=2e-6)
    for name, gradient in result["gradients"][0].items():
        scale = float(np.abs(gradient).max())
        np.testing.assert_allclose(result["gradients"][1][name], gradient, rtol=0, atol=1e-4 * scale, err_msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_several_ranks(pool: WorkerPool, side: str) -> None:
    lengths = [[30, 7, 2], [4, 5]]
    loss, gradients, _ = on_rank.one_by_one(docs_of(lengths))
    for result in pool.run(on_rank.padded, 2, lengths, side):
        assert_same(result, loss, gradients, 5e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("memory", ["keep", "resend"])
def test_bytes_are_sent_as_the_plan_says_with_checkpointing_too(
    pool: WorkerPool, memory: str, checkpointing: bool
) -> None:
    lengths = dealt(LENGTHS, 3)
    args = (lengths, "llama", torch.float32, 0.0, "auto", memory, checkpointing)
    layers, query, key_value, log_sum_exp = 2, 4 * 8 * 4, 2 * 2 * 8 * 4, 4 * 4
    resent = memory == "resend"
    row_bytes = {  # of a query row and of a key row, in each phase
        "dispatch": (query, key_value),
        "return": (query + resent * log_sum_exp, 0),
        "gradient dispatch": (query + resent * (2 * query + log_sum_exp), resent * key_value),
        "gradient return": (query, key_value),
    }
    for result in pool.run(on_rank.step, 3, *args):
        tables = result["tables"]
        for phase, (of_query, of_key) in row_bytes.items():
            ways = [
                layers * (queries * of_query + keys * of_key)
                for queries, keys in ((tables.q_sent, tables.kv_sent), (tables.q_received, tables.kv_received))
            ]
            assert result["bytes"][phase] == tuple(ways if "dispatch" in phase else ways[::-1]), phase
        assert result["planned"] == 1


@pytest.mark.parametrize(("wrapped_first", "ping_pong"), [(False, False), (True, False), (True, True)])
def test_adapters_of_low_rank(pool: WorkerPool, wrapped_first: bool, ping_pong: bool) -> None:
    """As PEFT trains them: beside frozen projections, under a wrapper, with checkpointing."""
    lengths = [[40, 12], [5, 9, 3]]
    loss, gradients = on_rank.adapters_one_by_one(docs_of(lengths))
    assert sum(bool(np.abs(gradient).max()) for gradient in gradients.values()) == 8, "two of each projection learn"
    for result in pool.run(on_rank.adapters, 2, lengths, wrapped_first, ping_pong):
        assert_same(result, loss, gradients, 5e-6)
        assert result["order"]


def test_attaching_alone_names_who_is_missing(pool: WorkerPool) -> None:
    (said, loss), *_ = pool.run(on_rank.attach_alone, 4)
    assert said.startswith(
        "PeerError: process groups: rank 0 waited 1.5 s for ranks 1, 2, 3 to make a group of 4 ranks"
    )
    assert "new_group([0], use_local_synchronization=True)" in said and loss > 0
