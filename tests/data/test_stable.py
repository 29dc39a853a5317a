from __future__ import annotations

from steelyard.data.stable import stable_hash, stable_permutation


def test_known_values() -> None:
    """Written down once: they decide the data order of every run, on every platform and version."""
    assert stable_hash("a", 1) == 4049335214781213793
    assert stable_permutation(8, "units", 0, 0, 0).tolist() == [1, 0, 2, 7, 6, 3, 4, 5]


def test_hash_separates_parts() -> None:
    assert len({stable_hash("ab"), stable_hash("a", "b"), stable_hash("", "ab"), stable_hash("ab", "")}) == 4
    assert all(0 <= stable_hash(n) < 2**63 for n in range(100))


def test_permutation_holds_each_once() -> None:
    for count in (0, 1, 2, 1000):
        assert sorted(stable_permutation(count, 5).tolist()) == list(range(count))
    assert stable_permutation(1000, 5).tolist() != stable_permutation(1000, 6).tolist()
