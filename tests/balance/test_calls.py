"""What ranks tell of their calls: the first difference is named, what only one of them tells is none."""

from __future__ import annotations

from steelyard.balance.calls import Called, difference


def call(layer: int, window: int | None, step: int = 3) -> Called:
    return step, 0, layer, f"window={window}, scale=None"


def test_any_two_ranks_are_compared() -> None:
    assert difference([(), (call(0, None), call(1, 4)), (call(1, 5),)]) == (
        "attention of layer 1 in step 3: window=4 on rank 1 and window=5 on rank 2"
    )


def test_what_one_rank_alone_has_told_of_is_no_difference() -> None:
    assert difference([(call(0, 4),), (call(0, 4), call(1, 7)), (call(0, 9, step=4),)]) == ""
