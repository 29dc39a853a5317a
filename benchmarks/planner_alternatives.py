"""What else could be decided, in figures: three questions that docs/results/planner.md answers beside its goals.

*Flattening*: how far can the busiest server's bytes be lowered, and what does that cost in total? Plans under ever
tighter caps on what a server may receive (`Topology.memory_tokens`, a knob that exists) trade one for the other.

*Forwarding*: keys that several servers of a node need could be sent to the node once and handed on inside it. Counted
from the tables; the runtime does not do it.

*Transfers as time*: whether a server's transfers could decide when it is done. They would have to last longer than its
attention, under which ping-pong hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from steelyard.cli.plan import DEFAULT_NODE_WEIGHT
from steelyard.cost.attention_kernels import AttentionKernel, range_counts
from steelyard.cost.profiles import load_profile
from steelyard.data.workload import Workload
from steelyard.domain.arrays import FloatArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import verify
from steelyard.planner.layouts import choose_layout
from steelyard.planner.tables import build_all_tables

Row = dict[str, Any]
GB = 1e9
NODE_SIZE = 8
DEVICE = "h200"
CAP_STEP, LOWEST_CAP = 0.01, 0.5  # caps on received rows, as parts of what the freely planned busiest server receives


# --- measuring --------------------------------------------------------------------------------------------------------


def flattening_rows(name: str, workload: Workload, shape: AttentionShape, tolerance: float) -> list[Row]:
    """Every batch whose documents live whole: the free plan and those under caps that still keep the balance."""
    found = []
    for batch, layout in enumerate(workload.layouts()):
        free = Topology(layout.ranks)
        bounds = [bound(layout, free, shape, tolerance) for bound in (total_bytes_bound, busiest_bytes_bound)]
        if not all(bounds):
            continue
        plan = make_plan(layout, shape=shape, tolerance=tolerance)
        most = verify(plan).received_tokens_max
        steps = round((1 - LOWEST_CAP) / CAP_STEP)
        caps = [None, *(int(most * (1 - step * CAP_STEP)) for step in range(steps + 1))]
        for cap in caps:
            topology = free if cap is None else Topology(layout.ranks, memory_tokens=(cap,) * layout.ranks)
            plan = make_plan(layout, shape=shape, tolerance=tolerance, topology=topology)
            report = verify(plan)
            if plan.memory_limited:
                break
            found.append(
                {
                    "workload": name,
                    "batch": batch,
                    "cap_tokens": cap,
                    "total_over_bound": round(report.bytes_total / bounds[0], 5),
                    "busiest_over_bound": round(report.busiest_bytes / bounds[1], 5),
                    "sender_over_bound": round(int(report.dispatch_bytes_out.max()) / bounds[1], 5),
                }
            )
    return found


def forwarding_rows(name: str, workload: Workload, shape: AttentionShape, tolerance: float) -> list[Row]:
    """Bytes of one layer's forward pass between nodes, and what they would be if keys came to each node once."""
    topology = Topology(workload.ranks, node_size=NODE_SIZE, intra_node_weight=DEFAULT_NODE_WEIGHT)
    found = []
    for batch, chosen, layout in _layouts(workload, shape, tolerance, topology):
        plan = make_plan(layout, shape=shape, tolerance=tolerance, topology=topology)
        tables = build_all_tables(plan)
        verify(plan, tables)
        queries = sum(_rows_between_nodes(table) for table in tables)
        keys, forwarded = np.sum([_key_rows_between_nodes(table) for table in tables], axis=0).tolist()
        found.append(
            {
                "workload": name,
                "servers": workload.ranks,
                "batch": batch,
                "layout_chosen": chosen,
                "bytes_between_nodes": queries * shape.alpha_bytes + keys * shape.beta_bytes,
                "bytes_if_forwarded": queries * shape.alpha_bytes + forwarded * shape.beta_bytes,
            }
        )
    return found


