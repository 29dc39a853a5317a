"""Estimates: identities, directions, and what must be refused."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.errors import UsageError
from steelyard.simulate.answer import as_json, next_configurations
from steelyard.simulate.document_spans import by_document
from steelyard.simulate.documents import Documents, lognormal_documents, uniform_documents
from steelyard.simulate.sampled_trace import pipeline_trace, sampled_trace
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import PARTS, StepEstimate, simulate_step
from steelyard.simulate.workloads import WorkloadCache

H200 = load_profile("h200")
MODEL = model_shape("llama3-8b").with_layers(4)
MIXED = lognormal_documents(2048, 1.5, 32768)


def scenario(**changes: object) -> Scenario:
    values: dict[str, object] = {
        "model": MODEL, "profile": H200, "degrees": Degrees(data=8), "chunk_tokens": 32768, "policy": "packed",
    }  # fmt: skip
    return Scenario(**{**values, **changes})  # type: ignore[arg-type]


def run(documents: Documents = MIXED, batches: int = 2, **changes: object) -> StepEstimate:
    return simulate_step(scenario(**changes), documents, batches=batches)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": "balanced"},
        {"policy": "balanced", "ping_pong": True},
        {"policy": "wlb"},
        {"policy": "per_document_cp", "degrees": Degrees(data=2, context=4)},
        {"policy": "per_document_cp", "degrees": Degrees(data=2, context=4), "context_exchange": "ring"},
        {"degrees": Degrees(data=2, tensor=4), "recompute": "full"},
        {"degrees": Degrees(data=2, stage=4), "micro_batches": 8},
        {"degrees": Degrees(data=4, stage=2, virtual_stages=2), "micro_batches": 4},
        {"degrees": Degrees(data=4, stage=2), "micro_batches": 4, "policy": "balanced"},
        {"sharding": "full"},
        {"speeds": (1.0,) * 7 + (0.5,), "policy": "balanced"},
    ],
)
def test_shares_add_up_and_nothing_is_negative(changes: dict[str, object]) -> None:
    estimate = run(**changes)
    assert set(estimate.shares) == set(PARTS)
    assert sum(estimate.shares.values()) == pytest.approx(1.0)
    assert min(estimate.shares.values()) >= 0
    assert estimate.step_time_s > 0
    low, high = estimate.band_s
    assert low < estimate.step_time_s < high
    assert 0 < estimate.mfu_causal <= estimate.mfu < 1


def test_a_uniform_step_is_the_sum_of_its_parts() -> None:
    """One rank, no transfers: layers × (forward + backward) + head + optimizer + overhead, worked out here."""
    from steelyard.cost.attention_kernels import range_counts
    from steelyard.cost.linear import head_s, optimizer_s, token_wise_cost

    tokens = np.array([8192.0])
    one = scenario(degrees=Degrees(), chunk_tokens=8192, sharding="none")
    kernel = H200.kernel()
    layer = token_wise_cost(MODEL, tokens, H200)
    attention = kernel.floor_s + float(kernel.forward_s(range_counts(int_column([0]), int_column([8192])), 32, 128)[0])
    expected = 4 * (3 * float((layer.before_s + layer.after_s)[0]) + attention * (1 + kernel.backward_ratio))
    expected += 3 * float(head_s(MODEL, tokens, H200)[0]) + H200.step_overhead_s
    expected += optimizer_s(MODEL.parameters - MODEL.hidden, H200)
    assert simulate_step(one, uniform_documents(8192)).step_time_s == pytest.approx(expected)


def test_one_rank_stands_for_all_only_where_it_does() -> None:
    """The shortcut for equal documents gives what simulating every rank gives."""
    degrees = Degrees(data=4, tensor=2, context=2)
    short = simulate_step(scenario(degrees=degrees, micro_batches=3), uniform_documents(65536))
    every = simulate_step(
        scenario(degrees=degrees, micro_batches=3, speeds=(1.0,) * 8), uniform_documents(65536), batches=1
    )
    assert short.step_time_s == pytest.approx(every.step_time_s)
    assert short.pairs == pytest.approx(every.pairs)
    assert short.tokens == every.tokens


def test_balancing_helps_where_work_is_uneven_and_not_where_it_is_even() -> None:
    giant = Documents("giant", int_column([32768, *[512] * 448]), "batches", (int_column([32768] + [512] * 448),))
    packed, balanced = run(giant, batches=1), run(giant, batches=1, policy="balanced")
    assert packed.shares["imbalance"] > 0.2
    assert balanced.step_time_s < 0.85 * packed.step_time_s
    even = uniform_documents(4096)
    assert run(even, policy="balanced").step_time_s == pytest.approx(run(even).step_time_s, rel=0.01)


def test_waiting_for_transfers_is_no_waiting_for_work() -> None:
    """A balanced step over slow links waits for transfers, whoever's; with links as fast as memory for none."""
    slow = run(policy="balanced", profile=H200.replace(node_size=1, network_bytes_per_s=2e9))
    assert slow.shares["late transfers"] > 5 * slow.shares["imbalance"] > 0
    assert slow.exposed_comm_share > slow.shares["late transfers"] + slow.shares["exchange"]
    slow_s, own_s = (e.shares["imbalance"] * e.step_time_s for e in (slow, run(policy="balanced")))
    assert slow_s < 4 * own_s  # of a step that takes seven times as long
    quick = H200.replace(node_bytes_per_s=1e15, network_bytes_per_s=1e15)
    fast = run(policy="balanced", profile=quick).shares
    assert fast["late transfers"] < 0.005


