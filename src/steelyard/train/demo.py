"""The main job on a small scale: one model, every batch trained on twice, as packed and balanced.

Each batch runs both ways from the *same* parameters, in turn and more than once, so that the ratio of times is fair on
a machine that is busy with other things too, and losses and gradients can be compared; the balanced gradients then
update the model. Documents are cut at chunk ends in both, so both compute the same function.

Cores of a shared machine are not equally fast, and not for long: every run is measured per rank, the balanced plan goes
by the last measurements, and the prediction for a balanced run is made with the rates of the packed run before it.

The documents are the installed Python's own source files, mixed for long ones: a plain walk over them balances itself,
which is not what long-context training sees (arXiv 2510.18121, figure of document lengths).
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.balance import NanoBatchPlan
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.model.config import ModelConfig
from steelyard.observe.trace import Span, gaps
from steelyard.planner.rates import speeds_of
from steelyard.train.assemble import Assembly
from steelyard.train.config import AttentionConfig, EvalConfig, OptimizerConfig, ParallelConfig, TrainConfig
from steelyard.train.demo_config import WAYS, DemoConfig
from steelyard.train.optimizer import clip_global_norm, learning_rate, set_learning_rate
from steelyard.train.prefetch import PlannedStep, Prefetcher, plan_next
from steelyard.train.rates import RateMeter

RUNS_KEPT = 4  # a rank's rates are the median of as many: a disturbed run does not count, a lasting change does


@dataclass(frozen=True)
class DemoRun:
    """One batch, run one way, over all ranks.

    Attributes:
        batch: number of the batch, from 1.
        time_s: until the last rank had the summed gradients.
        loss: mean over the batch's labelled tokens.
        tokens: of all ranks.
        busy_s: per rank, time not spent blocked.
        attention_s: per rank, the part of it in attention kernels.
        work: per rank, (query, key) pairs computed, and for each query what it costs besides.
        share: per rank, its fair part of all work by what was known of its speed.
    """

    batch: int
    time_s: float
    loss: float
    tokens: int
    busy_s: tuple[float, ...]
    attention_s: tuple[float, ...]
    work: tuple[int, ...]
    share: tuple[float, ...]

    @property
    def work_max_over_mean(self) -> float:
        return max(work / fair if fair else 1.0 for work, fair in zip(self.work, self.share, strict=True))


def train_config(config: DemoConfig) -> TrainConfig:
    """The training run of the demo: a Llama-type byte-level model of two layers on Python's own source files."""
    library = sysconfig.get_paths()["stdlib"]
    # Of the packages, l…, s… and t… are left out: third-party packages and test suites live there.
    short = SourceConfig(f"{library}/[a-km-ru-z]*/**/*.py", weight=0.65, min_bytes=64, max_bytes=3000)
    long = SourceConfig(f"{library}/*.py", weight=0.35, min_bytes=config.chunk_tokens, max_bytes=40_000)
    return TrainConfig(
        data=DataConfig(
            sources=(short, long),
            chunk_tokens=config.chunk_tokens,
            batch_chunks=2 * config.nproc,
            seed=config.seed,
            on_error="skip",
        ),
        model=ModelConfig(
            vocab_size=257,
            hidden_size=128,
            layers=2,
            heads=4,
            kv_heads=1,
            head_dim=64,
            ffn_size=256,
            max_positions=config.chunk_tokens,
        ),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=3),
        parallel=ParallelConfig(ping_pong=True),
        attention=AttentionConfig(tolerance=0.02, objective="time"),
        eval=EvalConfig(),
        out_dir=config.out_dir,
        device="cpu",
        steps=config.steps,
        seed=config.seed,
    )


