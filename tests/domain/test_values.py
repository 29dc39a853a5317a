"""Shapes, topologies, task tables and units."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.domain.arrays import int_column
from steelyard.domain.plan import KernelTasks
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.tasks import CATask, CATasks
from steelyard.domain.topology import Topology
from steelyard.domain.units import format_bytes, format_count, format_time
from steelyard.errors import SteelyardError, UsageError


def test_bytes_of_a_token() -> None:
    """Llama 3 8B in bf16: 32 query heads and 8 key/value heads of 128."""
    assert (LLAMA3_8B.alpha_bytes, LLAMA3_8B.beta_bytes) == (16_384, 4_096)
    assert LLAMA3_8B.query_bytes == 8_192


@pytest.mark.parametrize("changes", [{"heads": 0}, {"head_dim": -1}, {"kv_heads": 3}, {"element_bytes": 0}])
def test_impossible_shapes(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        AttentionShape(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": 0}, "servers=0"),
        ({"speeds": (1.0,)}, "1 speeds for 2 servers"),
        ({"speeds": (0.0, 0.0)}, "all speeds are 0"),
        ({"speeds": (1.0, float("nan"))}, r"speeds\[1\]=nan, expected a number of at least 0$"),
        ({"speeds": (1.0, -1.0)}, r"speeds\[1\]=-1.0"),
        ({"speeds": ("a", "b")}, r"speeds\[0\]='a'"),
        ({"speeds": (True, 1.0)}, r"speeds\[0\]=True"),
        ({"speeds": "11"}, "speeds='11', expected numbers"),
        ({"speeds": 1.0}, "speeds=1.0, expected numbers, one for each server"),
        ({"memory_tokens": (1, 2, 3)}, "3 memory_tokens for 2 servers"),
        ({"memory_tokens": (1, -2)}, r"memory_tokens\[1\]=-2"),
        ({"memory_tokens": (1.5, 2.5)}, r"memory_tokens\[0\]=1.5, expected a whole number"),
        ({"node_size": 0}, "node_size=0"),
        ({"node_size": 1.5}, "node_size=1.5, expected a whole number"),
        ({"servers": 2.0}, "servers=2.0, expected a whole number"),
        ({"intra_node_weight": 1.5}, "intra_node_weight=1.5"),
        ({"intra_node_weight": "1"}, "intra_node_weight='1'"),
    ],
)
def test_impossible_topologies(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Topology(**{"servers": 2, **changes})  # type: ignore[arg-type]


def test_an_error_among_many_speeds_is_one_short_line() -> None:
    with pytest.raises(UsageError) as caught:
        Topology(5_000, speeds=(1.0,) * 4_000 + (float("nan"),) * 1_000)
    assert "speeds[4000]=nan" in str(caught.value) and len(str(caught.value)) < 100


def test_topologies_take_any_sequence_of_numbers() -> None:
    given = Topology(np.int64(2), speeds=[1, np.float64(0.5)], memory_tokens=np.array([5, 6]))  # type: ignore[arg-type]
    assert given == Topology(2, speeds=(1, 0.5), memory_tokens=(5, 6))
    assert hash(given) == hash(Topology(2, speeds=(1, 0.5), memory_tokens=(5, 6)))


def test_tasks_are_sorted_by_shard_and_start() -> None:
    tasks = CATasks.from_columns(*np.array([(1, 0, 2, 3, 1), (0, 4, 6, 2, 0), (0, 0, 4, 1, 0)], dtype=np.int64).T)
    assert list(tasks) == [CATask(0, 0, 4, 1, 0), CATask(0, 4, 6, 2, 0), CATask(1, 0, 2, 3, 1)]
    assert len(tasks) == 3
    assert len(KernelTasks.empty()) == 0


def test_int_columns_are_copies_that_cannot_be_written() -> None:
    source = np.array([1, 2])
    column = int_column(source)
    source[0] = 5
    assert column.tolist() == [1, 2]
    assert int_column(x for x in (3, 4)).dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1


def test_units_as_people_read_them() -> None:
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(12) == "12 B"
    assert format_time(0.00123) == "1.23 ms"
    assert format_time(125.0) == "2 min 05 s"
    assert format_time(3e-9) == "3 ns"
    assert format_count(12_345) == "12.3K"
    assert format_count(7) == "7"
    assert format_count(2.25e15) == "2.25P"
    assert [format_count(n) for n in (999, 999_499, 999_501)] == ["999", "999K", "1M"]


def test_users_mistakes_have_exit_code_two() -> None:
    assert UsageError.exit_code == 2
    assert SteelyardError.exit_code == 1
    assert issubclass(UsageError, ValueError)
