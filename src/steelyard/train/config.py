"""What a training run can be told: one frozen dataclass per concern, read from TOML and flags by the command line.

Field docstrings are the help texts and the configuration reference. A file of ten lines is enough:

    steps = 200
    [data]
    sources = [{path = "texts"}]
    chunk_tokens = 4096
    batch_chunks = 8

Torch-free, so that `steelyard train --help` answers at once and a wrong setting is refused before anything starts.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from steelyard.data.config import DataConfig
from steelyard.data.listing import list_source
from steelyard.data.tokenizers import load_tokenizer
from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over the run."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and other vectors have none."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: fall along half a cosine until the last step, or stay."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step over the peak (cosine)."""
    clip_norm: float = 1.0
    """Largest 2-norm of the gradient of all parameters together; 0: no clipping."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work."""

    data_parallel: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: every rank holds all parameters; fsdp2: parameters, gradients and optimizer state are sharded."""
    ping_pong: bool | None = None
    """Run two chunks of a rank in turn, so that the transfers of one hide under the work of the other. Unset: wherever
    each rank has an even number of chunks a step."""
    checkpoint_token_wise: bool = False
    """Recompute the token-wise layers in the backward pass instead of keeping their activations."""


@dataclass(frozen=True)
class AttentionConfig:
    """Where core attention is computed."""

    policy: Literal["balanced", "packed"] = "balanced"
    """balanced: attention work is spread evenly over the ranks; packed: every rank computes its own documents."""
    tolerance: float = 0.05
    """No rank's attention work exceeds (1 + tolerance) times its share."""
    objective: Literal["pairs", "time"] = "pairs"
    """What is balanced. pairs: of queries and keys; time: a query also counts what it costs the kernels besides its
    keys, which weighs with short documents. CPU only."""
    speeds: Literal["equal", "measured"] = "equal"
    """equal: the same share of attention for every rank; measured: the shares with which all ranks end together, from
    each rank's own last steps. Measured runs do not repeat bit for bit. CPU only."""
    backend: str = "auto"
    """Attention kernels: auto, cpu, flash (CUDA; never run so far), or reference (slow, for checks)."""
    timeout_s: float = 300.0
    """Longest wait for the other ranks in an exchange, in seconds; then the run ends and names who is missing."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints hold parameters, optimizer state, the position in the data and the random state."""

    dir: str = ""
    """Folder of the checkpoints; empty: `checkpoints` in `out_dir`."""
    every_steps: int = 0
    """Steps between two checkpoints; 0: only by time, at the end and on Ctrl-C."""
    every_minutes: float = 10.0
    """Minutes between two checkpoints; 0: only by steps, at the end and on Ctrl-C."""
    keep_last: int = 2
    """How many complete checkpoints are kept."""
    resume: str = "auto"
    """auto: continue from the newest complete checkpoint if there is one; never: start anew, in a folder without
    checkpoints; or a checkpoint's path."""
    export_hf: bool = False
    """At the end, write a folder that Transformers loads to `out_dir`/hf."""


@dataclass(frozen=True)
class EvalConfig:
    """Loss on documents that are kept out of the training data (see `data.eval_fraction`)."""

    every_steps: int = 0
    """Steps between two evaluations; one more follows the last step. 0: none."""
    chunks: int = 16
    """Chunks per evaluation, over all ranks; fewer if the split holds fewer."""


@dataclass(frozen=True)
class LogConfig:
    """What is reported."""

    every: int = 1
    """Steps between two log lines; records of the steps between are written too."""
    tensorboard: bool = True
    """Write TensorBoard event files to `out_dir`/tensorboard."""
    progress: bool = True
    """Show a progress line when stderr is a terminal."""
    trace_steps: tuple[int, int] = (0, 0)
    """Steps [first, last], counted from 1, of which a Perfetto trace is written; (0, 0): none."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    data: DataConfig
    """The documents, and how they are packed."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, when it starts from random parameters."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks share the work."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Where core attention is computed."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, and where a run starts."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is reported."""
    from_hf: str = ""
    """Folder of a Transformers model (config.json and safetensors) to start from; replaces `model`."""
    out_dir: str = "steelyard-run"
    """Folder for everything the run writes."""
    steps: int = 1000
    """Optimizer steps of the whole run, those before a resume included; it ends earlier if the data do."""
    seed: int = 0
    """Seed of the initial parameters (the order of the data has its own: `data.seed`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes. auto: a GPU for each rank where there are GPUs and attention kernels for them, else the CPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products and attention in bfloat16 (autocast); parameters and optimizer stay fp32."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are."""
        return Path(self.checkpoint.dir) if self.checkpoint.dir else Path(self.out_dir) / "checkpoints"

    def model_config(self) -> ModelConfig:
        """`model`, or the shape of the model in `from_hf`.

        Raises:
            UsageError: `from_hf` is no folder, or its model is not supported.
        """
        if not self.from_hf:
            return self.model
        path = Path(self.from_hf).expanduser() / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"from_hf={self.from_hf}: no file {path}; expected a folder with config.json and safetensors, "
                "as save_pretrained writes it"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"from_hf={self.from_hf}: {path} cannot be read ({error})") from error
        return ModelConfig.from_hf(values)

    def nano_batches_at_once(self, ranks: int) -> int:
        """Chunks of a rank that make one micro-batch: 2 with ping-pong, else 1."""
        per_rank = self.data.batch_chunks // ranks
        ping_pong = per_rank % 2 == 0 if self.parallel.ping_pong is None else self.parallel.ping_pong
        return 2 if ping_pong else 1

    def validate(self, ranks: int) -> tuple[str, ...]:
        """Refuse what cannot run on `ranks` ranks, before anything is started. Reads folders' names, not the data.

        Returns:
            Warnings, one line each: of what can run, but may not be meant.

        Raises:
            UsageError: says what was given, what was expected and what to change.
        """
        _check_numbers(self)
        _check_batch(self, ranks)
        model = self.model_config()
        if self.data.chunk_tokens > model.max_positions:
            raise UsageError(
                f"data.chunk_tokens={self.data.chunk_tokens} is longer than the model's context "
                f"({_model_key(self, 'max_positions')}={model.max_positions}): lower data.chunk_tokens to "
                f"{model.max_positions} or raise the context"
            )
        _check_vocabulary(self, model)
        unread = [list_source(source).unread(source) for source in self.data.sources]
        if self.eval.every_steps and not self.data.eval_fraction:
            raise UsageError(
                f"eval.every_steps={self.eval.every_steps} but data.eval_fraction=0 keeps no document for evaluation: "
                "set data.eval_fraction, for example to 0.02, or eval.every_steps to 0"
            )
        _check_folders(self)
        return tuple(line for line in unread if line is not None)


