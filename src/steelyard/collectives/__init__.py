"""Moving rows between ranks: the asynchronous exchange, and who is missing when it does not end."""

from steelyard.collectives.exchange import Exchange, Transfer, wait_in_slices
from steelyard.collectives.groups import rank_in, release_group, shared_store, twin_group
from steelyard.collectives.progress import Point, Progress

__all__ = [
    "Exchange", "Point", "Progress", "Transfer", "rank_in", "release_group", "shared_store", "twin_group",
    "wait_in_slices",
]  # fmt: skip
