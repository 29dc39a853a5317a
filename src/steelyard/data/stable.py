"""Hashes and orders that are the same on every platform, run and version of Python and numpy.

Python's `hash` is salted and numpy promises stable streams only for its bit generators, not for what `Generator` makes
of them; so seeds come from BLAKE2 and a permutation is the order of raw PCG64 output.
"""

from __future__ import annotations

import hashlib

import numpy as np

from steelyard.domain.arrays import IntArray


def stable_hash(*parts: str | int | bytes) -> int:
    """A 63-bit hash of a sequence of strings, integers and bytes; ("a", "b") differs from ("ab",)."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


def stable_permutation(count: int, *seed: str | int) -> IntArray:
    """A permutation of 0 … count − 1 drawn from `seed`, int64 (count,)."""
    if count < 2:
        return np.arange(count, dtype=np.int64)
    raw = np.random.PCG64(stable_hash(*seed)).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64)
