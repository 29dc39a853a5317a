"""What a new user gets wrong is told in one line that says what to change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers_ranks as tiny_models

import steelyard.integrations.transformers as st
from steelyard.errors import UsageError

BATCH = st.collate([[5, 6, 7], [8, 9]])
IDS = BATCH["input_ids"]


@pytest.fixture(scope="module")
def attached() -> st.Attachment:
    return st.attach(tiny_models.tiny())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda _: st.collate(["x"]), r"token ids of document 0: 'x'; expected whole numbers in a row, such as \["),
        (lambda _: st.collate("text"), "documents of type str, expected a list of documents"),
        (lambda _: st.collate({"input_ids": [1]}), "documents of type dict, expected a list"),
        (lambda _: st.collate([{"text": "a"}]), "document 0 has text and no input_ids; tokenise it first"),
        (lambda _: st.collate([5, 6]), "document 0: 5; expected whole numbers in a row"),
        (lambda _: st.collate([[1.5]]), r"document 0: \[1.5\]; expected whole numbers"),
        (lambda _: st.collate([[True, False]]), "document 0: .*; expected whole numbers"),
        (lambda _: st.collate([[3], [-1, 2]]), "token ids of document 1: -1 at place 0; expected token ids from 0"),
        (lambda _: st.collate([{"input_ids": [2, -100]}]), "input_ids of document 0: -100 at place 1"),
        (lambda _: st.collate([[[1, 2], [3, 4]]]), r"document 0: shape \(2, 2\).*a document for each row"),
        (lambda _: st.collate([{"input_ids": [1, 2], "labels": "ab"}]), "labels of document 0: 'ab'"),
        (lambda _: st.collate([{"input_ids": [1, 2], "attention_mask": [1]}]), "2 tokens and an attention_mask of 1"),
        (lambda _: st.label_count([[1, 2]]), "a batch of type list: expected a mapping"),
        (lambda _: st.attach("model"), "str is no Transformers model"),
        (lambda _: st.attach(tiny_models.tiny(), "gloo"), "attach: group='gloo', expected a process group"),
        (lambda _: st.attach(tiny_models.tiny(), policy="best"), "policy='best', expected one of"),
        (lambda _: st.attach(tiny_models.tiny(), policy="wlb"), r"attach: policy='wlb' places the tokens.*use one of"),
        (lambda a: a.model(**BATCH, alibi_slopes=IDS), "alibi_slopes is given, and it is not known whether"),
        (lambda _: st.attach(tiny_models.tiny(), backend="gpu"), "attach: backend='gpu', expected one of auto, cpu"),
        (lambda _: st.attach(tiny_models.tiny(), timeout_s=0), "attach: timeout_s=0, expected seconds above 0"),
        (lambda _: st.attach(tiny_models.tiny(), tolerance="x"), "tolerance='x', expected a number"),
        (lambda a: st.BalanceCallback(a.model), r"expected what attach returned, as in BalanceCallback\(attached\)"),
        (lambda a: a.plan([BATCH]), "a batch of type list: expected a mapping with input_ids"),
        (lambda a: a.plan_together(BATCH), "expected a list of one or more batches; `plan` takes a single one"),
        (lambda a: a.plan_together([]), "expected a list of one or more batches"),
        (lambda a: a.evaluate(BATCH), "expected several batches, such as"),
        (lambda a: next(a.prefetch(BATCH)), "expected several batches, such as"),
        (lambda a: a.model(**BATCH, steelyard_plan=a.balancer.plan([[3, 2]])), "expected what `attached.plan"),
        (lambda a: a.model(input_ids=IDS[:, :0]), r"a batch of shape \(1, 0\) holds no token; .* as collate\(\[\]\)"),
        (lambda a: a.model(input_ids=IDS.float()), "input_ids of dtype torch.float32, expected token ids"),
        (lambda a: pickle.dumps(a.model), "an attached model cannot be pickled: save its weights"),
        (lambda a: a.model(input_ids=IDS[0]), r"without input_ids or inputs_embeds of \(rows, tokens\)"),
        (lambda a: a.model(input_ids=IDS, position_ids=[[0, 1, 2, 0, 1]]), "position_ids of type list"),
        (lambda a: a.model(input_ids=IDS, attention_mask=[[1] * 5]), "attention_mask of type list"),
        (lambda a: a.model(input_ids=IDS, cu_seq_lens_q=torch.tensor([0.0, 5.0])), "cu_seq_lens_q of dtype float32"),
        (lambda a: a.model(input_ids=IDS, position_ids=torch.tensor([[0, 1, 4, 5, 6]])), "from 1 to 4 at column 2"),
        (lambda a: st.PingPong(a.model)(BATCH), r"give the batch by name, as in together\(\*\*batch\)"),
        (lambda a: st.PingPong(a.model)(halves=BATCH), "8 halves, expected 2"),
    ],
)
def test_mistakes_are_told_in_one_line(attached: st.Attachment, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        call(attached)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_what_looks_odd_and_is_meant() -> None:
    assert st.collate([torch.tensor([[1, 2]])])["input_ids"].tolist() == [[1, 2]], "one row is one document"
    assert st.collate(torch.tensor([[1, 2], [3, 4]]))["cu_seq_lens_q"].tolist() == [0, 2, 4], "a document for each row"
    assert st.collate(iter([[1, 2]]))["input_ids"].tolist() == [[1, 2]]
