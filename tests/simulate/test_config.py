"""The configuration file: what it makes, and that a wrong value names the nearest right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.cost.profiles import load_profile
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.simulate.advise import advise, as_json, describe
from steelyard.simulate.answer import not_modelled
from steelyard.simulate.config import SimulateConfig, shape_from_file
from steelyard.simulate.documents import uniform_documents
from steelyard.simulate.sites import simulate_sites
from steelyard.simulate.step import simulate_step
from steelyard.simulate.sweep import sweep
from steelyard.simulate.workloads import WorkloadCache

SMALL = """
[cluster]
device = "H200"
nodes = 2
[parallel]
tensor = 4
[run]
chunk_tokens = 16384
[documents]
median = 1000
sigma = 1.5
"""


def load(text: str, tmp_path: Path) -> SimulateConfig:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_toml(SimulateConfig, path)


def test_data_takes_what_the_other_degrees_leave(tmp_path: Path) -> None:
    config = load(SMALL, tmp_path)
    assert config.devices() == 16
    assert str(config.degrees()) == "data 4, tensor 4, context 1, stage 1"
    assert config.scenario().policy == "balanced"
    assert config.scenario(policy="packed").policy == "packed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tensor = 4", "tensor = 3"), "tensor=3 does not divide the 32 heads .* nearest: tensor=2"),
        (("tensor = 4", "tensor = 4\ndata = 3"), "makes 12 devices, the cluster has 16; nearest: data=4"),
        (('"H200"', '"H20"'), "unknown device 'H20'; did you mean 'h200'"),
        (("median = 1000", "length = 200000"), "more than the 65536 .* nearest: chunk_tokens=50000"),
        (("median = 1000", "lengths = [100, 9000]\ncontext_tokens = 8192"), "nearest: context_tokens=9000"),
        (("median = 1000", "length = 500\nlengths = [100, 900]"), "length and lengths are given, expected one of them"),
        (("nodes = 2", "nodes = 2\nslow_ranks = [4]"), "expected ranks 0 … 3"),
        (("median", "medain"), 'unknown key "medain" .* did you mean "median"'),
        (("[cluster]", '[model]\nname = "llama3-9b"\n[cluster]'), "did you mean 'llama3-8b'"),
    ],
)  # fmt: skip
def test_wrong_values_name_the_nearest(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = SMALL.replace(*change)
    assert text != SMALL
    with pytest.raises(UsageError, match=message):
        config = load(text, tmp_path)
        config.stream(config.scenario())


def test_mixed_clusters_and_slow_ranks_become_speeds(tmp_path: Path) -> None:
    text = SMALL.replace("nodes = 2", 'groups = [{device = "H200", nodes = 1}, {device = "A100", nodes = 1}]')
    scenario = load(text, tmp_path).scenario()
    assert scenario.speeds[:2] == (1.0, 1.0)
    a100, h200 = load_profile("A100"), load_profile("H200")
    slower = a100.peak_bf16_flops * a100.gemm_efficiency / (h200.peak_bf16_flops * h200.gemm_efficiency)
    assert scenario.speeds[2] == scenario.speeds[3] == pytest.approx(slower)
    assert 0.2 < slower < 0.5
    assert scenario.profile.memory_bytes == a100.memory_bytes  # what fits must fit everywhere
    assert scenario.profile.peak_bf16_flops == h200.peak_bf16_flops
    assert any("memory of the smallest" in left for left in not_modelled(scenario, uniform_documents(100)))
    slow = load(SMALL.replace("nodes = 2", "nodes = 2\nslow_ranks = [1]"), tmp_path).scenario()
    assert slow.speeds == (1.0, 1 / 1.5, 1.0, 1.0)


def test_shapes_from_transformers_files(tmp_path: Path) -> None:
    values = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = shape_from_file(tmp_path)
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_size) == (2, 64, 2, 16)
    with pytest.raises(UsageError, match="there is no file"):
        shape_from_file(tmp_path / "none.json")


def test_a_folder_of_documents_is_read_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, size in enumerate((99, 9, 499)):
        (folder / f"{number}.txt").write_text("x" * size)
    documents = load(SMALL.replace("median = 1000", f'file = "{folder}"'), tmp_path).documents.documents(65536)
    assert sorted(documents.lengths.tolist()) == [10, 100, 500]  # with the end-of-document token
    cut = load(SMALL.replace("median = 1000", f'file = "{folder}"\nlongest = 64'), tmp_path).documents.documents(65536)
    assert sorted(cut.lengths.tolist()) == [10, 64, 64]


def test_sites(tmp_path: Path) -> None:
    text = '[sync]\nmode = "diloco"\nperiod = 50\ncompression = "int8"\n'
    text += "".join(f'[[sites]]\nname = "{n}"\nspeed = {s}\nbytes_per_s = 1e10\n' for n, s in (("a", 1.0), ("b", 0.5)))
    config = load(text + SMALL, tmp_path)
    scenario = config.scenario()
    cache = WorkloadCache(config.stream(scenario))
    found = simulate_sites(config, cache, simulate_step(scenario, cache, batches=2))
    assert found["tokens_per_s"] < found["tokens_per_s_without_links"]
    assert found["sites"][0]["busy_share"] == pytest.approx(0.5, abs=0.05)


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


def test_processes_change_nothing(tmp_path: Path) -> None:
    config = load(SMALL, tmp_path)
    scenario, documents = config.scenario(), config.documents.documents(65536)
    many = [scenario.replace(tolerance=0.01 * (1 + i % 3), recompute=r) for i in range(20) for r in ("none", "full")]
    one = sweep(many, documents, batches=1, processes=1)
    two = sweep(many, documents, batches=1, processes=2)
    assert [o.step_time_s for o in one] == [o.step_time_s for o in two]
