"""The policy `reference`: the best plan, exactly, for small cases. It shows what `balanced` leaves on the table.

Every query row is placed on its own, as an integer program: x[q, j] = 1 if query q is computed on server j, y[k, j] = 1
if j has key k. Each server's work stays within its cap, and what it receives within its memory. Solved to optimality by
HiGHS, through scipy. Rows can be taken in blocks, as kernels do: then it is the best plan among those cut at multiples
of the block, and documents of some thousand tokens can be compared.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array, pairs_before_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError, UsageError
from steelyard.planner.shares import work_caps

MAX_PLACEMENTS = 4_000  # query blocks × servers; beyond, the program takes minutes and more
FewestBytes = Literal["total", "busiest"]


def plan_reference(
    layout: Layout,
    topology: Topology,
    shape: AttentionShape,
    tolerance: float,
    window: int | None = None,
    *,
    objective: FewestBytes = "total",
    block_tokens: int = 1,
    time_limit_s: float | None = None,
) -> DispatchPlan:
    """The best plan among those that balance as well as `balanced` tries to.

    That is: (1 + tolerance) × share for every server if any plan reaches it, else the promised cap.

    Args:
        objective: "total": fewest bytes of both phases, bytes inside a node at their weight. "busiest": the smallest
            max(bytes in, bytes out) of any rank in the dispatch phase, unweighted, and among those plans the fewest
            bytes. The number of tasks is not minimised.
        block_tokens: tasks start and end at multiples of so many positions, or at the ends of shards. 1: anywhere, so
            that no plan is better.
        time_limit_s: most time for each program that is solved.

    Raises:
        UsageError: scipy is not installed, the case is too large, or blocks are combined with a window.
        PlanError: no plan keeps the memory caps and the balance, or the time limit came first.
    """
    if block_tokens < 1 or (block_tokens > 1 and window is not None):
        raise UsageError(f"block_tokens={block_tokens} with window={window}, expected 1 or more, and 1 with a window")
    work = int(pairs_before_array(layout.doc_lengths, window).sum())
    caps = work_caps(work, topology, tolerance, longest_row_pairs(layout.doc_lengths, window))
    blocks = _blocks(layout, block_tokens)
    if len(blocks[0]) * topology.servers > MAX_PLACEMENTS:
        raise UsageError(
            f"policy 'reference' is exact and only for small cases: {len(blocks[0])} query blocks of {block_tokens} "
            f"tokens × {topology.servers} servers exceed {MAX_PLACEMENTS}; use 'balanced'"
        )
    program = _Program(layout, topology, shape, window, blocks, time_limit_s)
    for cap in (caps.target, caps.promise):
        server = program.solve(cap, objective)
        if server is not None:
            return DispatchPlan(layout, program.tasks(server), topology, shape, tolerance, "reference", window)
    raise PlanError("no plan keeps both the memory caps and the balance; raise memory_tokens or the tolerance")


def _blocks(layout: Layout, block_tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Shard, first and end position of each query block, by document and position."""
    order = np.lexsort((layout.shard_start, layout.shard_doc))
    shards, starts, ends = [], [], []
    for shard in order.tolist():
        first = int(layout.shard_start[shard])
        end = first + int(layout.shard_length[shard])
        inner = range((first // block_tokens + 1) * block_tokens, end, block_tokens)
        cuts = [first, *inner, end]
        shards += [shard] * (len(cuts) - 1)
        starts += cuts[:-1]
        ends += cuts[1:]
    return tuple(np.array(column, dtype=np.int64) for column in (shards, starts, ends))  # type: ignore[return-value]


class _Program:
    """The integer program of one layout.

    Columns: x (blocks × servers), y (blocks × servers), both row-major, then the busiest rank's bytes in units of
    `unit`. Given x, the cheapest y is whole, so only x must be declared so.
    """

    def __init__(
        self,
        layout: Layout,
        topology: Topology,
        shape: AttentionShape,
        window: int | None,
        blocks: tuple[IntArray, IntArray, IntArray],
        time_limit_s: float | None,
    ) -> None:
        self.servers, self.window, self.time_limit_s = topology.servers, window, time_limit_s
        self.shard, self.start, self.end = blocks
        self.doc = layout.shard_doc[self.shard]
        self.home = layout.shard_rank[self.shard]
        self.pairs = pairs_array(self.start, self.end, window)
        self.memory = topology.memory_tokens
        self.query_bytes, self.beta = shape.query_bytes, shape.beta_bytes
        server = np.arange(self.servers)
        self.tokens = (self.end - self.start)[:, None] * (self.home[:, None] != server[None, :])
        near = self.home[:, None] // topology.node_size == server[None, :] // topology.node_size
        weighed = self.tokens * np.where(near, topology.intra_node_weight, 1.0)
        self.cost = np.concatenate([(weighed * shape.alpha_bytes).ravel(), (weighed * shape.beta_bytes).ravel(), [0.0]])
        self.unit = float(max(shape.alpha_bytes, shape.beta_bytes) * max(1, int(self.tokens.max(initial=1))))

    @property
    def places(self) -> int:
        return len(self.shard) * self.servers

    def solve(self, caps: list[int], objective: FewestBytes) -> IntArray | None:
        """Server of each query block, int64 (blocks,); None if the caps cannot be met."""
        if not self.places:
            return np.zeros(0, dtype=np.int64)
        constraints = self._constraints(caps)
        if objective == "total":
            return self._minimise(self.cost / self.unit, constraints, caps, np.inf)
        constraints.append(self._busiest())
        only_busiest = np.zeros(2 * self.places + 1)
        only_busiest[-1] = 1.0
        server = self._minimise(only_busiest, constraints, caps, np.inf)
        if server is None:
            return None
        most = (self._busiest_bytes(server) + 0.5) / self.unit  # half a byte of slack for the solver's rounding
        return self._minimise(self.cost / self.unit, constraints, caps, most)

    def _minimise(self, cost: FloatArray, constraints: list[Any], caps: list[int], most: float) -> IntArray | None:
        from scipy.optimize import Bounds, milp

        upper = np.ones(2 * self.places + 1)
        upper[-1] = most
        whole = np.zeros(2 * self.places + 1)
        whole[: self.places] = 1
        options = {"mip_rel_gap": 0.0}
        if self.time_limit_s is not None:
            options["time_limit"] = self.time_limit_s
        result = milp(cost, constraints=constraints, integrality=whole, bounds=Bounds(0, upper), options=options)
        if result.status == 2:
            return None
        if result.status != 0:
            raise PlanError(f"policy 'reference' found no proven optimum: {result.message}; use a smaller case")
        server: IntArray = np.argmax(result.x[: self.places].reshape(-1, self.servers), axis=1).astype(np.int64)
        work = np.bincount(server, weights=self.pairs, minlength=self.servers)
        assert np.all(work <= np.array(caps)), "the solver's rounding broke a cap"
        return server

    def _constraints(self, caps: list[int]) -> list[Any]:
        """Each block on one server, the caps of work and memory, keys with their queries."""
        try:
            from scipy.optimize import LinearConstraint
            from scipy.sparse import coo_array
        except ImportError as error:
            raise UsageError("policy 'reference' needs scipy: pip install scipy, or use policy 'balanced'") from error
        places, servers = self.places, self.servers
        columns = np.arange(places)
        width = 2 * places + 1
        once = coo_array((np.ones(places), (columns // servers, columns)), shape=(len(self.shard), width))
        amount = np.repeat(self.pairs, servers).astype(np.float64)
        load = coo_array((amount, (columns % servers, columns)), shape=(servers, width))
        plus, minus = self._keys_follow_queries()
        rows = np.arange(len(plus))
        follow = coo_array(
            (
                np.concatenate([np.ones(len(rows)), -np.ones(len(rows))]),
                (np.concatenate([rows, rows]), np.concatenate([plus, minus])),
            ),
            shape=(len(rows), width),
        )
        constraints = [
            LinearConstraint(once, 1, 1),
            LinearConstraint(load, -np.inf, np.array(caps, dtype=np.float64) + 0.5),  # work is whole: room for rounding
            LinearConstraint(follow, -np.inf, 0),
        ]
        if self.memory:
            both = np.arange(2 * places)
            tokens = np.tile(self.tokens.ravel(), 2).astype(np.float64)
            received = coo_array((tokens, (both % servers, both)), shape=(servers, width))
            constraints.append(LinearConstraint(received, -np.inf, np.array(self.memory, dtype=np.float64) + 0.5))
        return constraints

    def _keys_follow_queries(self) -> tuple[IntArray, IntArray]:
        """Columns p, n of rows p − n <= 0: a query and each of its keys; without a window in chains, which are few."""
        block = np.arange(len(self.shard))
        if self.window is None:
            later = block[1:][self.doc[1:] == self.doc[:-1]]
            plus = np.concatenate([block, len(block) + later])
            minus = len(block) + np.concatenate([block, later - 1])
        else:
            back = np.arange(int(self.pairs.max()))
            query, keys_back = np.nonzero(back[None, :] < self.pairs[:, None])  # blocks are rows here
            plus, minus = query, len(block) + query - keys_back
        spread = np.arange(self.servers)
        return (
            (plus[:, None] * self.servers + spread).ravel(),
            (minus[:, None] * self.servers + spread).ravel(),
        )

    def _busiest(self) -> Any:
        """Bytes out and in of each rank in the dispatch phase, less those of the busiest, <= 0; in units."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        places, servers = self.places, self.servers
        both = np.arange(2 * places)
        price = np.repeat([self.query_bytes, self.beta], places)
        size = np.tile(self.tokens.ravel(), 2) * price / self.unit
        home = np.tile(np.repeat(self.home, servers), 2)
        rows = np.concatenate([both % servers, servers + home, np.arange(2 * servers)])
        columns = np.concatenate([both, both, np.full(2 * servers, 2 * places)])
        values = np.concatenate([size, size, np.full(2 * servers, -1.0)])
        return LinearConstraint(coo_array((values, (rows, columns)), shape=(2 * servers, 2 * places + 1)), -np.inf, 0)

    def _busiest_bytes(self, server: IntArray) -> int:
        """Largest bytes in or out of a rank in the dispatch phase, in whole numbers."""
        placed = np.zeros((len(self.shard), self.servers), dtype=np.int64)
        placed[np.arange(len(server)), server] = 1
        keys = placed.copy()
        for block in range(len(server) - 1, -1, -1):
            if self.window is not None:
                first = block - int(self.pairs[block]) + 1  # blocks are rows here
                keys[first : block + 1] |= placed[block]
            elif block and self.doc[block] == self.doc[block - 1]:
                keys[block - 1] |= keys[block]
        moved = self.tokens * (placed * self.query_bytes + keys * self.beta)
        return max(int(moved.sum(axis=0).max()), int(np.bincount(self.home, weights=moved.sum(axis=1)).max()))

    def tasks(self, server: IntArray) -> CATasks:
        """Neighbouring blocks of a shard on one server become one task."""
        breaks = (np.diff(server) != 0) | (np.diff(self.shard) != 0)
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(server)), dtype=bool), breaks]))
        last = np.append(first[1:], len(server)) - 1 if len(first) else first
        return CATasks.from_columns(
            self.doc[first], self.start[first], self.end[last], server[first], self.shard[first]
        )
