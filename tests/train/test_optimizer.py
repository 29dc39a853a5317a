"""Learning rate, decay groups and clipping on the global norm."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from steelyard.train.config import OptimizerConfig
from steelyard.train.optimizer import build_adamw, clip_global_norm, learning_rate, set_learning_rate


def test_warm_up_then_half_a_cosine() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[11] == pytest.approx(0.55)  # half-way between warm-up and end
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(config, 30, 20) == pytest.approx(0.1)


def test_constant_schedule_and_no_warm_up() -> None:
    constant = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, s, 9) for s in (1, 2, 9)] == [0.5, 1.0, 1.0]
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 1, 10) < 1.0
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=10), 10, 10) == 1.0


def test_vectors_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_adamw(module, OptimizerConfig(weight_decay=0.5, betas=(0.8, 0.9), eps=1e-6))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decay[id(p)] for p in module.parameters()] == [0.5, 0.0, 0.0, 0.0]
    assert all(g["betas"] == (0.8, 0.9) and g["eps"] == 1e-6 for g in optimizer.param_groups)
    set_learning_rate(optimizer, 0.25)
    before = module[0].weight.detach().clone()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(module[0].weight.detach(), before * (1 - 0.25 * 0.5))
    torch.testing.assert_close(module[1].weight.detach(), torch.ones(4))


def test_clipping_scales_all_gradients_together() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(clip_global_norm(parameters, 0.0)) == 5.0
    assert parameters[1].grad.tolist() == [4.0]
    assert float(clip_global_norm(parameters, 1.0)) == 5.0
    norm = math.hypot(*(float(g) for p in parameters[:2] for g in p.grad))
    assert norm == pytest.approx(1.0, abs=1e-5)
    assert float(clip_global_norm(parameters, 2.0)) == pytest.approx(1.0, abs=1e-5)
