"""What comes once a step, and the transfer between stages: each against a reckoning of its own."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.cost.collectives import all_gather_s, group_of, reduce_scatter_s, send_s
from steelyard.cost.profiles import load_profile
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.simulate.core import stage_transfer_s
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import _beyond, once_a_step

H100 = load_profile("h100")
MODEL = model_shape("llama3-8b")


def scenario(degrees: Degrees, **changes: object) -> Scenario:
    values: dict[str, object] = {"model": MODEL, "profile": H100, "chunk_tokens": 4096, "policy": "packed"}
    return Scenario(**{**values, "degrees": degrees, **changes})  # type: ignore[arg-type]


def left_over_s(transfer_s: float, pass_s: float, stages: int, chunks: int) -> float:
    """Transfers one after another, each from the begin of its chunk's last pass; how long after the last pass it ends.

    Time 0 is the end of the last pass. Chunk 0 is the last; those before it end `stages` passes apart.
    """
    done_s = -np.inf
    for before_last in reversed(range(chunks)):
        begin_s = -pass_s * (1 + before_last * stages)
        done_s = max(done_s, begin_s) + transfer_s / chunks
    return float(done_s)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 5, 12])
@pytest.mark.parametrize("transfer_s", [0.01, 0.4, 3.0, 40.0])
def test_gradients_of_an_interleaved_pipeline_are_reduced_chunk_by_chunk(
    stages: int, chunks: int, transfer_s: float
) -> None:
    layers = 60
    degrees = Degrees(data=8, stage=stages, virtual_stages=chunks)
    left_s = _beyond(transfer_s, 0.1, layers, degrees)
    assert left_s == pytest.approx(max(transfer_s / layers, left_over_s(transfer_s, 0.1, stages, chunks)))


def test_more_chunks_hide_more_of_the_same_gradients() -> None:
    plain = _beyond(1.0, 0.12, 32, Degrees(data=8, stage=4))
    interleaved = _beyond(1.0, 0.12 / 4, 32, Degrees(data=8, stage=4, virtual_stages=4))
    assert plain == pytest.approx(0.88)
    assert interleaved < 0.7 * plain


@pytest.mark.parametrize("width", [2, 4])
def test_gradients_are_as_wide_as_the_scenario_says(width: int) -> None:
    one = scenario(Degrees(data=16), gradient_overlap=False, gradient_bytes=width)
    held = MODEL.layers * MODEL.layer_parameters + 2 * MODEL.embedding_parameters
    group = group_of(16, 1, H100.node_size)
    expected = reduce_scatter_s(width * held, group, H100) + all_gather_s(2 * held, group, H100)
    assert once_a_step(one, np.ones(1))["gradient reduction"][0] == pytest.approx(expected, rel=0.01)


def test_slices_of_every_tensor_are_copied_one_by_one() -> None:
    def overhead_s(degrees: Degrees, **changes: object) -> float:
        return float(np.mean(once_a_step(scenario(degrees, **changes), np.ones(1))["overhead"]))

    launch_s = 10e-6
    plain = overhead_s(Degrees(data=128))
    assert overhead_s(Degrees(data=128), sliced_state=True) - plain == pytest.approx((6 * 32 + 3) * 128 * launch_s)
    halved = overhead_s(Degrees(data=64, stage=2), sliced_state=True) - plain
    assert halved == pytest.approx((6 * 16 + 3) * 64 * launch_s)
    assert overhead_s(Degrees(data=128), sliced_state=True, sharding="none") == plain
    assert overhead_s(Degrees(tensor=8), sliced_state=True) == plain


def test_stages_send_each_part_once() -> None:
    size_bytes = 4096 * MODEL.hidden * 2
    degrees = Degrees(data=2, tensor=8, stage=2)
    split_s = stage_transfer_s(scenario(degrees))
    assert split_s == pytest.approx(send_s(size_bytes / 8, H100, same_node=False))
    whole_s = stage_transfer_s(scenario(degrees, sequence_parallel=False))
    assert whole_s == pytest.approx(split_s + all_gather_s(size_bytes, group_of(8, 1, 8), H100))
    assert whole_s < send_s(size_bytes, H100, same_node=False)
    alone_s = stage_transfer_s(scenario(Degrees(data=8, stage=2), sequence_parallel=False))
    assert alone_s == pytest.approx(send_s(size_bytes, H100, same_node=False))