def test_lanes_of_a_pipeline_wait_for_work_and_not_for_equal_transfers() -> None:
    lengths = int_column([32768] + [512] * 192)
    giant = Documents("giant", lengths, "batches", (lengths,))
    found = run(giant, batches=1, degrees=Degrees(data=2, stage=2), micro_batches=2)
    assert found.shares["imbalance"] > 0.05
    assert found.shares["late transfers"] == pytest.approx(0.0, abs=1e-9)


def test_a_site_s_speed_is_all_of_its_time() -> None:
    half = run(speed=0.5)
    assert half.step_time_s == pytest.approx(2 * run().step_time_s)
    assert half.mfu == pytest.approx(run().mfu / 2)
    spans, slow = (sampled_trace(scenario(speed=s), WorkloadCache(MIXED), ranks=(0,))[0] for s in (1.0, 0.5))
    assert slow[-1].end_s == pytest.approx(2 * spans[-1].end_s)
    stages = {"degrees": Degrees(data=4, stage=2), "micro_batches": 4}
    whole, slower = (pipeline_trace(scenario(speed=s, **stages), WorkloadCache(MIXED)) for s in (1.0, 0.5))
    assert slower[1][-1].end_s == pytest.approx(2 * whole[1][-1].end_s)


def test_suggestions_are_better_or_not_made() -> None:
    """What fits gets faster ones; what does not, one that fits, or else what needs less memory."""
    uneven = WorkloadCache(MIXED)
    fits = simulate_step(scenario(policy="balanced", kernel="fa3", layout="chosen"), uneven, batches=2)
    for s in next_configurations(fits, uneven, batches=2, seed=0, count=9):
        assert s.verdict == "fits"
        assert s.step_time_s < fits.step_time_s / 1.009
    big = scenario(model=model_shape("llama3-8b"), degrees=Degrees(), policy="balanced", chunk_tokens=8192)
    alone = simulate_step(big, WorkloadCache(uniform_documents(8192)), batches=1)
    assert alone.memory.verdict == "does not fit"
    less = next_configurations(alone, WorkloadCache(uniform_documents(8192)), batches=1, seed=0)
    assert less
    assert all(s.verdict == "does not fit" and "GiB" in s.reason for s in less)
    rescued = run(chunk_tokens=65536, policy="balanced")
    assert rescued.memory.verdict != "fits"
    first, *_ = next_configurations(rescued, uneven, batches=1, seed=0)
    assert first.verdict == "fits"


