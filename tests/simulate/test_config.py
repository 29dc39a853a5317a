"""The configuration file: what it makes, and that a wrong value names the nearest right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configurations import SMALL, load

from steelyard.cost.profiles import load_profile
from steelyard.errors import UsageError
from steelyard.simulate.answer import not_modelled
from steelyard.simulate.config import shape_from_file
from steelyard.simulate.documents import uniform_documents
from steelyard.simulate.step import simulate_step


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


@pytest.mark.parametrize("stage", [1, 2])
def test_policies_that_cut_documents_cut_them_at_any_number_of_stages(stage: int, tmp_path: Path) -> None:
    """Two documents of 131,072 tokens: 65,536 are held at one stage, 32,768 at two, and packed chunks have 16,384."""
    text = SMALL.replace("median = 1000", "lengths = [131072]").replace("tensor = 4", f"tensor = 4\nstage = {stage}")
    text = text.replace("[run]", "[run]\nmicro_batches = 8")
    kept = {}
    for policy in ("packed", "per_document_cp", "wlb"):
        config = load(text.replace("[run]", f'[run]\npolicy = "{policy}"'), tmp_path)
        scenario = config.scenario()
        kept[policy] = simulate_step(scenario, config.stream(scenario), batches=1).pairs_kept
    assert kept["packed"] == kept["per_document_cp"] == pytest.approx(1 / 8, rel=1e-3)
    assert kept["wlb"] == 1
    balanced = load(text, tmp_path)
    refused = r"131072 tokens, more than the \d+ that .* or documents.cut_at_chunks=true, which cuts it"
    with pytest.raises(UsageError, match=refused):
        balanced.stream(balanced.scenario())
    with pytest.raises(UsageError, match=refused):  # the documents of a packed run, as `--policy all` compares them
        simulate_step(balanced.scenario(), config.stream(scenario), batches=1)
    cut = load(text + "cut_at_chunks = true\n", tmp_path)
    assert simulate_step(cut.scenario(), cut.stream(cut.scenario()), batches=1).pairs_kept == kept["packed"]


def test_documents_of_a_distribution_are_cut_where_the_file_says(tmp_path: Path) -> None:
    text = SMALL.replace("tensor = 4", "tensor = 4\nstage = 4").replace("sigma = 1.5", "sigma = 3\nlongest = 65536")
    packed = load(text.replace("[run]", '[run]\npolicy = "packed"\nmicro_batches = 4'), tmp_path)
    assert packed.stream(packed.scenario()).lengths.max() == 65536  # a chunk has 16,384, and packing cuts there
