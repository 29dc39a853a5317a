"""Shapes that decide how much is computed and how many bytes travel."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import UsageError


@dataclass(frozen=True)
class AttentionShape:
    """One layer's core attention: `heads` query heads share `kv_heads` key/value heads of size `head_dim`.

    Raises:
        UsageError: a size is not positive, or `heads` is not a multiple of `kv_heads`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "element_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"attention shape: {name}={getattr(self, name)}, expected a positive number")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"attention shape: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "every key/value head must serve the same number of query heads"
            )

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's query of all heads (its output is as large)."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one token's key and value of all key/value heads: beta of the planner."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def alpha_bytes(self) -> int:
        """Query out plus output back, per query token, in the forward pass: alpha of the planner."""
        return 2 * self.query_bytes

    @property
    def beta_bytes(self) -> int:
        """Key and value out, per key token, in the forward pass: beta of the planner."""
        return self.key_value_bytes


LLAMA3_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128)
LLAMA_34B = AttentionShape(heads=64, kv_heads=8, head_dim=128)