def transfer_rows(name: str, workload: Workload, shape: AttentionShape, tolerance: float) -> list[Row]:
    """Seconds of a layer's forward pass: attention and transfers of each server, balanced by pairs and by time."""
    profile = load_profile(DEVICE)
    kernel = profile.kernel()
    found = []
    for batch, chosen, layout in _layouts(workload, shape, tolerance, Topology(workload.ranks)):
        plan = make_plan(layout, shape=shape, tolerance=tolerance)
        report = verify(plan)
        sent_s = np.maximum(report.bytes_in, report.bytes_out) / profile.network_bytes_per_s
        attention_s = attention_seconds(plan, kernel)
        by_time = make_plan(layout, shape=shape, tolerance=tolerance, objective="time", kernel=kernel)
        found.append(
            {
                "workload": name,
                "servers": workload.ranks,
                "batch": batch,
                "layout_chosen": chosen,
                "transfer_over_attention": round(float((sent_s / attention_s).max()), 5),
                "slowest_over_mean": round(float(attention_s.max() / attention_s.mean()), 5),
                "slowest_over_mean_by_time": round(_max_over_mean(attention_seconds(by_time, kernel)), 5),
            }
        )
    return found


def attention_seconds(plan: DispatchPlan, kernel: AttentionKernel) -> FloatArray:
    """Forward seconds of one layer's attention on each server, float64 (servers,)."""
    seconds = kernel.forward_s(range_counts(plan.tasks.start, plan.tasks.end), plan.shape.heads, plan.shape.head_dim)
    return np.bincount(plan.tasks.server, weights=seconds, minlength=plan.topology.servers)


def _max_over_mean(values: FloatArray) -> float:
    return float(values.max() / values.mean())


def _layouts(
    workload: Workload, shape: AttentionShape, tolerance: float, topology: Topology
) -> Iterable[tuple[int, bool, Layout]]:
    """Batch, whether the layout is chosen, layout: as packed, and where documents span servers chosen as well."""
    for batch, layout in enumerate(workload.layouts()):
        yield batch, False, layout
        if layout.spans_ranks:
            lengths = layout.doc_lengths.tolist()
            tokens = int(layout.tokens_by_rank.max())
            chosen = choose_layout(lengths, tokens, layout.ranks, shape=shape, topology=topology, tolerance=tolerance)
            yield batch, True, chosen