@pytest.mark.parametrize(("data", "batches"), [(8, 4), (2048, 2), (8192, 1)])
def test_suggestions_for_thousands_of_devices_are_compared_over_fewer_batches(
    data: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WorkloadCache(uniform_documents(4096))
    estimate = simulate_step(scenario(degrees=Degrees(data=data)), cache)
    asked = set()

    def refuse(*_: object, batches: int, seed: int) -> StepEstimate:
        asked.add(batches)
        raise UsageError("not now")

    monkeypatch.setattr("steelyard.simulate.answer.simulate_step", refuse)
    assert next_configurations(estimate, cache, batches=8, seed=0) == []
    assert asked == {batches}


def test_what_cuts_documents_is_told_of_what_does_not() -> None:
    lengths = int_column([131072, *[512] * 256])
    giant = Documents("giant", lengths, "batches", (lengths,))
    cache = WorkloadCache(giant)
    packed = simulate_step(scenario(), cache, batches=1)
    assert packed.pairs_kept < 0.5
    changes = next_configurations(packed, cache, batches=1, seed=0)
    [balanced] = [s for s in changes if s.change == "policy = balanced"]
    assert "with 100% of the pairs, not" in balanced.reason


def test_overhead_can_eat_the_gain() -> None:
    """A simulator that never predicts a loss is wrong."""
    slow = run(policy="balanced", exchange_overhead_s=0.02)
    assert slow.step_time_s > run(policy="balanced").step_time_s
    assert slow.step_time_s > run().step_time_s
    assert run(extra_overhead=0.15).step_time_s == pytest.approx(1.15 * run().step_time_s, rel=0.01)


def test_overlapped_gather_is_not_slower_than_an_exposed_one() -> None:
    slow_net = H200.replace(node_size=1)
    common = {"policy": "per_document_cp", "degrees": Degrees(data=2, context=4), "profile": slow_net}
    exposed, overlapped = run(**common), run(**common, context_exchange="gather_overlapped")
    assert overlapped.step_time_s < exposed.step_time_s
    hidden = run(**common, hidden_gather=1.0)
    assert hidden.step_time_s <= overlapped.step_time_s


def test_a_straggler_slows_everybody_and_balancing_gives_it_less() -> None:
    slow = (1.0,) * 7 + (0.5,)
    packed, balanced = run(speeds=slow), run(speeds=slow, policy="balanced")
    assert packed.step_time_s > 1.3 * run().step_time_s
    unaware = run(policy="balanced")  # what a planner that does not know would give rank 7, at half the speed
    assert balanced.rank_work_s[7] < 0.85 * 2 * unaware.rank_work_s[7]
    assert float(balanced.rank_work_s.max() / balanced.rank_work_s.mean()) < 1.25


def test_memory_follows_choices() -> None:
    base = run()
    assert run(recompute="full").memory.activations < base.memory.activations
    assert run(sharding="full").memory.optimizer == pytest.approx(base.memory.optimizer * 8 / 8 * 8 / 12)
    assert run(chunked_loss=True).memory.logits < base.memory.logits
    assert run(policy="balanced").memory.exchange > 0
    stages = {"degrees": Degrees(data=2, stage=4), "chunked_loss": True}
    many, one = run(**stages, micro_batches=8), run(**stages, micro_batches=1)
    assert many.memory.activations > 2 * one.memory.activations


def test_uneven_micro_batches_count_by_the_largest_that_stand_together() -> None:
    lengths = int_column([40000] + [64] * 1423)
    uneven = Documents("uneven", lengths, "batches", (lengths,))
    found = simulate_step(scenario(policy="wlb", degrees=Degrees(data=1, stage=2), micro_batches=4), uneven, batches=1)
    even = simulate_step(
        scenario(degrees=Degrees(data=1, stage=2), micro_batches=4), uniform_documents(32768), batches=1
    )
    assert found.memory.activations > 1.05 * even.memory.activations


def test_larger_model_takes_longer_and_more_devices_less() -> None:
    assert run(model=model_shape("llama-34b").with_layers(4)).step_time_s > 1.5 * run().step_time_s
    wide = run(degrees=Degrees(data=8, tensor=4))
    assert wide.step_time_s < run().step_time_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"degrees": Degrees(data=2, tensor=5)}, "does not divide the 32 heads .* nearest: tensor=4"),
        ({"degrees": Degrees(data=2, tensor=16)}, "more than the 8 devices of a node; nearest: tensor=8"),
        ({"degrees": Degrees(stage=8)}, "needs 8 layers, llama3-8b has 4; nearest: stage=4"),
        ({"precision": "fp8", "profile": load_profile("a100")}, "no fp8 matrix units"),
        ({"kernel": "fa9"}, "no attention kernel 'fa9'; expected fa2, fa3, cudnn"),
    ],
)
def test_what_cannot_be_laid_out_names_the_nearest_choice(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_tokens": 0}, "expected at least 1"),
        ({"speeds": (1.0, 2.0)}, "2 speeds for 8 ranks"),
        ({"ping_pong": True}, "set it false"),
        ({"degrees": Degrees(virtual_stages=2)}, "nearest: virtual_stages=1"),
        ({"degrees": Degrees(stage=4, virtual_stages=2), "micro_batches": 6}, "nearest: micro_batches=8"),
        ({"degrees": Degrees(stage=2, virtual_stages=2), "policy": "balanced"}, "nearest: virtual_stages=1"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scenario(**changes)


def test_degrees_that_do_not_multiply() -> None:
    with pytest.raises(UsageError, match="makes 8 devices, the cluster has 16; nearest: data=16"):
        scenario().check(16)
    with pytest.raises(UsageError, match="the cluster has 12; nearest: data="):
        scenario(degrees=Degrees(data=1, tensor=8)).check(12)


def test_answer_and_suggestions() -> None:
    cache = WorkloadCache(MIXED)
    estimate = simulate_step(scenario(micro_batches=2), cache, batches=2)
    suggestions = next_configurations(estimate, cache, batches=2, seed=0)
    values = as_json(estimate, MIXED, suggestions)
    assert len(values["next"]) == 2
    assert any("balanced" in s["change"] for s in values["next"])
    assert values["dominant"] in PARTS
    assert values["not_modelled"]
    keys = {"step_time_s", "step_time_band_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "verdict", "dominant",
            "memory_gib_by_rank_max", "idle_share", "bubble_share", "exposed_comm_share", "not_modelled"}  # fmt: skip
    assert keys <= set(values)


def test_traces_of_sampled_ranks() -> None:
    cache = WorkloadCache(MIXED)
    spans = sampled_trace(scenario(policy="balanced", ping_pong=True), cache, ranks=(0, 7))
    assert set(spans) == {0, 7}
    assert {"compute", "attention", "transfer"} <= {s.track for s in spans[0]}
    assert max(s.end_s for s in spans[0]) == pytest.approx(max(s.end_s for s in spans[7]), rel=0.2)


def test_tensor_transfers_are_drawn_as_transfers_and_launches_as_no_work() -> None:
    slow_host = H200.replace(layer_host_s=1.0)
    axes = scenario(degrees=Degrees(data=2, tensor=4), profile=slow_host)
    [spans] = sampled_trace(axes, WorkloadCache(MIXED), ranks=(0,)).values()
    about = {s.track for s in spans if "tensor axis" in s.name}
    assert about == {"transfer", "wait"}
    assert {s.track for s in spans if "launches" in s.name} == {"host"}


def test_a_pipeline_s_trace_is_the_step_that_was_estimated() -> None:
    """Uneven stages, the head and the transfers between stages are in both."""
    lengths = int_column([20000, 12768] + [512] * 192)
    given = Documents("given", lengths, "batches", (lengths,))
    axes = scenario(
        model=MODEL.with_layers(5), degrees=Degrees(data=1, tensor=2, stage=4), micro_batches=4, policy="wlb"
    )
    stages = pipeline_trace(axes, WorkloadCache(given))
    estimate = simulate_step(axes.replace(skip_optimizer=True), given, batches=1)
    once_s = estimate.step_time_s * sum(estimate.shares[n] for n in ("gradient reduction", "optimizer", "overhead"))
    assert max(s.end_s for spans in stages.values() for s in spans) == pytest.approx(estimate.step_time_s - once_s)
    busy = sum(s.duration_s for spans in stages.values() for s in spans if s.track in ("compute", "attention")) / 4
    work = sum(estimate.shares[n] for n in ("token_wise", "attention", "head"))
    assert busy == pytest.approx(work * estimate.step_time_s)
    for spans in stages.values():
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))


