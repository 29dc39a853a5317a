"""The training loop of one rank.

Every rank runs the same steps in the same order: what a rank alone may know (a signal, a clock, a failed disk, the end
of its data) is agreed on before anybody acts on it, in the planning message or in one small message a step. The loss
of a step is divided once, before backward, by the number of labelled tokens of the whole step over all ranks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from steelyard.data.failures import SkipReport
from steelyard.data.stream import merge_states
from steelyard.domain.layout import Layout
from steelyard.errors import PeerError, SteelyardError, first_line
from steelyard.model.weights import export_state
from steelyard.observe.records import StepRecord
from steelyard.observe.trace import Span, write_perfetto
from steelyard.runtime.step import NanoBatch
from steelyard.train.assemble import Assembly
from steelyard.train.checkpoint import RunState, complete_checkpoints
from steelyard.train.metrics import (
    GlobalStep,
    RankStep,
    Reporter,
    RunSummary,
    device_peak_flops,
    mean_figures,
    peak_memory_bytes,
    step_record,
)
from steelyard.train.optimizer import clip_global_norm, learning_rate, set_learning_rate
from steelyard.train.prefetch import PlannedStep, Prefetcher, plan_next
from steelyard.train.rates import RateMeter
from steelyard.train.resume import checkpoint_to_resume, config_json

# How gloo, NCCL and the store report that a peer is gone or late: plain RuntimeErrors, told apart by their text.
_COLLECTIVE_FAILURE = re.compile(
    r"connection (closed|reset|refused)|timed? ?out|broken pipe|gloo|nccl|socket", re.IGNORECASE
)


@dataclass(frozen=True)
class _Measured:
    """A step of this rank whose record is not written yet; loss and norm stay on the device until then."""

    planned: PlannedStep
    step: int
    learning_rate: float
    loss_sum: Tensor
    grad_norm: Tensor
    step_time_s: float
    wait_s: float
    exposed_comm_s: float


class Trainer:
    """Runs an assembled training run from where its checkpoint, if any, stands.

    Args:
        parts: this rank's.
        stop_requested: whether this process was asked to stop.
        reporter_factory: makes rank 0's outputs, given the first step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        parts: Assembly,
        *,
        stop_requested: Callable[[], bool],
        reporter_factory: Callable[[int], Reporter],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.parts, self.config = parts, parts.config
        self._stop_requested, self._clock = stop_requested, clock
        self._reporter_factory = reporter_factory
        self._reporter: Reporter | None = None
        self._step = 0
        self._tokens = 0
        self._rates = RateMeter()
        self._loader: dict[str, Any] | None = None
        self._pending: list[_Measured] = []
        self._records: list[StepRecord] = []
        self._eval_loss: float | None = None
        self._eval_steps: list[PlannedStep] | None = None
        self._evaluated_at = -1
        self._saved_at = -1
        self._last_save_s = 0.0
        self._spans: list[Span] = []
        self._interrupted = False
        self._resumed_from: Path | None = None

    def run(self) -> RunSummary:
        """Train to the last step, the end of the data or a stop request. Collective.

        Raises:
            DataError, CheckpointError, PeerError, UsageError: what ended the run; other ranks may see a PeerError.
        """
        parts = self.parts
        try:
            self._resume()
            if parts.rank == 0:
                self._reporter = self._reporter_factory(self._step + 1)
                self._describe()
            self._settle_buckets()
            self._last_save_s = self._clock()
            self._train()
            self._flush()
            self._report_skipped()
            if not self._interrupted:
                self._export()
            return self._summary()
        except RuntimeError as error:
            if isinstance(error, SteelyardError) or not _COLLECTIVE_FAILURE.search(str(error)):
                raise
            raise self._peer_error(error) from error
        finally:
            if self._reporter is not None:
                self._reporter.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        prefetcher: Prefetcher[list[PlannedStep]] = Prefetcher()
        if self._step < self.config.steps:
            prefetcher.request(self._make_step)
        while self._step < self.config.steps:
            start_s = self._clock()
            self.parts.meter.take()
            self._trace_if_asked(self._step + 1)
            with self.parts.meter.span("wait for data", "data"):
                (planned,) = prefetcher.take()
            if planned.tokens == 0:
                self._say(f"the data ended after step {self._step}: all {self.config.data.epochs} epochs are read")
                break
            due = self._evaluation_due(self._step + 1)
            if due:
                prefetcher.request(self._make_evaluation)
            if self._step + 1 < self.config.steps:
                prefetcher.request(self._make_step)
            loss_sum, grad_norm, lr = self._train_step(planned, self._step + 1)
            save_due = self._agree_on_what_follows(self._step + 1)
            self._step += 1
            self._tokens += planned.tokens
            self._loader = dict(planned.loader)
            self._measure(planned, loss_sum, grad_norm, lr, start_s)
            if due and not self._interrupted:
                self._evaluate(prefetcher.take())
            if save_due and not self._interrupted:
                self._save()
            if self._interrupted:
                break
        if not self._interrupted and self._evaluation_due(self._step, at_end=True):
            prefetcher.request(self._make_evaluation)
            self._flush()
            self._evaluate(prefetcher.take())
        prefetcher.close()
        self._finish_trace()
        if self._step != self._saved_at and self._loader is not None:
            self._save()
        self.parts.checkpointer.wait()
        if self._interrupted:
            self._say(f"stopped as asked after step {self._step}; run again with checkpoint.resume=auto to go on")

    def _train_step(self, planned: PlannedStep, step: int) -> tuple[Tensor, Tensor, float]:
        """Forward, backward and update; this rank's loss sum, the global gradient norm and the learning rate."""
        parts, meter = self.parts, self.parts.meter
        nano_batches = parts.nano_batches(planned.chunks, planned.plan.nano_batches, step)
        size = self.config.nano_batches_at_once(parts.ranks)
        total = torch.zeros((), dtype=torch.float32, device=parts.device)
        for first in range(0, len(nano_batches), size):
            last = first + size >= len(nano_batches)
            with parts.replicas.accumulate(last=last):
                with meter.span("forward", "step"), parts.autocast:
                    loss_sum = parts.replicas(nano_batches[first : first + size])
                with meter.span("backward", "step"):
                    # A step may hold no label at all (documents of one token): then there is nothing to learn from it.
                    parts.replicas.backward(loss_sum / max(1, planned.loss_tokens))
            total += loss_sum.detach()
        with meter.span("update", "step"):
            lr = learning_rate(self.config.optimizer, step, self.config.steps)
            grad_norm = clip_global_norm(parts.module.parameters(), self.config.optimizer.clip_norm)
            set_learning_rate(parts.optimizer, lr)
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)
        return total, grad_norm, lr

    def _agree_on_what_follows(self, step: int) -> bool:
        """One small message a step: does anybody want to stop, is a checkpoint due by the clock of rank 0, has a
        checkpoint failed? Returns whether to save."""
        parts, config = self.parts, self.config.checkpoint
        failure = parts.checkpointer.poll()
        minutes = (self._clock() - self._last_save_s) / 60
        by_time = parts.rank == 0 and config.every_minutes > 0 and minutes >= config.every_minutes
        flags = torch.tensor([self._stop_requested(), by_time, failure is not None], dtype=torch.int32)
        with parts.meter.span("agree", "agree"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=parts.groups.control)
        stop, save, failed = (bool(flag) for flag in flags.tolist())
        if failure is not None:
            raise failure
        if failed:
            raise PeerError("another rank could not write its part of the checkpoint; see its message")
        self._interrupted = stop
        return save or (config.every_steps > 0 and step % config.every_steps == 0)

    def _settle_buckets(self) -> None:
        """One backward pass without a token, so that DDP, which lays its gradient buckets out anew after the first
        one, sums in the same layout from the first step on: a resumed run then rounds as one that never stopped."""
        parts = self.parts
        layout = Layout.from_doc_lengths([[]] * parts.ranks)
        nothing = torch.zeros(0, dtype=torch.int64, device=parts.device)
        empty = []
        for index in range(self.config.nano_batches_at_once(parts.ranks)):
            attention = parts.balancer.core_attention(parts.balancer.plan_layout(layout, index))
            empty.append(NanoBatch(nothing, nothing, nothing, attention))
        for _ in range(2):  # the new layout takes effect in the second
            with parts.replicas.accumulate(last=True), parts.autocast:
                loss = parts.replicas(empty)
            parts.replicas.backward(loss)
            parts.optimizer.zero_grad(set_to_none=True)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _make_step(self) -> list[PlannedStep]:
        measured = self.config.attention.speeds == "measured"
        return [plan_next(self.parts.stream, self.parts.balancer, self._rates.rate if measured else None)]

    def _make_evaluation(self) -> list[PlannedStep]:
        """The rounds of an evaluation; they are the same every time, so they are read and planned once."""
        if self._eval_steps is None:
            assert self.parts.eval_stream is not None
            self._eval_steps = []
            for _ in range(math.ceil(self.config.eval.chunks / self.config.data.batch_chunks)):
                planned = plan_next(self.parts.eval_stream, self.parts.balancer)
                if planned.tokens == 0:
                    break
                self._eval_steps.append(planned)
        return self._eval_steps

    def _evaluation_due(self, step: int, *, at_end: bool = False) -> bool:
        every = self.config.eval.every_steps
        if not every or step == 0 or step == self._evaluated_at:
            return False
        return at_end or step % every == 0

    def _evaluate(self, rounds: Sequence[PlannedStep]) -> None:
        parts = self.parts
        size = self.config.nano_batches_at_once(parts.ranks)
        total = torch.zeros((), dtype=torch.float64)
        with parts.replicas.evaluate(), parts.autocast:
            for planned in rounds:
                nano_batches = parts.nano_batches(planned.chunks, planned.plan.nano_batches, self._step)
                for first in range(0, len(nano_batches), size):
                    total += parts.replicas(nano_batches[first : first + size]).double().cpu()
        dist.all_reduce(total, group=parts.groups.control)
        tokens = sum(planned.loss_tokens for planned in rounds)
        self._evaluated_at = self._step
        if tokens:
            self._eval_loss = float(total) / tokens
        if self._reporter is not None and tokens:
            self._reporter.evaluation(self._step, float(total) / tokens, tokens)
        elif self._reporter is not None:
            self._reporter.log("evaluation: the evaluation split holds no document; raise data.eval_fraction")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        parts, config = self.parts, self.config
        found: list[Path | SteelyardError | None] = [None]
        if parts.rank == 0:  # one rank looks, so that all agree even on a slow network file system
            try:
                parts.checkpointer.remove_partial()
                found = [checkpoint_to_resume(config)]
            except SteelyardError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0, group=parts.groups.control)
        path = found[0]
        if isinstance(path, SteelyardError):
            raise path
        if path is None:
            return
        run = parts.checkpointer.load(path, parts.module, parts.optimizer)
        parts.stream.load_state_dict(run.loader)
        self._step, self._tokens, self._saved_at = run.step, run.tokens, run.step
        self._resumed_from = path

    def _save(self) -> None:
        """Start writing a checkpoint of the step just done; records up to here are written first."""
        parts = self.parts
        self._flush()
        states: list[Any] = [None] * parts.ranks
        dist.all_gather_object(states, self._loader, group=parts.groups.control)
        run = RunState(self._step, self._tokens, merge_states(states), config_json(self.config))
        parts.checkpointer.save(parts.module, parts.optimizer, run)
        self._saved_at = self._step
        self._last_save_s = self._clock()

    def _export(self) -> None:
        if not self.config.checkpoint.export_hf:
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.parts.module, options=options)
        if self.parts.rank == 0:
            ours = {name.removeprefix("decoder."): value for name, value in state.items() if isinstance(value, Tensor)}
            folder = export_state(ours, self.parts.model_config, Path(self.config.out_dir) / "hf")
            self._say(f"exported for Transformers: {folder}")

    # ---- figures -----------------------------------------------------------------------------------------------------

    def _measure(self, planned: PlannedStep, loss_sum: Tensor, grad_norm: Tensor, lr: float, start_s: float) -> None:
        totals = self.parts.meter.take()
        exposed_s = totals.get("wait", 0.0)
        waited_s = exposed_s + totals.get("data", 0.0) + totals.get("agree", 0.0)
        step_time_s = self._clock() - start_s
        nano_batches = planned.plan.nano_batches
        self._rates.add(
            step_time_s - waited_s,
            totals.get("attention", 0.0),
            sum(int(nano.work_by_server[self.parts.rank]) for nano in nano_batches),
            len(nano_batches),
        )
        self._pending.append(_Measured(planned, self._step, lr, loss_sum, grad_norm, step_time_s, waited_s, exposed_s))
        if self._step % self.config.log.every == 0:
            self._flush()

    def _flush(self) -> None:
        """Gather the ranks' figures of the steps since the last time, and write their records. Collective."""
        parts, pending = self.parts, self._pending
        if not pending:
            return
        self._pending = []
        memory = float(peak_memory_bytes(parts.device))
        own = [RankStep(float(m.loss_sum), m.step_time_s, m.wait_s, m.exposed_comm_s, memory).to_row() for m in pending]
        rows = torch.tensor(own, dtype=torch.float64)
        by_rank = [torch.empty_like(rows) for _ in range(parts.ranks)]
        dist.all_gather(by_rank, rows, group=parts.groups.control)
        peak_flops = device_peak_flops(parts.device, self.config.precision)
        records = []
        for index, measured in enumerate(pending):
            work = np.sum([nano.work_by_server for nano in measured.planned.plan.nano_batches], axis=0)
            known = GlobalStep(
                step=measured.step,
                tokens=measured.planned.tokens,
                loss_tokens=measured.planned.loss_tokens,
                work_by_rank=tuple(int(w) for w in work),
                learning_rate=measured.learning_rate,
                grad_norm=float(measured.grad_norm),
            )
            ranks = [RankStep(*table[index].tolist()) for table in by_rank]
            records.append(step_record(known, ranks, model=parts.model_config, peak_flops=peak_flops))
        self._records.extend(records)
        if self._reporter is not None:
            self._reporter.steps(records)
        _refuse_not_finite(records)

    def _summary(self) -> RunSummary:
        records = self._records
        last = self.parts.checkpointer.last
        if last is None and self._saved_at == self._step and self._step:
            last = complete_checkpoints(self.config.checkpoint_dir)[-1]
        return RunSummary(
            steps=self._step,
            tokens=self._tokens,
            loss_first=records[0].loss if records else None,
            loss_last=records[-1].loss if records else None,
            eval_loss=self._eval_loss,
            **mean_figures(records),
            checkpoint=str(last) if last is not None else None,
            out_dir=self.config.out_dir,
            ranks=self.parts.ranks,
            interrupted=self._interrupted,
        )

    def _trace_if_asked(self, step: int) -> None:
        first, last = self.config.log.trace_steps
        if self.parts.trace.enabled and step > last:
            self._finish_trace()
        self.parts.trace.enabled = first <= step <= last and step > 0

    def _finish_trace(self) -> None:
        """Write the spans of all ranks once the last traced step is over. Collective."""
        if not self.parts.trace.enabled:
            return
        self.parts.trace.enabled = False
        spans: list[Any] = [None] * self.parts.ranks
        dist.all_gather_object(spans, list(self.parts.trace.take()), group=self.parts.groups.control)
        if self.parts.rank == 0:
            path = Path(self.config.out_dir) / "trace.json.gz"
            write_perfetto(path, dict(enumerate(spans)))
            self._say(f"trace: {path} (open it at https://ui.perfetto.dev)")

    def _report_skipped(self) -> None:
        """Nothing is left out silently: what `on_error` and the size limits passed over, on all ranks. Collective."""
        reports: list[Any] = [None] * self.parts.ranks
        dist.all_gather_object(reports, self.parts.stream.skipped, group=self.parts.groups.control)
        skipped = SkipReport.merged(reports)
        if skipped.total:
            self._say(f"documents left out so far: {skipped}")

    # ---- words -------------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        if self._reporter is not None:
            self._reporter.log(message)

    def _describe(self) -> None:
        parts, config = self.parts, self.config
        per_rank = config.data.batch_chunks // parts.ranks
        mode = "ping-pong" if config.nano_batches_at_once(parts.ranks) == 2 else "plain"
        self._say(
            f"{parts.model_config.parameter_count / 1e6:.2f}M parameters, {parts.ranks} ranks on {parts.device.type}, "
            f"{per_rank} chunks of {config.data.chunk_tokens} tokens per rank and step, "
            f"{config.attention.policy} attention ({parts.balancer.backend.name}, {mode}), "
            f"{config.parallel.data_parallel}, {config.precision}"
        )
        if parts.device.type == "cpu" and torch.cuda.is_available():
            self._say(
                "the GPU stays idle: attention kernels for CUDA are written and have never run, so this run uses the "
                'CPU; device="cuda" asks for them'
            )
        if self._step:
            self._say(f"resumed from {self._resumed_from} after step {self._step}")
        if self._step >= config.steps:
            self._say(f"all {config.steps} steps are done already: raise steps to go on, or choose another out_dir")

    def _peer_error(self, error: RuntimeError) -> PeerError:
        progress = self.parts.balancer.progress
        who = progress.explain(None) if progress is not None else "no progress is published"
        return PeerError(f"step {self._step + 1}: another rank ended or came too late: {who} [{first_line(error)}]")


def _refuse_not_finite(records: Sequence[StepRecord]) -> None:
    for record in records:
        if not math.isfinite(record.loss) or not math.isfinite(record.grad_norm):
            raise SteelyardError(
                f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}: the run has diverged. "
                "Lower optimizer.lr, lengthen optimizer.warmup_steps or lower optimizer.clip_norm, and resume from "
                "an earlier checkpoint"
            )