def _rows_between_nodes(table: DispatchTables) -> int:
    """Query rows that leave the node of a rank."""
    sent = table.q_send
    return int(sent.rows[sent.peer // NODE_SIZE != table.rank // NODE_SIZE].sum())


def _key_rows_between_nodes(table: DispatchTables) -> tuple[int, int]:
    """Key rows that leave the node of a rank, and those that would if each went to each other node once."""
    sent = table.kv_send
    node = np.repeat(sent.peer, sent.runs) // NODE_SIZE
    far = node != table.rank // NODE_SIZE
    first = (node * (table.tokens + 1) + sent.run_row)[far]  # nodes one after another on one line of rows
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate((first + sent.run_length[far])[order])
    already = np.maximum(first, np.concatenate([[0], reach[:-1]])) if len(first) else first
    return int(sent.run_length[far].sum()), int((reach - already).sum())


# --- the page ---------------------------------------------------------------------------------------------------------


def flattening_lines(record: Row) -> list[str]:
    """Each batch: the free plan and the flattest one."""
    rows = record.get("flattening", [])
    if not rows:
        return ["Not measured."]
    lines = [
        "| workload | batch | free: total ÷ bound | busiest ÷ bound | flattest: total ÷ bound | busiest ÷ bound |",
        "|---|---|---|---|---|---|",
    ]
    for (name, batch), points in curves(rows).items():
        free, flat = points[0], min(points, key=lambda r: (r["busiest_over_bound"], r["total_over_bound"]))
        cells = [name, str(batch)]
        cells += [f"{point[key]:.3f}" for point in (free, flat) for key in ("total_over_bound", "busiest_over_bound")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def curves(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Plans by workload and batch, the free one first."""
    found: dict[tuple[str, int], list[Row]] = {}
    for r in rows:
        found.setdefault((r["workload"], r["batch"]), []).append(r)
    return found


def pareto(points: Sequence[Row]) -> list[Row]:
    """Those that no other plan beats in both, by total bytes."""
    best: list[Row] = []
    for r in sorted(points, key=lambda r: (r["total_over_bound"], r["busiest_over_bound"])):
        if not best or r["busiest_over_bound"] < best[-1]["busiest_over_bound"]:
            best.append(r)
    return best


def forwarding_lines(record: Row) -> list[str]:
    rows = record.get("forwarding", [])

    def cells(mine: Sequence[Row]) -> list[str]:
        saved = [1 - r["bytes_if_forwarded"] / r["bytes_between_nodes"] for r in mine if r["bytes_between_nodes"]]
        return [
            f"{median(r['bytes_between_nodes'] for r in mine) / GB:.1f}",
            f"{median(saved):.1%}",
            f"{min(saved):.1%} … {max(saved):.1%}",
        ]

    return _by_servers_and_layout(rows, ["GB between nodes", "saved", "range"], cells)


def transfer_lines(record: Row) -> list[str]:
    def cells(mine: Sequence[Row]) -> list[str]:
        worst = max(mine, key=lambda r: r["transfer_over_attention"])
        by_pairs, by_time = ([r[key] for r in mine] for key in ("slowest_over_mean", "slowest_over_mean_by_time"))
        return [
            f"{median(r['transfer_over_attention'] for r in mine):.3f}",
            f"{worst['transfer_over_attention']:.3f} ({worst['workload']})",
            f"{median(by_pairs):.4f} ({max(by_pairs):.4f})",
            f"{median(by_time):.4f} ({max(by_time):.4f})",
        ]

    heads = ["transfer ÷ attention", "worst", "slowest ÷ mean, by pairs", "the same, by time"]
    rows = record.get("transfers", [])
    return [*_by_servers_and_layout(rows, heads, cells), *(["", _transfer_finding(rows)] if rows else [])]


def _transfer_finding(rows: Sequence[Row]) -> str:
    """How often transfers outlast attention, and what balancing time changes, over all plans."""
    longer = sorted((r for r in rows if r["transfer_over_attention"] > 1), key=lambda r: -r["transfer_over_attention"])
    changes = [r["slowest_over_mean_by_time"] / r["slowest_over_mean"] - 1 for r in rows]
    what = f"In {len(longer)} of {len(rows)} plans a server's transfers last longer than its attention"
    if longer:
        worst = longer[0]
        what += (
            f", by up to {worst['transfer_over_attention'] - 1:.0%} ({worst['workload']}, batch {worst['batch']}, "
            f"layout {'chosen' if worst['layout_chosen'] else 'given'})"
        )
    return (
        f"{what}. Balancing time instead of pairs changes the slowest server of a plan by {min(changes):+.2%} to "
        f"{max(changes):+.2%}."
    )


def _by_servers_and_layout(
    rows: Sequence[Row], heads: Sequence[str], cells: Callable[[Sequence[Row]], list[str]]
) -> list[str]:
    """A line for each number of servers, as packed and with the layout chosen."""
    if not rows:
        return ["Not measured."]
    lines = ["| servers | layout | plans | " + " | ".join(heads) + " |", "|---" * (3 + len(heads)) + "|"]
    for servers in sorted({r["servers"] for r in rows}):
        for chosen in (False, True):
            mine = [r for r in rows if r["servers"] == servers and r["layout_chosen"] is chosen]
            if mine:
                layout = "chosen" if chosen else "given"
                lines.append(f"| {servers} | {layout} | {len(mine)} | " + " | ".join(cells(mine)) + " |")
    return lines