def test_a_trace_without_a_pipeline_ends_when_the_core_of_the_step_does() -> None:
    """Nobody waits between passes. Attention takes 2.5 times as long in backward and the rest twice, so that a slow
    rank may be the last in forward, and one with a long document in backward."""
    lengths = int_column([32768, *[512] * 448])
    given = Documents("given", lengths, "batches", (lengths,))
    model = model_shape("llama3-8b")
    alike = simulate_step(scenario(model=model), given, batches=1)
    token_wise_s = alike.shares["token_wise"] * alike.step_time_s / model.layers / 3
    long_s, short_s = alike.rank_work_s[0], alike.rank_work_s[7]
    slower = 1 + 1.1 * (long_s - short_s) / (token_wise_s + short_s)
    axes = scenario(model=model, speeds=(1.0,) * 7 + (1 / slower,))
    estimate = simulate_step(axes, given, batches=1)
    once_s = H200.step_overhead_s
    once_s += estimate.step_time_s * sum(estimate.shares[n] for n in ("gradient reduction", "optimizer"))
    spans = sampled_trace(axes, WorkloadCache(given))
    assert max(s.end_s for own in spans.values() for s in own) == pytest.approx(estimate.step_time_s - once_s)


def test_a_lockstep_trace_shows_a_tick_in_which_all_stages_work() -> None:
    axes = scenario(degrees=Degrees(data=4, stage=2), micro_batches=4, policy="balanced")
    cache = WorkloadCache(MIXED)
    spans = by_document(sampled_trace(axes, cache, layers=1), axes, cache)
    assert sorted(spans) == list(range(8))
    for own in spans.values():
        assert any(s.track == "compute" for s in own)
        assert all("document" in s.args for s in own if s.track == "attention")


