"""Linear, transfer and memory models: identities that any right formula has, and published figures."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.cost.collectives import (
    Group,
    WideLink,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_of,
    reduce_scatter_s,
    send_s,
    wide_all_reduce_s,
)
from steelyard.cost.linear import head_flops, layer_flops, model_flops, token_wise_cost
from steelyard.cost.peak_memory import activation_bytes, estimate, parameter_bytes, stage_layers
from steelyard.cost.profiles import load_profile
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import MODEL_SHAPES, gpt_shape, model_shape
from steelyard.errors import UsageError

H100 = load_profile("h100")
LLAMA = model_shape("llama3-8b")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama2-7b", 6.74), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("gpt3-175b", 174.6),
     ("qwen3-8b", 8.19), ("nemotron4-340b", 341)],
)  # fmt: skip
def test_parameter_counts(name: str, billions: float) -> None:
    assert MODEL_SHAPES[name].parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_flops_are_six_per_parameter_and_token() -> None:
    tokens = 1000.0
    matrices = LLAMA.layers * (LLAMA.layer_parameters - 2 * LLAMA.hidden)
    assert LLAMA.layers * layer_flops(LLAMA, tokens) == pytest.approx(2 * matrices * tokens)
    assert head_flops(LLAMA, tokens) == 2 * tokens * LLAMA.embedding_parameters
    assert model_flops(LLAMA, tokens, 0) == pytest.approx(6 * (matrices + LLAMA.embedding_parameters) * tokens)


def test_token_wise_time_is_bounded_by_peak_and_shared_by_tensor_parallelism() -> None:
    tokens = np.array([8192.0])
    whole = token_wise_cost(LLAMA, tokens, H100)
    time_s = float((whole.before_s + whole.after_s)[0])
    assert layer_flops(LLAMA, 8192) / time_s < 0.605 * H100.peak_bf16_flops
    assert layer_flops(LLAMA, 8192) / time_s > 0.4 * H100.peak_bf16_flops
    eighth = token_wise_cost(LLAMA, tokens, H100, tensor=8)
    ratio = time_s / float((eighth.before_s + eighth.after_s)[0])
    assert 6 < ratio < 8  # smaller products are less efficient


def test_collectives() -> None:
    inside, across = Group(8, 8), Group(16, 8)
    size = 1e9
    assert all_gather_s(size, Group(1, 1), H100) == 0
    assert all_gather_s(0, inside, H100) == 0
    assert all_gather_s(size, inside, H100) == pytest.approx(51e-6 + size * 7 / 8 / 375e9)
    assert all_reduce_s(size, inside, H100) == pytest.approx(1.35 * 51e-6 + size / 265e9)  # the switch adds
    assert all_reduce_s(size, inside, load_profile("a100")) == pytest.approx(51e-6 + 2 * size * 7 / 8 / 230e9)
    assert all_reduce_s(size, Group(4, 4), H100) == pytest.approx(51e-6 * 3 / 4 + 2 * size * 3 / 4 / 375e9)
    own_part_s = reduce_scatter_s(size, Group(2, 2), H100) - all_gather_s(size, Group(2, 2), H100)
    assert own_part_s == pytest.approx(6 * size / 2 / 3.35e12)
    assert all_gather_s(size, Group(16, 1), H100) > 5 * all_gather_s(size, across, H100)
    assert send_s(size, H100, same_node=False) > send_s(size, H100, same_node=True)


def test_groups_follow_the_order_of_axes() -> None:
    assert group_of(8, 1, 8) == Group(8, 8)
    assert group_of(16, 1, 8) == Group(16, 8)
    assert group_of(4, 4, 8) == Group(4, 2)
    assert group_of(4, 8, 8) == Group(4, 1)


def test_uneven_all_to_all_waits_for_the_larger_direction_of_each_rank() -> None:
    none = np.zeros(3)
    out, arrive = np.array([4.7e9, 0, 0]), np.array([0, 4.7e9, 0])
    times = all_to_all_s(none, none, out, arrive, H100)
    assert times[0] == times[1] == pytest.approx(51e-6 + H100.network_hop_s + 0.1)
    assert times[2] == 51e-6


def test_wide_links() -> None:
    link = WideLink(0.1, 1e9, streams=1, window_bytes=1e7)
    assert link.rate == 1e8  # window / round trip
    assert WideLink(0.1, 1e9, streams=20, window_bytes=1e7).rate == 1e9
    assert link.transfer_s(1e8, rounds=2) == pytest.approx(0.2 + 1.0)
    assert wide_all_reduce_s(1e8, 2, link) == pytest.approx(0.1 + 1.0)
    assert WideLink(0.1, 1e9, loss=0.001).rate < 1e7
    with pytest.raises(UsageError, match="expected a rate"):
        WideLink(0.1, 0.0)


def test_activations_of_gpt_are_those_of_korthikanti() -> None:
    """34 bytes per token and channel without scores (their section 4.1), two of them for inputs we count elsewhere."""
    gpt = gpt_shape("gpt-22b", 48, 6144, 64)
    per_token = activation_bytes(gpt, recompute="attention")
    assert per_token / gpt.hidden == pytest.approx(34, rel=0.1)
    assert activation_bytes(gpt, recompute="full") == 2 * gpt.hidden
    scores = activation_bytes(gpt, unfused_context=2048) - per_token
    assert scores == 5 * 64 * 2048


def test_recompute_choices_are_ordered() -> None:
    kept = [activation_bytes(LLAMA, recompute=r) for r in ("full", "token_wise", "alternate", "none")]
    assert kept == sorted(kept)
    assert activation_bytes(LLAMA, tensor=8) == pytest.approx(activation_bytes(LLAMA) / 8)


def test_bytes_per_parameter() -> None:
    held = LLAMA.parameters - LLAMA.hidden
    whole = parameter_bytes(LLAMA, Degrees(), 0, sharding="none", shards=1)
    assert whole.parameters + whole.gradients + whole.optimizer == pytest.approx(18 * held)
    zero1 = parameter_bytes(LLAMA, Degrees(data=8), 0, sharding="optimizer", shards=8)
    assert zero1.parameters + zero1.gradients + zero1.optimizer == pytest.approx((6 + 12 / 8) * held)
    fsdp = parameter_bytes(LLAMA, Degrees(data=8), 0, sharding="full", shards=8)
    assert fsdp.parameters + fsdp.gradients + fsdp.optimizer == pytest.approx(16 / 8 * held)
    assert fsdp.gathered > 0
    plain = parameter_bytes(LLAMA, Degrees(), 0, sharding="none", shards=1, mixed=False)
    assert plain.parameters + plain.gradients + plain.optimizer == pytest.approx(16 * held)


def test_verdicts_follow_the_band() -> None:
    parameters = parameter_bytes(LLAMA, Degrees(), 0, sharding="full", shards=64)
    room = H100.memory_bytes - H100.reserved_bytes
    live = parameters.parameters + parameters.gradients + parameters.optimizer + parameters.gathered

    def verdict(total: float) -> str:
        return estimate(parameters, H100, activations=total - live, logits=0.0).verdict

    assert verdict(room / 1.13) == "fits"
    assert verdict(room / 1.08) == "tight"
    assert verdict(room / 1.02) == "does not fit"


def test_layers_of_stages() -> None:
    assert stage_layers(126, 8) == [16] * 6 + [15] * 2
    assert sum(stage_layers(7, 3)) == 7
