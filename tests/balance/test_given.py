"""What callers hand over by mistake is told in one line; what means lengths is taken, whatever holds it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.balance import Balancer
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

SHAPE = AttentionShape(4, 2, 8)


def balancer(**options: Any) -> Balancer:
    return Balancer(shape=SHAPE, **options)


def attention(**options: Any) -> torch.Tensor:
    given = {"q": torch.zeros(10, 4, 8), "k": torch.zeros(10, 2, 8), "v": torch.zeros(10, 2, 8), "doc_lens": [10]}
    return balancer().attention(**{**given, **options})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: balancer().plan([100, 200]), r"plan: \[100, 200\], expected a list of document lengths for each nano"),
        (lambda: balancer().plan(100), "plan: 100, expected a list"),
        (lambda: balancer().plan("ab"), "plan: 'ab', expected a list"),
        (lambda: balancer().plan(torch.tensor([3, 4])), r"plan: a tensor of shape \(2,\)"),
        (lambda: balancer().plan([[1], 2]), "expected a list of document lengths for each nano-batch"),
        (lambda: balancer().plan([[100.5]]), r"plan: \[100.5\], expected the lengths .* whole numbers"),
        (lambda: balancer().plan([[-1]]), "cannot have -1 tokens"),
        (lambda: balancer().plan([None]), "plan: None, expected the lengths"),
        (lambda: balancer().prefetch([3]), r"prefetch: \[3\], expected a list"),
        (lambda: balancer().plan_shards([5]), r"plan_shards: \[5\], expected \(doc, start, length\)"),
        (lambda: balancer().begin(plan=balancer().plan([[10]])), "begin: plan=StepPlan"),
        (lambda: balancer(tolerance="0.1"), "tolerance='0.1', expected a number"),
        (lambda: balancer(timeout_s=None), "timeout_s=None, expected a number"),
        (lambda: balancer(timeout_s=0), "timeout_s=0, expected seconds above 0"),
        (lambda: balancer(timeout_s=-5), "timeout_s=-5, expected seconds above 0"),
        (lambda: balancer(timeout_s=float("inf")), "timeout_s=inf, expected seconds above 0"),
        (lambda: balancer(timeout_s=float("nan")), "timeout_s=nan, expected seconds above 0"),
        (lambda: balancer(progress_period_s=0.0), "progress_period_s=0.0, expected seconds above 0"),
        (lambda: balancer(tolerance=float("nan")), "tolerance=nan, expected a number >= 0"),
        (lambda: balancer(row_keys=-1), "row_keys=-1, expected a whole number >= 0; 0 balances pairs"),
        (lambda: balancer(row_keys=1.5), "row_keys=1.5, expected a whole number"),
        (lambda: balancer(backend="flahs"), "backend='flahs', expected one of auto, .*; did you mean 'flash'"),
        (lambda: balancer(backend=None), "backend=None, expected one of auto, cpu, flash, reference$"),
        (lambda: balancer(memory="resent"), "memory='resent', expected one of keep, resend; did you mean 'resend'"),
        (lambda: balancer(policy="balance"), "policy='balance', expected one of .*; did you mean 'balanced'"),
        (lambda: balancer(policy="wlb"), "policy='wlb' places the tokens of documents elsewhere"),
        (lambda: pickle.dumps(balancer()), "a Balancer cannot be pickled: .* make a new Balancer"),
        (lambda: balancer(dtype="bf16"), "dtype='bf16', expected a type of torch"),
        (lambda: balancer(device="cpu"), r"device='cpu', expected torch.device"),
        (lambda: balancer(speeds=2), "speeds=2, expected a number for each rank"),
        (lambda: balancer(speeds=(1.0, 2.0)), "2 speeds for 1 ranks; give one for each rank"),
        (lambda: balancer(policy="best"), "policy='best', expected one of balanced"),
        (lambda: balancer(window="4"), "window='4', expected a whole number or None"),
        (lambda: Balancer("gloo"), "group='gloo', expected a process group"),
        (lambda: Balancer(planning_group=[0, 1]), r"planning_group=\[0, 1\], expected a process group"),
        (lambda: Balancer(shape=(4, 2, 8)), r"shape=\(4, 2, 8\), expected AttentionShape"),
        (lambda: attention(doc_lens=10), "doc_lens: 10, expected the lengths"),
        (lambda: attention(doc_lens=[[10]]), r"doc_lens: \[\[10\]\], expected the lengths"),
        (lambda: attention(shards=[(0, 0, 10)]), "doc_lens and shards are given"),
        (lambda: attention(k=np.zeros((10, 2, 8))), "attention: k=array"),
        (lambda: attention(window=0.5), "window=0.5, expected a whole number"),
        (lambda: attention(softcap="50"), "softcap='50', expected a number"),
        (lambda: attention(sink=0.0), "sink of type float"),
        (lambda: attention(sink=torch.zeros(3)), r"sink has shape \(3,\).*expected one .*per query head, \(4,\)"),
    ],
)
def test_mistakes_are_told_in_one_line(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_lengths_may_be_held_by_anything_that_counts() -> None:
    plain = balancer().plan([[3, 4]])
    for given in ([torch.tensor([3, 4])], [np.array([3, 4])], [[np.int64(3), torch.tensor(4)]], ((3, 4),)):
        step = balancer().plan(given)
        assert step.nano_batches[0].layout.doc_lengths.tolist() == plain.nano_batches[0].layout.doc_lengths.tolist()
    assert balancer().plan([]).nano_batches == () and len(balancer().plan([[]]).nano_batches) == 1
