"""How the ranks of one machine share its cores."""

from __future__ import annotations

import os

import pytest
import torch

from steelyard.train.assemble import share_cores


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [None]),
        (2, [[0, 1], [2, 3]]),
        (3, [[0], [1], [2]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[0], [1], [2], [3], [0], [1], [2], [3]]),
    ],
)
def test_each_rank_gets_cores_of_its_own(
    ranks: int, expected: list[list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for rank, cores in enumerate(expected):
        given: list[list[int]] = []
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen, given=given: given.append(chosen))
        share_cores(rank, ranks)
        assert given == ([] if cores is None else [cores])
        assert torch.get_num_threads() == (4 if cores is None else len(cores))
    torch.set_num_threads(threads)
