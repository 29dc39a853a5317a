"""Advice: the list is sorted, its numbers agree with each other, and what would help beside the search is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import SMALL, load

from steelyard.cost.profiles import load_profile, profile_toml
from steelyard.errors import UsageError
from steelyard.simulate.advise import Advice, advise, as_json, describe
from steelyard.simulate.search import place_of
from steelyard.simulate.step import simulate_step
from steelyard.simulate.sweep import outcome_from

WIDE_HEAD = """
[model]
name = "qwen3-0.6b"
[cluster]
device = "H100"
devices = 1
[documents]
median = 4096
sigma = 1.5
longest = 65536
[sampling]
batches = 2
"""


def check_numbers(advice: Advice) -> None:
    """What the command prints agrees with itself."""
    values = as_json(advice)
    assert values["tried"] == len(advice.outcomes)
    assert values["fit"] == sum(not o.refused for o in advice.outcomes)
    refused_when_tried = values["tried"] - values["fit"]
    refused = sum(r["configurations"] for r in values["refused"])
    assert refused >= refused_when_tried
    untried = values["untried"] + values["slower"] + refused - refused_when_tried
    assert values["configurations"] == values["tried"] + untried


def test_advice_is_sorted_and_refusals_are_counted(tmp_path: Path) -> None:
    config = load(SMALL.replace("nodes = 2", "nodes = 1"), tmp_path)
    advice = advise(config, tokens_per_step=131072, limit=60, processes=1)
    speeds = [e.tokens_per_s_per_device for e in advice.best if e.pairs_kept >= 0.95 and e.memory.verdict == "fits"]
    assert speeds == sorted(speeds, reverse=True)
    assert all(e.memory.verdict != "does not fit" for e in advice.best)
    assert all(e.scenario.degrees.devices == 8 and e.tokens == 131072 for e in advice.best)
    first = advice.outcomes[: len(advice.best)]
    assert [o.tokens_per_s_per_device for o in first] == [e.tokens_per_s_per_device for e in advice.best]
    assert [bool(o.refused) for o in advice.outcomes] == sorted(bool(o.refused) for o in advice.outcomes)
    values = as_json(advice)
    assert values["tried"] == len(advice.outcomes) <= 60
    assert sum(r["configurations"] for r in values["refused"]) == sum(advice.refusals.values())
    assert describe(advice.best[0].scenario) == values["best"][0]["configuration"]
    with pytest.raises(UsageError, match="a document has 9000 tokens, more than tokens_per_step=8192; nearest: 9000"):
        advise(load(SMALL.replace("median = 1000", "length = 9000"), tmp_path), tokens_per_step=8192)


def test_advice_keeps_what_the_file_says(tmp_path: Path) -> None:
    text = SMALL.replace("tensor = 4", "tensor = 4\nsequence_parallel = false\ngradient_overlap = false")
    text = text.replace("[run]", "[run]\nskip_optimizer = true\nkeep_received = false\nhidden_gather = 0.5")
    advice = advise(load(text, tmp_path), tokens_per_step=131072, limit=8, processes=1)
    for outcome in advice.outcomes:
        s = outcome.scenario
        assert not (s.sequence_parallel or s.gradient_overlap or s.keep_received)
        assert s.skip_optimizer
        assert s.hidden_gather == 0.5
    assert advice.kernel == "fa2"
    with pytest.raises(UsageError, match=r"does not take cluster\.slow_ranks; leave it out"):
        advise(load(SMALL.replace("nodes = 2", "nodes = 2\nslow_ranks = [1]"), tmp_path), tokens_per_step=131072)


def test_a_limit_is_told_and_takes_what_promises_most(tmp_path: Path) -> None:
    config = load(SMALL, tmp_path)
    everything = advise(config, tokens_per_step=131072, limit=10_000, processes=1)
    few = advise(config, tokens_per_step=131072, limit=12, processes=1)
    assert len(few.outcomes) == 12
    assert few.untried > 0
    assert few.configurations == everything.configurations
    assert everything.untried == 0
    assert everything.slower > 0
    best, found = everything.best[0], few.best[0]
    assert found.tokens_per_s_per_device >= 0.97 * best.tokens_per_s_per_device
    for advice in (everything, few):
        check_numbers(advice)


def test_what_no_longer_fits_over_all_batches_gives_its_place_to_the_next(tmp_path: Path) -> None:
    """Packing by work gives some rank more tokens in a later batch: memory that just holds the first two does not."""
    h200, path = load_profile("H200"), tmp_path / "d.toml"
    exact = h200.replace(fragmentation_high=h200.fragmentation_low)  # nothing fits tightly
    path.write_text(profile_toml(exact))
    text = SMALL.replace("H200", str(path)).replace("nodes = 2", "nodes = 1") + "[sampling]\nbatches = 6\n"
    first = advise(load(text, tmp_path), tokens_per_step=131072, processes=1)
    over_two = [simulate_step(e.scenario, first.documents, batches=2).memory.low for e in first.best]
    grown = next(i for i, e in enumerate(first.best) if e.memory.low > 1.002 * over_two[i])
    memory = (first.best[grown].memory.low + over_two[grown]) / 2
    path.write_text(profile_toml(exact.replace(memory_bytes=memory)))
    advice = advise(load(text, tmp_path), tokens_per_step=131072, processes=1)
    refused = [o.scenario for o in advice.outcomes[len(advice.best) :] if o.refused and o.step_time_s]
    late = [s for s in refused if simulate_step(s, advice.documents, batches=2).memory.verdict != "does not fit"]
    assert late
    assert len(advice.best) + len(late) >= 8
    assert all(e.memory.verdict != "does not fit" for e in advice.best)
    places = [place_of(outcome_from(e)) for e in advice.best]
    assert places == sorted(places)
    check_numbers(advice)


def test_a_loss_in_chunks_is_offered_where_logits_fill_the_memory(tmp_path: Path) -> None:
    config = load(WIDE_HEAD, tmp_path)
    advice = advise(config, tokens_per_step=65536, processes=1)
    assert advice.best == advice.outcomes == []
    assert advice.refusals["does not fit in memory"] > 0
    [offer] = advice.next
    assert offer.change.startswith("run.chunked_loss = true: ")
    assert offer.verdict == "fits"
    assert "the logits take 87 GiB less: then it fits" in offer.reason  # 65,536 × 151,936 × 10 bytes × 15/16
    check_numbers(advice)
    kept = advise(load(WIDE_HEAD + "[run]\nchunked_loss = true\n", tmp_path), tokens_per_step=65536, processes=1)
    assert kept.next == []
    assert kept.best[0].step_time_s == offer.step_time_s
    assert describe(kept.best[0].scenario) in offer.change


def test_a_loss_in_chunks_is_not_offered_where_it_makes_nothing_better(tmp_path: Path) -> None:
    config = load(WIDE_HEAD.replace("65536", "2048").replace("median = 4096", "median = 500"), tmp_path)
    advice = advise(config, tokens_per_step=65536, processes=1)
    assert advice.best
    assert advice.next == []
    assert as_json(advice)["next"] == []
