"""Training runs on the pool's workers: one rank's part."""

from __future__ import annotations

import dataclasses
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.errors import DataError, SteelyardError
from steelyard.model.config import ModelConfig
from steelyard.observe.records import StepRecord
from steelyard.parallel.replicas import Replicas
from steelyard.train.assemble import Assembly, Groups, assemble
from steelyard.train.config import AttentionConfig, CheckpointConfig, LogConfig, OptimizerConfig, TrainConfig
from steelyard.train.loop import Trainer
from steelyard.train.metrics import Reporter, RunSummary


def write_documents(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """Text files from a few bytes to some thousand, a few of them long."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 7))) for _ in range(50)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        length = draw.choice([20, 80, 300, 1500])
        text = " ".join(draw.choice(words) for _ in range(length // 4 + 1))[:length]
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def small_config(data: Path, out_dir: Path, *, steps: int = 6, **changes: Any) -> TrainConfig:
    """A run of seconds: two layers, four chunks of 512 tokens a step. `changes` are fields of `TrainConfig`."""
    given = {
        "data": DataConfig(sources=(SourceConfig(str(data)),), chunk_tokens=512, batch_chunks=4),
        "model": ModelConfig(
            hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=64, max_positions=512, vocab_size=257
        ),
        "optimizer": OptimizerConfig(lr=1e-3, warmup_steps=2),
        "attention": AttentionConfig(tolerance=0.02, timeout_s=60.0),
        "checkpoint": CheckpointConfig(every_minutes=0),
        "log": LogConfig(tensorboard=False, progress=False),
        "out_dir": str(out_dir),
        "steps": steps,
    }
    return TrainConfig(**{**given, **changes})


def with_data(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def with_parallel(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **changes))


def with_attention(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, attention=dataclasses.replace(config.attention, **changes))


def with_checkpoint(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **changes))


def join(ranks: int) -> Groups | None:
    """The groups of a run on the pool's first `ranks` workers; every worker calls it; the others get None."""
    made = groups_of(ranks)
    return Groups(*made, dist.HashStore()) if dist.get_rank() < ranks else None


@cache
def groups_of(ranks: int) -> list[dist.ProcessGroup]:
    """Made once, as a run that has ended well leaves nothing in them: each has a thread that looks for messages a
    hundred times a second, and hundreds of them keep a core busy."""
    return [dist.new_group(list(range(ranks)), backend="gloo") for _ in range(5)]


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank saw of a run. Parameters are whole, whatever shards them."""

    summary: RunSummary
    records: list[StepRecord]
    parameters: dict[str, np.ndarray]

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.records]


def train_rank(
    rank: int, pool_size: int, pool_group: dist.ProcessGroup, ranks: int, config: TrainConfig,
    stop_after: int | None = None,
) -> RankResult | None:  # fmt: skip
    """Run `config` on the first `ranks` workers; `stop_after` asks rank 0 to stop, as a signal in that step would."""
    groups = join(ranks)
    if groups is None:
        return None
    config.validate(ranks)
    parts = assemble(config, groups, torch.device("cpu"))
    trainer: list[Trainer] = []

    def stop_requested() -> bool:
        return rank == 0 and stop_after is not None and trainer[0]._step + 1 >= stop_after

    def reporter(first_step: int) -> Reporter:
        return Reporter(
            Path(config.out_dir), steps=config.steps, first_step=first_step, tensorboard=config.log.tensorboard,
            progress=False,
        )  # fmt: skip

    trainer.append(Trainer(parts, stop_requested=stop_requested, reporter_factory=reporter))
    summary = trainer[0].run()
    state = get_model_state_dict(parts.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    parameters = {name: value.numpy().copy() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return RankResult(summary, trainer[0]._records, parameters)


class Weighted(torch.nn.Module):
    """A stand-in for the decoder: the loss sum of a micro-batch is Σ x · w over its tokens' rows x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, rows_T22: torch.Tensor) -> torch.Tensor:
        return (rows_T22 * self.weight).sum()


def token_weighted(
    rank: int, ranks: int, group: dist.ProcessGroup, kind: Any, rows_by_rank: list[list[torch.Tensor]]
) -> tuple[float, np.ndarray]:
    """The step's loss and gradient from rank's micro-batches, divided once by the tokens of all ranks."""
    replicas = Replicas(Weighted(), kind, group)
    own = rows_by_rank[rank]
    tokens = sum(len(rows) for rank_rows in rows_by_rank for rows in rank_rows)
    total = torch.zeros(())
    for number, rows in enumerate(own):
        with replicas.accumulate(last=number == len(own) - 1):
            loss_sum = replicas(rows)
            replicas.backward(loss_sum / tokens)
        total += loss_sum.detach()
    dist.all_reduce(total, group=group)
    gradient = replicas.module.weight.grad
    assert gradient is not None
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return float(total) / tokens, whole.numpy()


def trainer_of(parts: Assembly) -> Trainer:
    """A trainer that nobody stops."""

    def reporter(first_step: int) -> Reporter:
        return Reporter(Path(parts.config.out_dir), steps=parts.config.steps, tensorboard=False, progress=False)

    return Trainer(parts, stop_requested=lambda: False, reporter_factory=reporter)


def train_with_broken_disk(
    rank: int, pool_size: int, pool_group: dist.ProcessGroup, ranks: int, config: TrainConfig
) -> tuple[str, str] | None:
    """Rank 1 cannot read its third step: the error that ended each rank."""
    groups_of.cache_clear()  # what the run breaks off may be left in its groups
    groups = join(ranks)
    groups_of.cache_clear()
    if groups is None:
        return None
    parts = assemble(config, groups, torch.device("cpu"))
    read, calls = parts.stream.next_chunks, iter(range(100))

    def next_chunks() -> list[Any]:
        if rank == 1 and next(calls) == 2:
            raise DataError("texts/7.txt: disk on fire")
        return read()

    parts.stream.next_chunks = next_chunks  # type: ignore[method-assign]
    try:
        trainer_of(parts).run()
    except SteelyardError as error:
        return type(error).__name__, str(error)
    return "none", ""


def train_with_slow_rank(
    rank: int, pool_size: int, pool_group: dist.ProcessGroup, ranks: int, config: TrainConfig, slow: int
) -> list[StepRecord] | None:
    """Rank `slow` takes 50 ms longer for every piece of attention, forward and backward."""
    groups = join(ranks)
    if groups is None:
        return None
    parts = assemble(config, groups, torch.device("cpu"))
    if rank == slow:
        backend = parts.balancer.backend
        for name in ("forward", "backward"):
            setattr(backend, name, _slowed(getattr(backend, name)))
    trainer = trainer_of(parts)
    trainer.run()
    return trainer._records


def _slowed(function: Any) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return function(*args, **kwargs)

    return slow
