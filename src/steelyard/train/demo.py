"""The main job on a small scale: one model, every batch trained on twice, as packed and balanced.

Each batch runs both ways from the *same* parameters, in turn and more than once (the fastest run of each way counts),
so that the ratio of times is fair on a noisy machine and losses and gradients can be compared; the balanced gradients
then update the model. Documents are cut at chunk ends in
both, so both compute the same function.

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
from steelyard.train.assemble import Assembly
from steelyard.train.config import AttentionConfig, EvalConfig, OptimizerConfig, ParallelConfig, TrainConfig
from steelyard.train.demo_config import WAYS, DemoConfig
from steelyard.train.optimizer import clip_global_norm, learning_rate, set_learning_rate
from steelyard.train.prefetch import PlannedStep, Prefetcher, plan_next


@dataclass(frozen=True)
class DemoStep:
    """One batch, one way, over all ranks.

    Attributes:
        time_s: until the last rank had the summed gradients.
        loss: mean over the batch's labelled tokens.
        busy_s: per rank, time not spent blocked.
        pairs: per rank, (query, key) pairs computed.
    """

    time_s: float
    loss: float
    tokens: int
    busy_s: tuple[float, ...]
    pairs: tuple[int, ...]

    @property
    def work_max_over_mean(self) -> float:
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))


def train_config(config: DemoConfig) -> TrainConfig:
    """The training run of the demo: a Llama-type byte-level model of two layers on Python's own source files."""
    library = sysconfig.get_paths()["stdlib"]
    # Of the packages, l…, s… and t… are left out: third-party packages and test suites live there.
    short = SourceConfig(f"{library}/[a-km-ru-z]*/**/*.py", weight=0.7, min_bytes=64, max_bytes=3000)
    long = SourceConfig(f"{library}/*.py", weight=0.3, min_bytes=config.chunk_tokens, max_bytes=40_000)
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
        attention=AttentionConfig(tolerance=0.02),
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
        repeats: runs of each batch each way.
        report: called on rank 0 after each batch with the steps of both ways so far.
    """

    def __init__(self, parts: Assembly, repeats: int, report: Callable[[dict[str, list[DemoStep]]], None]) -> None:
        self.parts, self._repeats, self._report = parts, repeats, report
        self.steps: dict[str, list[DemoStep]] = {way: [] for way in WAYS}
        self.spans: dict[str, list[list[Span]]] = {way: [] for way in WAYS}
        self.loss_max_abs_diff = 0.0
        self.grad_max_rel_diff = 0.0

    def run(self) -> dict[str, Any] | None:
        """Train; on rank 0 the figures of `steelyard demo --json` and what the pictures need. Collective."""
        parts = self.parts
        prefetcher: Prefetcher[PlannedStep] = Prefetcher()

        def plan() -> PlannedStep:
            return plan_next(parts.stream, parts.balancer)

        prefetcher.request(plan)
        for step in range(parts.config.steps + 1):
            planned = prefetcher.take()
            if step < parts.config.steps:
                prefetcher.request(plan)
            if step == 0:  # warm up: buffers, kernels and connections of both ways
                for way in WAYS * 2:
                    self._run_one(way, planned)
                continue
            self._compare(planned, step)
            if parts.rank == 0:
                self._report(self.steps)
        prefetcher.close()
        return self._result()

    def _compare(self, planned: PlannedStep, step: int) -> None:
        """Run one batch both ways, keep what was measured, compare, and update with the balanced gradients."""
        parts = self.parts
        gradients: dict[str, list[Tensor]] = {}
        fastest: dict[str, tuple[DemoStep, list[Span]]] = {}
        for repeat in range(self._repeats):
            # Which way goes first alternates: whatever the first one pays, both pay equally often.
            for way in WAYS if (step + repeat) % 2 else WAYS[::-1]:
                run = self._run_one(way, planned)
                if way not in fastest or run[0].time_s < fastest[way][0].time_s:
                    fastest[way] = run
                gradients[way] = [p.grad.clone() for p in parts.module.parameters() if p.grad is not None]
        for way, (measured, spans) in fastest.items():
            self.steps[way].append(measured)
            self.spans[way].append(spans)
        packed, balanced = (self.steps[way][-1].loss for way in WAYS)
        self.loss_max_abs_diff = max(self.loss_max_abs_diff, abs(packed - balanced))
        for one, other in zip(gradients["packed"], gradients["balanced"], strict=True):
            scale = float(one.abs().max())
            if scale > 0:
                difference = float((one - other).abs().max()) / scale
                self.grad_max_rel_diff = max(self.grad_max_rel_diff, difference)
        for parameter, gradient in zip(parts.module.parameters(), gradients["balanced"], strict=True):
            parameter.grad = gradient
        clip_global_norm(parts.module.parameters(), parts.config.optimizer.clip_norm)
        set_learning_rate(parts.optimizer, learning_rate(parts.config.optimizer, step, parts.config.steps))
        parts.optimizer.step()

    def _run_one(self, way: str, planned: PlannedStep) -> tuple[DemoStep, list[Span]]:
        """Forward and backward of one batch, timed from a barrier until the summed gradients are there."""
        parts = self.parts
        plans = [self._plan_for(way, nano) for nano in planned.plan.nano_batches]
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
        blocked_s = parts.meter.take().get("wait", 0.0)
        own = torch.tensor(
            [end_s - start_s, end_s - start_s - blocked_s, float(loss_sum.detach())], dtype=torch.float64
        )
        by_rank = [torch.empty_like(own) for _ in range(parts.ranks)]
        dist.all_gather(by_rank, own, group=parts.groups.control)
        table = torch.stack(by_rank)
        work = sum(plan.work_by_server for plan in plans)
        return (
            DemoStep(
                time_s=float(table[:, 0].max()),
                loss=float(table[:, 2].sum()) / planned.loss_tokens,
                tokens=planned.tokens,
                busy_s=tuple(table[:, 1].tolist()),
                pairs=tuple(int(w) for w in np.asarray(work)),
            ),
            spans,
        )

    def _plan_for(self, way: str, nano: NanoBatchPlan) -> NanoBatchPlan:
        if way == "balanced":
            return nano
        return self.parts.balancer.plan_layout(nano.plan.layout, nano.index, policy=way)

    def _result(self) -> dict[str, Any] | None:
        parts = self.parts
        typical = typical_step(self.steps["packed"])
        own = {way: self.spans[way][typical] for way in WAYS}
        gathered: list[Any] = [None] * parts.ranks
        dist.all_gather_object(gathered, own, group=parts.groups.control)
        if parts.rank != 0:
            return None
        predicted = predicted_speedup(self.steps)
        times = {way: sum(s.time_s for s in self.steps[way]) for way in WAYS}
        return {
            "figures": {
                **{way: way_figures(self.steps[way]) for way in WAYS},
                "speedup": times["packed"] / times["balanced"],
                "speedup_predicted": predicted,
                "loss_max_abs_diff": self.loss_max_abs_diff,
                "grad_max_rel_diff": self.grad_max_rel_diff,
                "ranks": parts.ranks,
                "steps": len(self.steps["packed"]),
                "out_dir": parts.config.out_dir,
            },
            "steps": {way: [dataclasses.asdict(s) for s in self.steps[way]] for way in WAYS},
            "typical_step": typical,
            "spans": {way: {rank: spans[way] for rank, spans in enumerate(gathered)} for way in WAYS},
        }


def way_figures(steps: Sequence[DemoStep]) -> dict[str, float]:
    """The figures of one way: rates over all its steps, imbalance as the mean over steps."""
    time_s = sum(s.time_s for s in steps)
    busy_s = sum(sum(s.busy_s) / len(s.busy_s) for s in steps)
    return {
        "tokens_per_s": sum(s.tokens for s in steps) / time_s,
        "idle_share": 1 - busy_s / time_s,
        "work_max_over_mean": sum(s.work_max_over_mean for s in steps) / len(steps),
        "loss_last": steps[-1].loss,
    }


def predicted_speedup(steps: dict[str, list[DemoStep]]) -> float:
    """What the work alone says: a rank's busy time is a base plus a slope times the pairs that it computes, fitted to
    the packed runs; a step takes as long as its busiest rank. Transfers, waiting within a step and the machine's other
    work are not in it: the measured figure shows what they cost.

    The slope is common. The base is each rank's own: cores of a shared machine are not equally fast.
    """
    pairs = {way: np.array([s.pairs for s in steps[way]], dtype=np.float64) for way in WAYS}
    busy_s = np.array([s.busy_s for s in steps["packed"]])
    around = pairs["packed"] - pairs["packed"].mean(axis=0)
    spread = float((around**2).sum())
    slope = float((around * (busy_s - busy_s.mean(axis=0))).sum()) / spread if spread else 0.0
    base = busy_s.mean(axis=0) - slope * pairs["packed"].mean(axis=0)
    time_s = {way: float((base + slope * pairs[way]).max(axis=1).sum()) for way in WAYS}
    return time_s["packed"] / time_s["balanced"]


def typical_step(steps: Sequence[DemoStep]) -> int:
    """The step whose imbalance is nearest to the mean: the one to draw."""
    imbalance = np.array([s.work_max_over_mean for s in steps])
    return int(np.abs(imbalance - imbalance.mean()).argmin())