class Demo:
    """One rank of the demo.

    Args:
        parts: of `train_config`.
        repeats: runs of each batch each way, at most.
        seconds: for all of them; where they are short, later repeats are left out.
        report: called on rank 0 after each batch with the runs of both ways so far.
    """

    def __init__(
        self, parts: Assembly, repeats: int, seconds: float, report: Callable[[dict[str, list[DemoRun]]], None]
    ) -> None:
        self.parts, self._repeats, self._seconds, self._report = parts, repeats, seconds, report
        self._spent_s = 0.0  # by the slowest rank, so that all ranks count alike
        self.runs: dict[str, list[DemoRun]] = {way: [] for way in WAYS}
        self.spans: dict[str, list[list[Span]]] = {way: [] for way in WAYS}
        self.loss_max_abs_diff = 0.0
        self.grad_max_rel_diff = 0.0
        self._rates = [RateMeter(RUNS_KEPT) for _ in range(parts.ranks)]

    def run(self) -> dict[str, Any] | None:
        """Train; on rank 0 the figures of `steelyard demo --json` and what the pictures need. Collective."""
        parts = self.parts
        prefetcher: Prefetcher[PlannedStep] = Prefetcher()

        def plan() -> PlannedStep:
            return plan_next(parts.stream, parts.balancer)

        prefetcher.request(plan)
        for batch in range(parts.config.steps + 1):
            planned = prefetcher.take()
            if batch < parts.config.steps:
                prefetcher.request(plan)
            if batch == 0:  # warm up: buffers, kernels and connections of both ways
                for way in WAYS:
                    self._run_one(way, planned, batch)
                continue
            self._compare(planned, batch)
            if parts.rank == 0:
                self._report(self.runs)
        prefetcher.close()
        return self._result()

    def _compare(self, planned: PlannedStep, batch: int) -> None:
        """Run one batch both ways, keep what was measured, compare, and update with the balanced gradients."""
        parts = self.parts
        gradients: dict[str, list[Tensor]] = {}
        for repeat in range(self._repeats):
            if repeat and self._spent_s > self._seconds * batch / parts.config.steps:
                break
            for way in WAYS:
                run, spans = self._run_one(way, planned, batch)
                self._spent_s += run.time_s
                self.runs[way].append(run)
                self.spans[way].append(spans)
                gradients[way] = [p.grad.clone() for p in parts.module.parameters() if p.grad is not None]
        packed, balanced = (self.runs[way][-1].loss for way in WAYS)
        self.loss_max_abs_diff = max(self.loss_max_abs_diff, abs(packed - balanced))
        for one, other in zip(gradients["packed"], gradients["balanced"], strict=True):
            scale = float(one.abs().max())
            if scale > 0:
                difference = float((one - other).abs().max()) / scale
                self.grad_max_rel_diff = max(self.grad_max_rel_diff, difference)
        for parameter, gradient in zip(parts.module.parameters(), gradients["balanced"], strict=True):
            parameter.grad = gradient
        clip_global_norm(parts.module.parameters(), parts.config.optimizer.clip_norm)
        set_learning_rate(parts.optimizer, learning_rate(parts.config.optimizer, batch, parts.config.steps))
        parts.optimizer.step()

    def _run_one(self, way: str, planned: PlannedStep, batch: int) -> tuple[DemoRun, list[Span]]:
        """Forward and backward of one batch, timed from a barrier until the summed gradients are there."""
        parts = self.parts
        balanced = [self._plan(nano, "balanced") for nano in planned.plan.nano_batches]
        plans = balanced if way == "balanced" else [self._plan(nano, way) for nano in planned.plan.nano_batches]
        nano_batches = parts.nano_batches(planned.chunks, plans, planned.plan.step)
        parts.optimizer.zero_grad(set_to_none=True)
        parts.trace.enabled = True
        dist.barrier(group=parts.groups.control)
        parts.meter.take()
        start_s = parts.meter.clock()
        with parts.replicas.accumulate(last=True):
            loss_sum = parts.replicas(nano_batches)
            parts.replicas.backward(loss_sum / planned.loss_tokens)
        end_s = parts.meter.clock()
        parts.trace.enabled = False
        spans = list(parts.trace.take())
        blocking = [s for s in spans if s.track in ("attention", "wait")]
        spans += [Span("token-wise", "compute", a, b) for a, b in gaps(blocking, start_s, end_s)]
        totals = parts.meter.take()
        time_s = end_s - start_s
        own = torch.tensor(
            [
                time_s,
                time_s - totals.get("wait", 0.0),
                totals.get("attention", 0.0),
                float(loss_sum.detach()),
            ],
            dtype=torch.float64,
        )
        by_rank = [torch.empty_like(own) for _ in range(parts.ranks)]
        dist.all_gather(by_rank, own, group=parts.groups.control)
        times_s, busy_s, attention_s, losses = torch.stack(by_rank).T.tolist()
        run = DemoRun(
            batch=batch,
            time_s=max(times_s),
            loss=sum(losses) / planned.loss_tokens,
            tokens=planned.tokens,
            busy_s=tuple(busy_s),
            attention_s=tuple(attention_s),
            work=tuple(int(w) for w in np.sum([plan.work_by_server for plan in plans], axis=0)),
            share=tuple(float(w) for w in np.sum([_fair_work(plan) for plan in balanced], axis=0)),
        )
        for rank, meter in enumerate(self._rates):
            meter.add(busy_s[rank], attention_s[rank], run.work[rank], len(plans))
        return run, spans

    def _plan(self, nano: NanoBatchPlan, way: str) -> NanoBatchPlan:
        """The plan of a batch by what is known of the ranks' speeds now; every rank knows the same."""
        rates = [meter.rate for meter in self._rates]
        known = [rate for rate in rates if rate is not None]
        work = int(nano.work_by_server.sum())
        speeds = speeds_of(work, known) if len(known) == len(rates) else None
        return self.parts.balancer.plan_layout(nano.plan.layout, nano.index, policy=way, speeds=speeds)

    def _result(self) -> dict[str, Any] | None:
        parts = self.parts
        typical = typical_run(self.runs)
        own = {way: self.spans[way][typical] for way in WAYS}
        gathered: list[Any] = [None] * parts.ranks
        dist.all_gather_object(gathered, own, group=parts.groups.control)
        if parts.rank != 0:
            return None
        time_s = {way: batch_time_s(self.runs[way], [run.time_s for run in self.runs[way]]) for way in WAYS}
        return {
            "figures": {
                **{way: way_figures(self.runs[way]) for way in WAYS},
                "speedup": time_s["packed"] / time_s["balanced"],
                "speedup_predicted": predicted_speedup(self.runs),
                "loss_max_abs_diff": self.loss_max_abs_diff,
                "grad_max_rel_diff": self.grad_max_rel_diff,
                "ranks": parts.ranks,
                "steps": parts.config.steps,
                "out_dir": parts.config.out_dir,
            },
            "runs": {way: [dataclasses.asdict(run) for run in self.runs[way]] for way in WAYS},
            "typical_run": typical,
            "spans": {way: {rank: spans[way] for rank, spans in enumerate(gathered)} for way in WAYS},
        }