def _check_numbers(config: TrainConfig) -> None:
    optimizer, log = config.optimizer, config.log
    checks = (
        ("steps", config.steps, config.steps >= 1, "at least 1"),
        ("optimizer.lr", optimizer.lr, optimizer.lr > 0, "a number above 0 such as 3e-4"),
        ("optimizer.betas", optimizer.betas, all(0 <= b < 1 for b in optimizer.betas), "two numbers from 0 to below 1"),
        ("optimizer.eps", optimizer.eps, optimizer.eps > 0, "a number above 0 such as 1e-8"),
        ("optimizer.weight_decay", optimizer.weight_decay, optimizer.weight_decay >= 0, "0 or more"),
        ("optimizer.warmup_steps", optimizer.warmup_steps, optimizer.warmup_steps >= 0, "0 or more"),
        ("optimizer.min_lr_ratio", optimizer.min_lr_ratio, 0 <= optimizer.min_lr_ratio <= 1, "0 to 1"),
        ("optimizer.clip_norm", optimizer.clip_norm, optimizer.clip_norm >= 0, "0 (no clipping) or more"),
        ("attention.tolerance", config.attention.tolerance, config.attention.tolerance >= 0, "0 or more, such as 0.05"),
        (
            "attention.timeout_s",
            config.attention.timeout_s,
            0 < config.attention.timeout_s <= 1e7,
            "0 to 10 million seconds",
        ),
        ("checkpoint.every_steps", config.checkpoint.every_steps, config.checkpoint.every_steps >= 0, "0 or more"),
        (
            "checkpoint.every_minutes",
            config.checkpoint.every_minutes,
            config.checkpoint.every_minutes >= 0,
            "0 or more",
        ),
        ("checkpoint.keep_last", config.checkpoint.keep_last, config.checkpoint.keep_last >= 1, "at least 1"),
        ("eval.every_steps", config.eval.every_steps, config.eval.every_steps >= 0, "0 (none) or more"),
        ("eval.chunks", config.eval.chunks, config.eval.chunks >= 1, "at least 1"),
        ("log.every", log.every, log.every >= 1, "at least 1"),
        ("log.trace_steps", log.trace_steps, 0 <= log.trace_steps[0] <= log.trace_steps[1], "[first, last] or [0, 0]"),
    )
    for name, given, is_right, expected in checks:
        if not is_right:
            raise UsageError(f"{name}={given}, expected {expected}")


def _check_batch(config: TrainConfig, ranks: int) -> None:
    chunks = config.data.batch_chunks
    if ranks > chunks:
        raise UsageError(
            f"{ranks} ranks for data.batch_chunks={chunks}: every rank needs at least one chunk of a step; "
            f"raise data.batch_chunks to {ranks} or a multiple of it, or start at most {chunks} ranks"
        )
    if chunks % ranks:
        raise UsageError(
            f"data.batch_chunks={chunks} is not a multiple of the {ranks} ranks: every rank takes the same number of "
            f"chunks; set data.batch_chunks to {chunks - chunks % ranks} or {chunks + ranks - chunks % ranks}"
        )
    if config.parallel.ping_pong and (chunks // ranks) % 2:
        raise UsageError(
            f"parallel.ping_pong needs an even number of chunks per rank, but data.batch_chunks={chunks} gives each of "
            f"{ranks} ranks {chunks // ranks}: set data.batch_chunks to {ranks * (chunks // ranks + 1)}, or leave "
            "parallel.ping_pong out"
        )


def _check_vocabulary(config: TrainConfig, model: ModelConfig) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos_token)
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"the tokenizer {config.data.tokenizer!r} has {tokenizer.vocab_size} token ids, the model only "
            f"{_model_key(config, 'vocab_size')}={model.vocab_size}: "
            + (
                "use the tokenizer of that model"
                if config.from_hf
                else f"set model.vocab_size to {tokenizer.vocab_size} or more, or use another tokenizer"
            )
        )


def _check_folders(config: TrainConfig) -> None:
    for name, folder in (("out_dir", Path(config.out_dir)), ("checkpoint.dir", config.checkpoint_dir)):
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not existing.is_dir():
            raise UsageError(f"{name}={folder}: {existing} is a file, expected a folder or a new name")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(f"{name}={folder}: no permission to write in {existing}; choose another folder")
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (Path(resume) / "run.json").is_file():
        raise UsageError(
            f"checkpoint.resume={resume}: no checkpoint there; expected auto, never or a folder named step-… "
            "that holds run.json"
        )


def _model_key(config: TrainConfig, key: str) -> str:
    return f"{key} of {config.from_hf}" if config.from_hf else f"model.{key}"
