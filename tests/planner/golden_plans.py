"""Plans and layouts of fixed lengths, and a digest of each: `python tests/planner/golden_plans.py` prints them as JSON.

The digests that `test_determinism` expects are in `golden_plans.json` beside this file; `--renew` writes it, which only
a deliberate change of a policy should need.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B, LLAMA_34B
from steelyard.domain.topology import Topology
from steelyard.planner import POLICIES, make_plan
from steelyard.planner.layouts import choose_layout, woven_layout
from steelyard.planner.tables import build_all_tables

DIGESTS = Path(__file__).with_name("golden_plans.json")
TOKENS = 8_192


def lengths(ranks: int, seed: int, longest_bits: int = 15) -> list[int]:
    """Document lengths that fill about 95 % of the ranks: log-uniform, from a generator written out here."""
    found: list[int] = []
    state, left = seed, ranks * TOKENS * 19 // 20
    while left > 0:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        scale = 2 ** (3 + (state >> 40) % (longest_bits - 3))
        found.append(min(left, scale + (state >> 20) % scale))
        left -= found[-1]
    return found


def packed(ranks: int, seed: int) -> Layout:
    return Layout.contiguous(lengths(ranks, seed), TOKENS, ranks)


def whole(ranks: int, seed: int) -> Layout:
    """Every document on one rank, dealt in turn."""
    documents = lengths(ranks, seed, longest_bits=12)
    return Layout.from_doc_lengths([documents[rank::ranks] for rank in range(ranks)])


SPEEDS = tuple(1.0 / (1 + rank % 3) + 0.1 * (rank % 2) for rank in range(12))  # no short binary fractions


def plans() -> dict[str, Callable[[], DispatchPlan]]:
    """By name, unplanned."""

    def balanced(layout: Layout, **more: Any) -> Callable[[], DispatchPlan]:
        return lambda: make_plan(layout, **{"shape": LLAMA3_8B, "tolerance": 0.02, **more})

    cases = {
        "8 ranks": balanced(packed(8, 1)),
        "64 ranks": balanced(packed(64, 2)),
        "256 ranks": balanced(packed(256, 3), tolerance=0.05),
        "whole documents": balanced(whole(16, 4), tolerance=0.005),
        "no tolerance": balanced(whole(4, 5), tolerance=0.0),
        "window": balanced(packed(8, 6), window=1_000),
        "speeds": balanced(packed(12, 7), topology=Topology(12, speeds=SPEEDS)),
        "nodes": balanced(packed(12, 8), topology=Topology(12, node_size=4, intra_node_weight=0.3)),
        "memory": balanced(packed(12, 9), topology=Topology(12, memory_tokens=(30_000,) * 12)),
        "time": balanced(packed(8, 10), objective="time", row_keys=186),
        "resend, forward": balanced(whole(8, 11), memory="resend", passes="forward", shape=LLAMA_34B),
    }
    for policy in POLICIES:
        if policy not in ("balanced", "reference"):  # the solver of `reference` may choose among equals
            cases[policy] = balanced(packed(12, 12), policy=policy)
    return cases


def layouts() -> dict[str, Callable[[], Layout]]:
    near = Topology(12, node_size=4, intra_node_weight=0.3)
    uneven = Topology(12, speeds=SPEEDS)
    return {
        "woven, 64 ranks": lambda: woven_layout(lengths(64, 13), TOKENS, 64, tolerance=0.02),
        "woven, speeds": lambda: woven_layout(lengths(12, 14), TOKENS, 12, topology=uneven),
        "woven, time": lambda: woven_layout(lengths(12, 15), TOKENS, 12, row_keys=186),
        "chosen, 8 ranks": lambda: choose_layout(lengths(8, 16), TOKENS, 8, shape=LLAMA3_8B),
        "chosen, nodes": lambda: choose_layout(lengths(12, 17), TOKENS, 12, shape=LLAMA3_8B, topology=near),
        "head-tail": lambda: Layout.head_tail(lengths(4, 18), 12),
    }


def columns(value: object) -> Iterable[tuple[str, list[int]]]:
    """Every array of a dataclass and of those in it."""
    for field in fields(value):  # type: ignore[arg-type]
        part = getattr(value, field.name)
        if isinstance(part, np.ndarray):
            yield field.name, part.tolist()
        elif hasattr(part, "__dataclass_fields__"):
            yield from ((f"{field.name}.{name}", column) for name, column in columns(part))


def digest(*values: object) -> str:
    text = json.dumps([list(columns(value)) for value in values])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests() -> dict[str, str]:
    """Of the tasks of every plan, of some plans' tables, and of every layout."""
    found = {}
    for name, make in plans().items():
        plan = make()
        found[f"plan: {name}"] = digest(plan.tasks)
        if plan.layout.ranks <= 12:
            found[f"tables: {name}"] = digest(*build_all_tables(plan))
    return found | {f"layout: {name}": digest(make()) for name, make in layouts().items()}


if __name__ == "__main__":
    text = json.dumps(digests(), indent=1) + "\n"
    if sys.argv[1:] == ["--renew"]:
        DIGESTS.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
