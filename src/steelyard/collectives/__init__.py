"""Moving rows between ranks: the asynchronous exchange, and who is missing when it does not end."""

from steelyard.collectives.exchange import Exchange, Transfer
from steelyard.collectives.groups import twin_group
from steelyard.collectives.progress import Point, Progress

__all__ = ["Exchange", "Point", "Progress", "Transfer", "twin_group"]
