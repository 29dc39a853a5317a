"""What a plan balances and what it counts: the unit of work, and the bytes of the passes that it is made for.

*Work.* By default a query row costs the keys that it sees: pairs. A kernel also spends time on a row that no key
explains (loading a tile, masked blocks, writing it back), which weighs with short documents. `row_keys` adds it, in
keys (`work.RowWork`).

*Bytes.* With Q bytes of a query, V of a key and value, and L of a log-sum-exp, all heads, per token:

| | forward | backward |
|---|---|---|
| `keep` | Q out, Q back, V out | the mirror image |
| `resend` | the same, L back | 3 Q (query, output, its gradient), L and V out; Q and V back |

so both passes take 4 Q + 2 V or 6 Q + 2 L + 3 V: but for L, queries weigh against keys alike everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args

from steelyard.cost.attention_kernels import BLOCK_KEYS, TILE_QUERIES, AttentionKernel, StripKernel, TileKernel
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.planner.ranges import Prices

Passes = Literal["forward", "backward", "both"]
Memory = Literal["keep", "resend"]
LSE_BYTES = 4  # a log-sum-exp per query and head is kept in fp32
PRICE_UNITS = 4_096  # prices keep their ratio; this much resolution serves square roots of small works


@dataclass(frozen=True)
class Objective:
    """Which bytes are made few, and what a query row costs besides its keys.

    Attributes:
        passes: the pass whose bytes count, or both.
        memory: how servers remember received rows until backward: `keep` them, or have them sent again (`resend`).
        row_keys: cost of a query row besides the keys that it sees, in keys; 0 balances pairs.

    Raises:
        UsageError: an unknown word, or a negative number of keys.
    """

    passes: Passes = "both"
    memory: Memory = "keep"
    row_keys: int = 0

    def __post_init__(self) -> None:
        for name, known in (("passes", Passes), ("memory", Memory)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"objective: {name}={getattr(self, name)!r}, expected one of {get_args(known)}")
        if self.row_keys < 0:
            raise UsageError(f"objective: row_keys={self.row_keys}, expected at least 0")

    def query_bytes(self, shape: AttentionShape) -> int:
        """Bytes per query token that is computed elsewhere, all phases of the passes: alpha."""
        query, lse = shape.query_bytes, LSE_BYTES * shape.heads
        forward, backward = (2 * query, 2 * query) if self.memory == "keep" else (2 * query + lse, 4 * query + lse)
        return self._of_passes(forward, backward)

    def key_bytes(self, shape: AttentionShape) -> int:
        """Bytes per key token that a server receives, all phases of the passes: beta."""
        key_value = shape.key_value_bytes
        return self._of_passes(key_value, key_value if self.memory == "keep" else 2 * key_value)

    def keyed_query_bytes(self, shape: AttentionShape) -> int:
        """Of `query_bytes`, those in the phases in which keys or their gradients travel: the fullest ones."""
        query, lse = shape.query_bytes, LSE_BYTES * shape.heads
        return self._of_passes(query, query if self.memory == "keep" else 4 * query + lse)

    def _of_passes(self, forward: int, backward: int) -> int:
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.passes]

    def prices(self, shape: AttentionShape) -> Prices:
        """Alpha and beta in their ratio."""
        return self._in_ratio(self.query_bytes(shape), self.key_bytes(shape))

    def busy_prices(self, shape: AttentionShape) -> Prices:
        """The same for the phases that keys travel in; for comparing servers with each other."""
        return self._in_ratio(self.keyed_query_bytes(shape), self.key_bytes(shape))

    def _in_ratio(self, alpha: int, beta: int) -> Prices:
        common = gcd(alpha, beta)
        return Prices(alpha // common * PRICE_UNITS, beta // common * PRICE_UNITS, self.row_keys)


def row_keys_of(kernel: AttentionKernel, head_dim: int) -> int:
    """What a query row costs this kernel besides its keys, in keys, for `Objective.row_keys`.

    The n-th tile of a document walks over 2n key blocks, two of them masked: with tile, block and masked costs c0, c1
    and c2, n tiles take c0·n + c1·n(n + 1) + 2·c2·n. A pair costs c1 / (128 · 64), so 128n rows see 8192n² + 64n pairs
    for c1·(n² + n/128); the rest is (c0 + c1·127/128 + 2·c2) per 128 rows. Exact at cuts on multiples of a tile.

    A kernel that works in strips knows its rows' cost itself.

    Raises:
        UsageError: a kernel that works in neither.
    """
    if isinstance(kernel, StripKernel):
        return round(kernel.row_scores(head_dim))
    if not isinstance(kernel, TileKernel):
        raise UsageError(f"objective='time' needs a kernel that works in tiles or strips, not {type(kernel).__name__}")
    one_tile_s = kernel.full_forward_s(TILE_QUERIES, BLOCK_KEYS, 1, head_dim)
    block_s = kernel.full_forward_s(TILE_QUERIES, 2 * BLOCK_KEYS, 1, head_dim) - one_tile_s
    tile_s = one_tile_s - block_s
    masked_s = block_s * kernel.masked_block_s / kernel.block_s
    extra_s = tile_s + block_s * (TILE_QUERIES - 1) / TILE_QUERIES + 2 * masked_s
    return round(extra_s / block_s * BLOCK_KEYS)
