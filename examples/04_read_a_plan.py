"""Read a plan and draw it: no GPU, no torch, no process group.

python examples/04_read_a_plan.py [picture.png]
"""

import sys

import steelyard
from steelyard.cost.attention import pairs_array
from steelyard.planner.checks import verify
from steelyard.planner.tables import build_tables
from steelyard.plots.work import work_per_rank

# Four ranks of 16384 tokens. Rank 0 holds one document, rank 1 two, the others many short ones.
LENGTHS = [[16384], [8192, 8192], [1024] * 16, [512] * 32]


def main() -> None:
    plan = steelyard.plan(LENGTHS, model="llama3-8b", tolerance=0.02)
    ranks = range(plan.layout.ranks)
    report = verify(plan)  # counts everything again, on its own
    tasks = plan.tasks
    pairs = pairs_array(tasks.start, tasks.end)
    print("document  queries          home  server  pairs")
    for task, home, work in list(zip(tasks, plan.home, pairs, strict=True))[:8]:
        moved = " <- moved" if home != task.server else ""
        print(f"{task.doc:8}  {task.start:6} … {task.end:6}  {home:5}  {task.server:6}  {work:9}{moved}")
    print(f"… {len(tasks)} tasks in all")
    for rank in ranks:
        tables = build_tables(plan, rank)
        print(
            f"rank {rank}: {pairs[plan.home == rank].sum():10} pairs at home, {pairs[tasks.server == rank].sum():10} "
            f"computed; sends {tables.q_sent:5} queries and {tables.kv_sent:5} keys and values"
        )
    print(f"busiest server over the mean: {report.work_max_over_mean:.4f}")
    if len(sys.argv) > 1:
        before, after = ([int(pairs[where == rank].sum()) for rank in ranks] for where in (plan.home, tasks.server))
        work_per_rank(sys.argv[1], before, after)


if __name__ == "__main__":
    main()
