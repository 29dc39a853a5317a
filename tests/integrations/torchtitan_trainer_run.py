"""Trains torchtitan's own small Llama 3 with torchtitan's own `Trainer` on CPU; prints one JSON line.

    torchrun --nproc-per-node 4 torchtitan_trainer_run.py FOLDER SPMD_BACKEND TENSOR_PARALLEL_DEGREE POLICY…

Once for each policy, from the same seed over the same documents.
torchtitan takes a GPU for granted, so it is told here that its device is the CPU; what gloo (a scaled sum) and torch
2.13 (`set_timeout`) do not have is left out. Nothing of the model, its parallelisation, loss or optimizer is touched.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn
from torchtitan.trainer import Trainer

import steelyard.integrations.torchtitan as st

STEPS = 3


class CpuDevice:
    """What torchtitan asks of `torch.cuda`, for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...
    def synchronize(self, *_: Any) -> None: ...
    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self, *_: Any) -> None: ...
    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        return type("Properties", (), {"total_memory": 1 << 34, "name": "cpu"})

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


def use_the_cpu() -> None:
    """torchtitan's modules each keep a copy of what its device is."""
    device = CpuDevice()
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"  # type: ignore[attr-defined]
        if name.startswith("torchtitan") and getattr(module, "device_module", None) is torch.cuda:
            module.device_module = device  # type: ignore[attr-defined]


def write_assets(folder: Path) -> None:
    """A tokenizer of words, and texts of very different lengths."""
    words = [f"w{number}" for number in range(200)]
    vocabulary = {word: number for number, word in enumerate(["<bos>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for part in ("tokenizer", "data"):
        (folder / part).mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=draw.choice([5, 10, 20, 100])))}) for _ in range(300)]
    (folder / "data" / "texts.jsonl").write_text("\n".join(lines))


def config_of(folder: Path, spmd_backend: str, tensor: int, policy: str) -> Trainer.Config:
    config = llama3_debugmodel_varlen_attn()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.model_spec = st.balance(config.model_spec, tolerance=0.0, policy=policy, timeout_s=60)
    config.hf_assets_path, config.dataloader.dataset_path = str(folder / "tokenizer"), str(folder / "data")
    config.training.local_batch_size, config.training.seq_len = 2, 128
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = spmd_backend, tensor
    config.compile.enable = config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 1
    config.dump_folder = str(folder / "out")
    return config


def train(config: Trainer.Config) -> dict[str, Any]:
    """Losses and norms of gradients as torchtitan logs them, and attention work over the steps."""
    trainer = config.build()
    model = trainer.model_parts[0]
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    logged: list[list[float]] = []
    write = trainer.metrics_processor.log

    def note(step: int, average: float, largest: float, norm: float, *more: Any, **options: Any) -> None:
        logged.append([float(average), float(norm)])
        write(step, average, largest, norm, *more, **options)

    trainer.metrics_processor.log = note
    work: list[list[list[int]]] = []
    passes = next(m._passes for m in model.modules() if isinstance(m, st.BalancedAttention))
    begin = passes._begin

    def begin_and_note(*given: Any) -> None:
        begin(*given)
        plan = next(iter(passes._passes.values())).attention.plan
        work.append([plan.work_by_home.tolist(), plan.work_by_server.tolist()])

    passes._begin = begin_and_note
    # `Trainer.train` calls torch.distributed.set_timeout after its first step, which torch 2.13 does not have.
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(batches)
    trainer.close()
    return {"logged": logged, "work": work}


def main() -> None:
    folder, spmd_backend, tensor, policies = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    use_the_cpu()
    found = {policy: train(config_of(folder, spmd_backend, tensor, policy)) for policy in policies}
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, found)
    if dist.get_rank() == 0:
        print(f"\nRESULT {json.dumps(results)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