def _fair_work(nano: NanoBatchPlan) -> np.ndarray:
    """Each rank's share of a nano-batch's work."""
    speeds = np.array(nano.plan.topology.speeds or [1.0] * nano.plan.topology.servers)
    fair: np.ndarray = nano.work_by_server.sum() * speeds / speeds.sum()
    return fair


def batch_time_s(runs: Sequence[DemoRun], times_s: Sequence[float]) -> float:
    """Seconds for all batches, of each the fastest of its runs: what else the machine does only ever adds time.
    `times_s` has one figure for each run."""
    by_batch: dict[int, list[float]] = {}
    for run, time_s in zip(runs, times_s, strict=True):
        by_batch.setdefault(run.batch, []).append(time_s)
    return sum(min(same) for same in by_batch.values())


def way_figures(runs: Sequence[DemoRun]) -> dict[str, float]:
    """The figures of one way: tokens per second by the fastest run of each batch, the others over all runs."""
    tokens = {run.batch: run.tokens for run in runs}
    busy_s = sum(sum(run.busy_s) / len(run.busy_s) for run in runs)
    return {
        "tokens_per_s": sum(tokens.values()) / batch_time_s(runs, [run.time_s for run in runs]),
        "idle_share": 1 - busy_s / sum(run.time_s for run in runs),
        "work_max_over_mean": sum(run.work_max_over_mean for run in runs) / len(runs),
        "loss_last": runs[-1].loss,
    }


def predicted_speedup(runs: dict[str, list[DemoRun]]) -> float:
    """What the work alone says: a rank's time is its token-wise time plus its work times its seconds per pair, and a
    run lasts as long as its slowest rank.

    The two rates of each rank are those of the packed run; the balanced run that followed it had other work. Nothing
    else of the balanced run is used: transfers, packing of rows and waiting within a step are not in the prediction,
    and the measured figure shows what they cost.
    """
    expected_s = []
    for packed, balanced in zip(runs["packed"], runs["balanced"], strict=True):
        ends_s = []
        for rank, busy_s in enumerate(packed.busy_s):
            meter = RateMeter(1)
            meter.add(busy_s, packed.attention_s[rank], packed.work[rank])
            rate = meter.rate
            ends_s.append(busy_s if rate is None else rate.token_wise_s + rate.pair_s * balanced.work[rank])
        expected_s.append(max(ends_s))
    packed_s = batch_time_s(runs["packed"], [max(run.busy_s) for run in runs["packed"]])
    return packed_s / batch_time_s(runs["balanced"], expected_s)


def typical_run(runs: dict[str, list[DemoRun]]) -> int:
    """The run to draw: of the batch whose imbalance is nearest to the mean, the one that was disturbed least."""
    packed = runs["packed"]
    imbalance = np.array([run.work_max_over_mean for run in packed])
    batch = packed[int(np.abs(imbalance - imbalance.mean()).argmin())].batch
    both = [one.time_s + other.time_s for one, other in zip(packed, runs["balanced"], strict=True)]
    return min((i for i, run in enumerate(packed) if run.batch == batch), key=lambda i: both[i])
