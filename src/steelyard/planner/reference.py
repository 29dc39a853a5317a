"""The policy `reference`: fewest bytes, exactly, for small cases. It shows what `balanced` leaves on the table.

Every query row is placed on its own, as an integer program: x[q, j] = 1 if query q is computed on server j, y[k, j] = 1
if j has key k. Each server's work stays within its cap, and what it receives within its memory. Solved to optimality by
HiGHS, through scipy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_before_array
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError, UsageError
from steelyard.planner.shares import work_caps

MAX_PLACEMENTS = 4_000  # query rows × servers; beyond, the program takes minutes and more


def plan_reference(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """The plan with the fewest bytes among those that balance as well as `balanced` tries to.

    That is: (1 + tolerance) × share for every server if any plan reaches it, else the promised cap.

    Raises:
        UsageError: scipy is not installed, or the case is too large.
        PlanError: no plan keeps the memory caps and the balance.
    """
    tokens = int(layout.doc_lengths.sum())
    if tokens * topology.servers > MAX_PLACEMENTS:
        raise UsageError(
            f"policy 'reference' is exact and only for small cases: {tokens} tokens × {topology.servers} servers "
            f"exceed {MAX_PLACEMENTS}; use 'balanced'"
        )
    work = int(pairs_before_array(layout.doc_lengths, window).sum())
    caps = work_caps(work, topology, tolerance, longest_row_pairs(layout.doc_lengths, window))
    program = _Program(layout, topology, shape, window)
    for cap in (caps.target, caps.promise):
        server = program.solve(cap)
        if server is not None:
            return DispatchPlan(layout, program.tasks(server), topology, shape, tolerance, "reference", window)
    raise PlanError("no plan keeps both the memory caps and the balance; raise memory_tokens or the tolerance")


class _Program:
    """The integer program of one layout. Columns: x (tokens × servers), then y (tokens × servers), row-major."""

    def __init__(self, layout: Layout, topology: Topology, shape: AttentionShape, window: int | None) -> None:
        self.layout, self.servers, self.window = layout, topology.servers, window
        base = np.cumsum(layout.doc_lengths) - layout.doc_lengths
        self.doc = np.repeat(np.arange(layout.docs), layout.doc_lengths)
        self.position = np.arange(len(self.doc)) - base[self.doc]
        self.shard = np.zeros(len(self.doc), dtype=np.int64)
        for index, shard in enumerate(layout):
            first = int(base[shard.doc]) + shard.start
            self.shard[first : first + shard.length] = index
        home = layout.shard_rank[self.shard]
        self.remote = (home[:, None] != np.arange(self.servers)[None, :]).astype(np.float64)
        self.cost = np.concatenate(
            [(self.remote * shape.alpha_bytes).ravel(), (self.remote * shape.beta_bytes).ravel()]
        )
        self.row_pairs = self.position + 1 if window is None else np.minimum(self.position + 1, window)
        self.memory = topology.memory_tokens

    def _keys_follow_queries(self) -> Any:
        """Rows x[q, j] − y[k, j] <= 0 for a query and each of its keys; without a window in chains, which are fewer."""
        from scipy.sparse import coo_array

        tokens, servers = len(self.doc), self.servers
        plus, minus = [], []
        for t in range(tokens):
            if self.window is None:
                plus.append(t * servers)
                minus.append((tokens + t) * servers)
                if self.position[t]:
                    plus.append((tokens + t) * servers)
                    minus.append((tokens + t - 1) * servers)
            else:
                for back in range(int(self.row_pairs[t])):
                    plus.append(t * servers)
                    minus.append((tokens + t - back) * servers)
        spread = np.arange(servers)
        positive = (np.array(plus, dtype=np.int64)[:, None] + spread).ravel()
        negative = (np.array(minus, dtype=np.int64)[:, None] + spread).ravel()
        rows = np.arange(len(positive))
        matrix = coo_array(
            (
                np.concatenate([np.ones(len(rows)), -np.ones(len(rows))]),
                (np.concatenate([rows, rows]), np.concatenate([positive, negative])),
            ),
            shape=(len(rows), 2 * tokens * servers),
        )
        return matrix

    def solve(self, caps: list[int]) -> IntArray | None:
        """Server of each query row, int64 (tokens,); None if the caps cannot be met."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise UsageError("policy 'reference' needs scipy: pip install scipy, or use policy 'balanced'") from error
        tokens, servers = len(self.doc), self.servers
        if not tokens:
            return np.zeros(0, dtype=np.int64)
        columns = np.arange(tokens * servers)
        once = coo_array((np.ones(len(columns)), (columns // servers, columns)), shape=(tokens, 2 * len(columns)))
        load = coo_array(
            (np.repeat(self.row_pairs, servers).astype(np.float64), (columns % servers, columns)),
            shape=(servers, 2 * len(columns)),
        )
        follow = self._keys_follow_queries()
        constraints = [
            LinearConstraint(once, 1, 1),
            LinearConstraint(load, -np.inf, np.array(caps, dtype=np.float64)),
            LinearConstraint(follow, -np.inf, 0),
        ]
        if self.memory:
            both = np.concatenate([columns, len(columns) + columns])
            weights = np.concatenate([self.remote.ravel(), self.remote.ravel()])
            received = coo_array((weights, (both % servers, both)), shape=(servers, 2 * len(columns)))
            constraints.append(LinearConstraint(received, -np.inf, np.array(self.memory, dtype=np.float64)))
        result = milp(
            self.cost / max(1.0, float(self.cost.max())),
            constraints=constraints,
            integrality=np.ones(2 * len(columns)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        server: IntArray = np.argmax(result.x[: len(columns)].reshape(tokens, servers), axis=1).astype(np.int64)
        return server

    def tasks(self, server: IntArray) -> CATasks:
        """Neighbouring rows of a shard on one server become one task."""
        breaks = (np.diff(server) != 0) | (np.diff(self.shard) != 0)
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(server)), dtype=bool), breaks]))
        last = np.append(first[1:], len(server)) - 1 if len(first) else first
        return CATasks.from_columns(
            self.doc[first], self.position[first], self.position[last] + 1, server[first], self.shard[first]
        )
