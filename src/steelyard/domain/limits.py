"""The largest numbers that are taken, so that what follows from them fits 64 bits and a machine's memory.

All are far beyond what exists. Who gives more has most likely mistaken a unit, and is told before anything overflows.
"""

from __future__ import annotations

from steelyard.domain.arrays import IntArray
from steelyard.errors import UsageError

MAX_RANKS = 1 << 17
MAX_TOKENS_PER_RANK = 1 << 30
MAX_DOCUMENT_TOKENS = 1 << 30  # a document is shorter: then 8 × its pairs fit 64 bits
MAX_NANO_BATCH_TOKENS = 1 << 38  # times the bytes of a row below: fits
MAX_HIDDEN = 1 << 18  # heads × size of a head
MAX_PAIRS = 1 << 62  # of one nano-batch, with `row_keys` of each row


def require_countable(doc_lengths: IntArray, where: str, row_keys: int = 0) -> None:
    """Refuse documents whose work does not fit 64-bit integers with a bit to spare.

    Counted as causal without a window, whatever the window: what is in between may need as much.

    Args:
        doc_lengths: tokens of each document, int64 (documents,), none negative.
        where: what holds the documents, for the message.
        row_keys: what a query row costs besides the keys that it sees, in keys.

    Raises:
        UsageError: a document of 2³⁰ tokens or more, or more than 2⁶² pairs.
    """
    if not len(doc_lengths):
        return
    longest, row = int(doc_lengths.max()), 1 + 2 * row_keys
    if longest >= MAX_DOCUMENT_TOKENS:
        raise UsageError(
            f"{where}: a document of {longest:,} tokens, expected fewer than {MAX_DOCUMENT_TOKENS:,}; cut it"
        )
    # Short lengths need no sum in Python's integers.
    if len(doc_lengths) * longest * (longest + row) // 2 <= MAX_PAIRS:
        return
    work = sum(length * (length + row) // 2 for length in doc_lengths.tolist())
    if work > MAX_PAIRS:
        raise UsageError(
            f"{where}: its {len(doc_lengths):,} documents have {float(work):.3g} (query, key) pairs"
            f"{f', with {row_keys:,} for each row' if row_keys else ''}, more than {float(MAX_PAIRS):.3g} (2^62); "
            "use fewer or shorter documents in a batch"
        )