def test_a_ring_goes_round_again_where_attention_is_computed_again() -> None:
    slow_net = H200.replace(node_bytes_per_s=1e9)
    axes = {"policy": "per_document_cp", "degrees": Degrees(context=4), "context_exchange": "ring", "profile": slow_net}
    kept, again = (run(recompute=r, **axes) for r in ("token_wise", "full"))
    exchange_s = [e.shares["exchange"] * e.step_time_s for e in (kept, again)]
    assert exchange_s[1] > 1.25 * exchange_s[0]  # four times through the ring instead of three, less what hides it


def test_a_step_of_4096_devices_takes_a_second() -> None:
    """The issue's limit, with room for a busy machine: planning included, one batch."""
    big = scenario(
        model=model_shape("llama3-70b"), degrees=Degrees(data=512, tensor=8), policy="balanced", chunk_tokens=32768
    )
    cache = WorkloadCache(MIXED)
    begin = time.process_time()
    simulate_step(big, cache, batches=1)
    assert time.process_time() - begin < 3.0


def test_computing_again_takes_a_forward_pass_more() -> None:
    """Forward is a third of token-wise time: repeating it adds a third, half of the layers a sixth."""
    common = {"sharding": "none", "degrees": Degrees()}
    times = {r: run(recompute=r, **common) for r in ("none", "alternate", "token_wise", "full")}
    base = times["none"]
    token_wise = base.shares["token_wise"] * base.step_time_s
    attention = base.shares["attention"] * base.step_time_s / (1 + H200.kernel().backward_ratio)
    added = {r: e.step_time_s - base.step_time_s for r, e in times.items()}
    assert added["token_wise"] == pytest.approx(token_wise / 3, rel=0.01)
    assert added["full"] == pytest.approx(token_wise / 3 + attention, rel=0.01)
    assert added["alternate"] == pytest.approx(added["full"] / 2, rel=0.01)


def test_dispatched_attention_is_kept_whatever_is_recomputed() -> None:
    """Servers never compute attention again, so its outputs must be in memory: a layer kept whole is not possible."""
    full, token_wise = (run(policy="balanced", recompute=r) for r in ("full", "token_wise"))
    assert full.memory.activations == token_wise.memory.activations
    assert full.step_time_s == pytest.approx(token_wise.step_time_s)
    packed = run(recompute="full").memory.activations
    kept = MODEL.query_width * 2 + 4 * MODEL.heads
    assert full.memory.activations - packed == pytest.approx(32768 * MODEL.layers * kept)


def test_without_ranks_to_share_a_document_per_document_cp_is_packed() -> None:
    one, other = run(), run(policy="per_document_cp")
    assert (one.step_time_s, one.shares, one.memory) == (other.step_time_s, other.shares, other.memory)
    several = {"micro_batches": 3}
    assert run(policy="per_document_cp", **several).pairs_kept > run(**several).pairs_kept  # it cuts fewer


def test_gathered_keys_that_are_not_kept_are_gathered_again() -> None:
    axes = {"policy": "per_document_cp", "degrees": Degrees(data=2, context=4)}
    once, again = (run(recompute=r, **axes) for r in ("token_wise", "full"))
    seconds = [e.shares["exchange"] * e.step_time_s for e in (once, again)]
    assert seconds[1] == pytest.approx(1.5 * seconds[0], rel=0.02)
    ring = [run(recompute=r, context_exchange="ring", **axes) for r in ("token_wise", "full")]
    assert ring[0].memory.exchange == ring[1].memory.exchange == 0
    assert once.memory.exchange > again.memory.exchange > 0
