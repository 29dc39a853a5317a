"""The simulator against ourselves: predicted and measured step time of `steelyard train` for ten document mixes.

    python benchmarks/simulator_self.py [--nproc 2] [--steps 12] [--profile FILE.toml] [--policy balanced] [--json]

Calibrates this machine first (or takes a profile), then trains a small model on each mix on CPU processes and compares
tokens per second with what `simulate_step` says for the same lengths. Needs a quiet machine: other work slows what is
measured, not what is predicted.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from steelyard.cost.profiles import DeviceProfile, load_profile, profile_toml
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import ModelShape
from steelyard.model.config import ModelConfig
from steelyard.simulate.calibrate import fit_profile
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import simulate_step
from steelyard.simulate.workloads import Documents
from steelyard.train.measure_device import measure

CHUNK_TOKENS = 4096
MIXES = (
    (64, 64, 0.0), (512, 512, 0.0), (4000, 4000, 0.0), (64, 4000, 0.1), (64, 4000, 0.5), (128, 2000, 0.3),
    (256, 8000, 0.2), (512, 3000, 0.5), (1000, 1500, 0.5), (200, 4000, 0.9),
)  # fmt: skip
"""(short length, long length, share of tokens in long documents)."""


@dataclass(frozen=True)
class Outcome:
    mix: tuple[int, int, float]
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def lengths_of(mix: tuple[int, int, float], tokens: int) -> list[int]:
    """Lengths of a mix, shuffled; the end-of-document token is one of them."""
    short, long, share = mix
    long_count = round(share * tokens / long)
    short_count = round((1 - share) * tokens / short)
    lengths = [long] * long_count + [short] * short_count
    random.Random(0).shuffle(lengths)
    return lengths


def train(folder: Path, lengths: list[int], *, nproc: int, steps: int, policy: str) -> float:
    """Seconds per step that `steelyard train` takes."""
    with (folder / "texts.jsonl").open("w") as file:
        for length in lengths:
            file.write(json.dumps({"text": "a" * (length - 1)}) + "\n")
    (folder / "run.toml").write_text(
        f'steps = {steps}\nout_dir = "{folder / "run"}"\n'
        f'[data]\nsources = [{{path = "{folder / "texts.jsonl"}"}}]\nchunk_tokens = {CHUNK_TOKENS}\n'
        f"batch_chunks = {nproc}\nshuffle = false\n"
        f'[attention]\npolicy = "{policy}"\n[log]\nprogress = false\ntensorboard = false\n'
        "[parallel]\nping_pong = false\n[checkpoint]\nevery_minutes = 1000.0\n"
    )
    command = [sys.executable, "-m", "steelyard", "train", str(folder / "run.toml"), "--nproc", str(nproc), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    return float(nproc * CHUNK_TOKENS / summary["tokens_per_s"])


def predict(profile: DeviceProfile, lengths: list[int], *, nproc: int, steps: int, policy: str) -> float:
    """What the simulator says of the same run."""
    c = ModelConfig()
    shape = ModelShape("own", c.layers, c.hidden_size, c.heads, c.kv_heads, c.ffn_size, c.vocab_size)
    scenario = Scenario(
        model=shape, profile=profile, degrees=Degrees(data=nproc), chunk_tokens=CHUNK_TOKENS,
        policy="balanced" if policy == "balanced" else "packed", precision="fp32", sharding="none",
        cut_documents=True, chunked_loss=True, mixed_precision=False,
    )  # fmt: skip
    documents = Documents("mix", int_column(lengths), "in_order")
    return simulate_step(scenario, documents, batches=steps).step_time_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policy", choices=("packed", "balanced"), default="balanced")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--mixes", type=int, default=len(MIXES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.profile:
        profile = load_profile(given.profile)
    else:
        profile = fit_profile(measure(given.nproc), load_profile("cpu-local"), name="this machine")
        print(profile_toml(profile), file=sys.stderr)
    outcomes = []
    for mix in MIXES[: given.mixes]:
        lengths = lengths_of(mix, given.nproc * CHUNK_TOKENS * (given.steps + 2))
        with tempfile.TemporaryDirectory() as folder:
            measured = train(Path(folder), lengths, nproc=given.nproc, steps=given.steps, policy=given.policy)
        predicted = predict(profile, lengths, nproc=given.nproc, steps=given.steps, policy=given.policy)
        outcomes.append(Outcome(mix, measured, predicted))
        print(f"{mix}: measured {measured:.3f} s, predicted {predicted:.3f} s, {outcomes[-1].error:+.1%}", flush=True)
    mean = float(np.mean([abs(o.error) for o in outcomes]))
    print(f"mean absolute error {mean:.1%} over {len(outcomes)} mixes on {given.nproc} processes")
    if given.json:
        print(json.dumps({"mean_abs_error": mean, "mixes": [asdict(o) | {"error": o.error} for o in outcomes]}))


if __name__ == "__main__":
    main()
