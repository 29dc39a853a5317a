"""Puts one rank's parts of a run together: device, process groups, data, model, optimizer, balancer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from steelyard.attention.interface import FAST_DEVICES
from steelyard.balance import Balancer, NanoBatchPlan
from steelyard.cost.profiles import load_profile
from steelyard.data.packing import Chunk
from steelyard.data.stream import ChunkStream
from steelyard.domain.arrays import IntArray
from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig
from steelyard.model.transformer import Decoder
from steelyard.model.weights import load_hf
from steelyard.observe.meter import Meter
from steelyard.observe.trace import Trace
from steelyard.parallel.replicas import Replicas
from steelyard.planner.objective import row_keys_of
from steelyard.runtime import ping_pong
from steelyard.runtime.step import NanoBatch
from steelyard.settings import ProcessSettings
from steelyard.train.checkpoint import Checkpointer
from steelyard.train.config import TrainConfig
from steelyard.train.optimizer import build_adamw

# A checkpoint's slowest writer may keep the others waiting for long; that is no failure.
_CHECKPOINT_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, eq=False)
class Groups:
    """Process groups of all data ranks, one per kind of traffic, so that no two kinds can get into each other's order.

    Attributes:
        exchange: core attention (NCCL on GPUs).
        gradients: sums of gradients (NCCL on GPUs).
        planning: lengths, from the background thread (gloo).
        control: flags and figures, from the main thread (gloo).
        checkpoint: writing checkpoints, from its thread (gloo).
        store: what the ranks share before any group exists; names who is missing.
    """

    exchange: dist.ProcessGroup
    gradients: dist.ProcessGroup
    planning: dist.ProcessGroup
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    store: Store

    @property
    def rank(self) -> int:
        return dist.get_rank(self.control)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.control)


@contextlib.contextmanager
def process_groups(settings: ProcessSettings, device: torch.device, timeout_s: float) -> Iterator[Groups]:
    """Join the other ranks (torchrun's environment; alone: a group of one) and leave them in good order.

    After an error nothing is waited for, since the peers may be gone: a process of several should end then.
    """
    timeout = timedelta(seconds=timeout_s)
    store: Store = HashStore()
    if settings.launched:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        # The agent's store outlives a restart, and with it the addresses of processes that are gone.
        store = PrefixStore(f"attempt-{settings.restart_count}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timeout,
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        groups = Groups(
            exchange=world,
            gradients=dist.new_group(backend=backend, timeout=timeout),
            planning=dist.new_group(backend="gloo", timeout=timeout),
            control=dist.new_group(backend="gloo", timeout=timeout),
            checkpoint=dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT),
            store=PrefixStore("progress", store),
        )
        yield groups
    except BaseException:
        if settings.world_size == 1:
            dist.destroy_process_group()
        raise
    # Without the barrier a process may abort at exit because a peer closed its connections first.
    dist.barrier(group=groups.control)
    dist.destroy_process_group()


def choose_device(settings: ProcessSettings, asked: str) -> torch.device:
    """This rank's GPU, or the CPU with its part of the cores as threads. See `TrainConfig.device`."""
    if uses_gpu(asked):
        if not torch.cuda.is_available():
            raise UsageError('device="cuda", but torch finds no GPU; set device to "auto" or "cpu"')
        device = torch.device("cuda", settings.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if settings.threads is None:
        share_cores(settings.local_rank, settings.local_world_size)
    return torch.device("cpu")


def share_cores(local_rank: int, local_ranks: int) -> None:
    """Give this process its part of the machine's cores, and torch as many threads.

    With several ranks each stays on cores of its own: the transfers' threads of one rank would otherwise push another
    rank's computation from core to core, and in a balanced step everybody waits for whoever is pushed.
    """
    if not hasattr(os, "sched_setaffinity"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
        return
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // local_ranks)
    torch.set_num_threads(count)
    if local_ranks > 1:
        first = local_rank * count % len(cores)
        os.sched_setaffinity(0, cores[first : first + count])


def uses_gpu(asked: str) -> bool:
    """Whether a run with this `TrainConfig.device` computes on GPUs."""
    return asked == "cuda" or (asked == "auto" and "cuda" in FAST_DEVICES and torch.cuda.is_available())


class StepModule(nn.Module):
    """The decoder as data parallelism wraps it: nano-batches in, sum of their token losses out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, nano_batches: Sequence[NanoBatch]) -> Tensor:
        """Sum of token losses (scalar, fp32) of this rank's nano-batches: one, or two that alternate."""
        return ping_pong.forward(self.decoder, nano_batches)


@dataclass(frozen=True, eq=False)
class Assembly:
    """One rank's parts of a run."""

    config: TrainConfig
    model_config: ModelConfig
    groups: Groups
    device: torch.device
    stream: ChunkStream
    eval_stream: ChunkStream | None
    module: StepModule
    replicas: Replicas
    optimizer: torch.optim.AdamW
    balancer: Balancer
    meter: Meter
    trace: Trace
    checkpointer: Checkpointer

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def ranks(self) -> int:
        return self.groups.ranks

    @property
    def autocast(self) -> torch.autocast:
        """The precision of forward passes."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")

    def nano_batches(self, chunks: Sequence[Chunk], plans: Sequence[NanoBatchPlan], step: int) -> list[NanoBatch]:
        """This rank's chunks on its device, each with the core attention that carries out its plan."""
        return [
            NanoBatch(
                _to_device(chunk.tokens, self.device),
                _to_device(chunk.positions, self.device),
                _to_device(chunk.labels, self.device),
                self.balancer.core_attention(plan, step),
            )
            for chunk, plan in zip(chunks, plans, strict=True)
        ]


def assemble(config: TrainConfig, groups: Groups, device: torch.device) -> Assembly:
    """Build this rank's parts. Collective.

    Raises:
        UsageError: the configuration cannot be honoured.
        DataError: the data cannot be read.
    """
    rank, ranks = groups.rank, groups.ranks
    _refuse_on_gpu(config, device)
    stream = _open_stream(config, rank, ranks, evaluation=False)
    eval_stream = _open_stream(config, rank, ranks, evaluation=True) if config.eval.every_steps else None
    model_config, decoder = _build_decoder(config)
    trace = Trace(rank, enabled=False)
    meter = Meter(trace)
    module = StepModule(decoder.to(device))
    replicas = Replicas(
        module,
        config.parallel.data_parallel,
        groups.gradients if ranks > 1 else None,
        units=[half for block in decoder.blocks for half in block.children()],
        meter=meter,
    )
    half_precision = config.precision == "bf16"
    balancer = Balancer(
        groups.exchange if ranks > 1 else None,
        shape=model_config.attention_shape(element_bytes=2 if half_precision else 4),
        tolerance=config.attention.tolerance,
        policy=config.attention.policy,
        row_keys=_row_keys(config, model_config) if config.attention.objective == "time" else 0,
        backend=config.attention.backend,
        dtype=torch.bfloat16 if half_precision else torch.float32,
        device=device,
        timeout_s=config.attention.timeout_s,
        planning_group=groups.planning if ranks > 1 else None,
        store=groups.store,
        meter=meter,
    )
    return Assembly(
        config=config,
        model_config=model_config,
        groups=groups,
        device=device,
        stream=stream,
        eval_stream=eval_stream,
        module=module,
        replicas=replicas,
        optimizer=build_adamw(module, config.optimizer),
        balancer=balancer,
        meter=meter,
        trace=trace,
        checkpointer=Checkpointer(
            config.checkpoint_dir, keep_last=config.checkpoint.keep_last, group=groups.checkpoint
        ),
    )


def _row_keys(config: TrainConfig, model: ModelConfig) -> int:
    """What a query costs the CPU kernels besides its pairs, in pairs: by the built-in profile, so that all ranks and
    machines plan alike."""
    return row_keys_of(load_profile("cpu-local").kernel(), model.head_size)


def _refuse_on_gpu(config: TrainConfig, device: torch.device) -> None:
    """What is known of CPU kernels only.

    Raises:
        UsageError: it is asked for on another device.
    """
    if device.type == "cpu":
        return
    if config.attention.speeds == "measured":
        raise UsageError(
            'attention.speeds="measured" on a GPU, whose kernels run behind the clock that measures them; set it to '
            '"equal"'
        )
    if config.attention.objective == "time":
        raise UsageError('attention.objective="time" on a GPU, whose cost per query is not known; set it to "pairs"')


def _to_device(column: IntArray, device: torch.device) -> Tensor:
    tensor = torch.tensor(column, dtype=torch.int64)  # a copy: chunks are read-only
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def _open_stream(config: TrainConfig, rank: int, ranks: int, *, evaluation: bool) -> ChunkStream:
    """The lanes of this rank: every `ranks`-th. Nano-batch j of a step is the j-th chunk of every rank, so what is
    trained on together does not depend on the number of ranks."""
    data = dataclasses.replace(config.data, epochs=1) if evaluation else config.data
    return ChunkStream(data, rank=rank, ranks=ranks, split="eval" if evaluation else "train")


def _build_decoder(config: TrainConfig) -> tuple[ModelConfig, Decoder]:
    recompute = config.parallel.checkpoint_token_wise
    if config.from_hf:
        return load_hf(Path(config.from_hf).expanduser(), checkpoint_token_wise=recompute)
    decoder = Decoder(config.model, checkpoint_token_wise=recompute)
    decoder.init_weights(torch.Generator().manual_seed(config.seed))
    return config.model, decoder
