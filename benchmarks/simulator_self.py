"""The simulator against ourselves: what it says of `steelyard train`, and what that takes, for ten document mixes.

    python benchmarks/simulator_self.py [--nproc 2] [--steps 3] [--rounds 5] [--profile FILE.toml] [--json]
    python benchmarks/simulator_self.py --memory [--nproc 2] [--json]

*Time.* Calibrates this machine first (or takes a profile), then trains a small model on each mix on CPU processes, with
the trainer of `steelyard train` in processes that are there already (`--command`: by the command itself). The
prediction is made for the very chunks that the run trains on, step by step; a run's first step is left out on both
sides. Needs a quiet machine. Even on one, cores change their speed within minutes, so a fixed piece of work is timed
before and after each run, as calibration did: a second error is that of the prediction at the speed of the moment.

*Memory.* Trains two steps of each mix in a worker pool while every tensor that is made and freed is counted, and
compares the most that was alive on any rank with the predicted peak. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from steelyard.cost.profiles import DeviceProfile, load_profile, profile_toml
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.stream import ChunkStream
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import ModelShape
from steelyard.runtime.worker_pool import WorkerPool
from steelyard.settings import to_toml
from steelyard.simulate.calibrate import fit_profile
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.train.assemble import share_cores
from steelyard.train.config import AttentionConfig, CheckpointConfig, LogConfig, ParallelConfig, TrainConfig
from steelyard.train.measure_device import TEXTS, measure, pool_groups, probe_s, train_quietly

CHUNK_TOKENS = 4096
MIXES = (
    (64, 64, 0.0), (512, 512, 0.0), (4000, 4000, 0.0), (64, 4000, 0.1), (64, 4000, 0.5), (128, 2000, 0.3),
    (256, 8000, 0.2), (512, 3000, 0.5), (1000, 1500, 0.5), (200, 4000, 0.9),
)  # fmt: skip
"""(short length, long length, share of tokens in long documents)."""


@dataclass(frozen=True)
class Outcome:
    """One mix. `now_s`: predicted for the speed that the cores had around the run."""

    mix: tuple[int, int, float]
    measured: float
    predicted: float
    now: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_now(self) -> float:
        return (self.now or self.predicted) / self.measured - 1


def lengths_of(mix: tuple[int, int, float], tokens: int, seed: int = 0) -> list[int]:
    """Lengths of a mix, shuffled; the end-of-document token is one of them."""
    short, long, share = mix
    long_count = round(share * tokens / long)
    short_count = round((1 - share) * tokens / short)
    lengths = [long] * long_count + [short] * short_count
    random.Random(seed).shuffle(lengths)
    return lengths


def config_of(
    folder: Path, mix: tuple[int, int, float], *, nproc: int, steps: int, policy: str, seed: int = 0
) -> TrainConfig:
    """The training run of a mix; writes its texts into `folder`."""
    with (folder / TEXTS).open("w") as file:
        for length in lengths_of(mix, nproc * CHUNK_TOKENS * (steps + 2), seed):
            file.write(json.dumps({"text": "a" * (length - 1)}) + "\n")
    return TrainConfig(
        steps=steps,
        out_dir=str(folder / "run"),
        data=DataConfig(
            (SourceConfig(str(folder / TEXTS)),), chunk_tokens=CHUNK_TOKENS, batch_chunks=nproc, shuffle=False
        ),
        attention=AttentionConfig(policy="balanced" if policy == "balanced" else "packed"),
        parallel=ParallelConfig(ping_pong=False),
        log=LogConfig(progress=False, tensorboard=False),
        checkpoint=CheckpointConfig(every_minutes=0.0),
        device="cpu",
    )


def documents_of(config: TrainConfig) -> Documents:
    """The chunks that the run will train on, step after step, rank after rank."""
    stream = ChunkStream(config.data)  # one reader that owns the lanes of all ranks
    steps = [np.concatenate([c.doc_lengths for c in stream.next_chunks()]) for _ in range(config.steps)]
    return Documents("mix", int_column(np.concatenate(steps)), "batches", tuple(int_column(s) for s in steps))


def predict(profile: DeviceProfile, config: TrainConfig, documents: Documents) -> StepEstimate:
    """What the simulator says of a run: one sampled batch for each of its steps."""
    c = config.model
    scenario = Scenario(
        model=ModelShape("own", c.layers, c.hidden_size, c.heads, c.kv_heads, c.ffn_size, c.vocab_size),
        profile=profile, degrees=Degrees(data=config.data.batch_chunks), chunk_tokens=CHUNK_TOKENS,
        policy=config.attention.policy, precision="fp32", sharding="none", cut_documents=True, chunked_loss=True,
        mixed_precision=False, fused=False, gradient_overlap=False,  # gloo's threads take the same cores
        tolerance=config.attention.tolerance,
    )  # fmt: skip
    return simulate_step(scenario, documents, batches=config.steps)


def train_by_command(folder: Path, config: TrainConfig) -> list[float]:
    """Seconds of each step of `steelyard train`."""
    (folder / "run.toml").write_text(to_toml(config))
    nproc = str(config.data.batch_chunks)
    command = [sys.executable, "-m", "steelyard", "train", str(folder / "run.toml"), "--nproc", nproc, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["step_time_s"]) for line in lines]


def _steps_of_rank(rank: int, ranks: int, group: Any, folder: str, config: TrainConfig) -> list[float]:
    """The same trainer in a worker of a pool that is there already: nothing has to start."""
    share_cores(rank, ranks)
    return [record.step_time_s for record in train_quietly(config, pool_groups(ranks, group, Path(folder)))]


def times(given: argparse.Namespace, profile: DeviceProfile, reference_s: float) -> list[Outcome]:
    """Predicted and measured seconds per step of all mixes; in rounds, so that no mix has one moment only."""
    measured: dict[int, list[float]] = {number: [] for number in range(given.mixes)}
    predicted: dict[int, list[float]] = {number: [] for number in range(given.mixes)}
    now: dict[int, list[float]] = {number: [] for number in range(given.mixes)}
    with WorkerPool(given.nproc) as pool:
        reference_s = reference_s or probe_s(pool, given.nproc)
        for turn in range(given.rounds):
            for number in range(given.mixes)[:: 1 if turn % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory() as name:
                    config = config_of(
                        Path(name), MIXES[number], nproc=given.nproc, steps=given.steps, policy=given.policy, seed=turn
                    )
                    step_s = np.resize(predict(profile, config, documents_of(config)).step_s, given.steps)
                    before_s = probe_s(pool, given.nproc)
                    if given.command:
                        found = train_by_command(Path(name), config)
                    else:
                        found = pool.run(_steps_of_rank, given.nproc, name, config, timeout_s=300)[0]
                    speed = (before_s + probe_s(pool, given.nproc)) / 2 / reference_s
                measured[number] += found[1:]
                predicted[number] += step_s[1:].tolist()
                now[number] += (speed * step_s[1:]).tolist()
                if given.verbose:
                    pairs = " ".join(f"{m:.2f}/{p:.2f}" for m, p in zip(found, step_s, strict=True))
                    print(f"    {MIXES[number]}: speed {speed:.2f}, measured/predicted {pairs}", flush=True)
    outcomes = []
    for number in range(given.mixes):
        columns = (measured[number], predicted[number], now[number])
        outcomes.append(Outcome(MIXES[number], *(float(np.mean(column)) for column in columns)))
        o = outcomes[-1]
        print(
            f"{o.mix}: measured {o.measured:.3f} s, predicted {o.predicted:.3f} s, {o.error:+.1%}; at the speed of the "
            f"moment {o.error_now:+.1%}", flush=True,
        )  # fmt: skip
    return outcomes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, as operators make them and as their storages are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self._seen[key] = weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size_bytes: int) -> None:
        self.now -= size_bytes
        self._seen.pop(key, None)


def _peak_of_rank(rank: int, ranks: int, group: Any, folder: str, config: TrainConfig) -> int:
    """Most bytes of tensors that were alive at once on this rank, from the first parameter on."""
    share_cores(rank, ranks)
    with LiveBytes() as live:
        train_quietly(config, pool_groups(ranks, group, Path(folder)))
    return live.peak


def memory(given: argparse.Namespace, profile: DeviceProfile) -> list[Outcome]:
    """Predicted and measured peak bytes of live tensors of the fullest rank, all mixes."""
    outcomes = []
    with WorkerPool(given.nproc) as pool:
        for mix in MIXES[: given.mixes]:
            with tempfile.TemporaryDirectory() as name:
                config = config_of(Path(name), mix, nproc=given.nproc, steps=2, policy=given.policy)
                predicted = predict(profile, config, documents_of(config)).memory
                peaks = pool.run(_peak_of_rank, given.nproc, name, config, timeout_s=300)
            outcomes.append(Outcome(mix, float(max(peaks)), predicted.live))
            o = outcomes[-1]
            measured, foreseen = (f"{x / 2**20:.0f} MiB" for x in (o.measured, o.predicted))
            print(f"{mix}: measured {measured}, predicted {foreseen}, {o.error:+.1%}", flush=True)
            if given.verbose:
                parts = {k: round(v / 2**20) for k, v in predicted.parts().items() if v}
                print(f"    ranks {[round(p / 2**20) for p in peaks]}; {parts}", flush=True)
    return outcomes


def report(outcomes: Sequence[Outcome], what: str, nproc: int) -> dict[str, Any]:
    """Print and return the mean and the worst error."""
    errors = [abs(o.error) for o in outcomes]
    found = {"mean_abs_error": float(np.mean(errors)), "worst_abs_error": max(errors), "nproc": nproc}
    print(f"{what}: mean absolute error {found['mean_abs_error']:.1%}, worst {found['worst_abs_error']:.1%}, "
          f"{len(outcomes)} mixes, {nproc} processes")  # fmt: skip
    if outcomes[0].now is not None:
        found["mean_abs_error_now"] = float(np.mean([abs(o.error_now) for o in outcomes]))
        print(f"{what}, at the speed of the moment: mean absolute error {found['mean_abs_error_now']:.1%}")
    found["mixes"] = [asdict(o) | {"error": o.error} for o in outcomes]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", action="store_true", help="start `steelyard train` for each run")
    parser.add_argument("--policy", choices=("packed", "balanced"), default="balanced")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--save-profile", type=Path)
    parser.add_argument("--mixes", type=int, default=len(MIXES))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    reference_s = 0.0
    if given.profile or given.memory:
        profile = load_profile(given.profile or "cpu-local")
    else:
        samples = measure(given.nproc, progress=lambda what: print(f"calibrating: {what}", file=sys.stderr, flush=True))
        profile = fit_profile(samples, load_profile("cpu-local"), name="this machine")
        reference_s = samples.probe_s
        if given.save_profile:
            given.save_profile.write_text(profile_toml(profile))
    outcomes = memory(given, profile) if given.memory else times(given, profile, reference_s)
    found = report(outcomes, "memory" if given.memory else "time", given.nproc)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
