"""AdamW, its learning rate, and clipping on the norm of the whole gradient, whatever shards it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from steelyard.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step`, counted from 1, in a run of `steps`.

    Rises linearly to `lr` at step `warmup_steps`, then falls along half a cosine to `lr` × `min_lr_ratio` at the last
    step ("constant": stays).
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters of `module`: matrices decay, vectors (norms, biases) do not."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    # The rate is a float set anew each step, so it is no part of the optimizer's state that a checkpoint must restore.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=any(p.is_cuda for p in trainable) or None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_global_norm(parameters: Iterable[nn.Parameter], clip_norm: float) -> Tensor:
    """Scale all gradients together so that their 2-norm is at most `clip_norm` (0: leave them).

    Collective when the gradients are sharded (FSDP2): every rank calls it. Replicated gradients must be the same on
    all ranks already (DDP).

    Returns:
        The norm before clipping, a plain scalar tensor, the same on every rank.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if clip_norm > 0:
        clip_grads_with_norm_(with_gradient, clip_norm, norm)
    return norm
