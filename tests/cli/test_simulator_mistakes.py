"""Mistakes at the simulator's commands: one line each, with what was given, what was expected and what is nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.cost.profiles import load_profile, profile_toml

CONFIG = """
[model]
name = "llama3-8b"
[cluster]
device = "H200"
nodes = 2
[parallel]
tensor = 4
[run]
chunk_tokens = 8192
[documents]
median = 1000
sigma = 1.5
[sampling]
batches = 1
"""
PROFILE = profile_toml(load_profile("H200"))
MEMORY_RATE = f"[constants.memory_bytes_per_s]\nvalue = {load_profile('H200').memory_bytes_per_s!r}"
FILES = {
    "c.toml": CONFIG,
    "lacks.toml": PROFILE.replace("[constants.node_floor_s]", "[spare.node_floor_s]"),
    "typo.toml": PROFILE.replace("[constants.node_floor_s]", "[constants.node_flor_s]"),
    "no-kernel.toml": PROFILE[: PROFILE.index("[kernels")],
    "negative.toml": PROFILE.replace(MEMORY_RATE, "[constants.memory_bytes_per_s]\nvalue = -1.0"),
    "zero.toml": PROFILE.replace(MEMORY_RATE, "[constants.memory_bytes_per_s]\nvalue = 0.0"),
    "nan.toml": PROFILE.replace(MEMORY_RATE, "[constants.memory_bytes_per_s]\nvalue = nan"),
    "words.toml": PROFILE.replace(MEMORY_RATE, "[constants.memory_bytes_per_s]\nvalue = 'fast'"),
    "broken.toml": "name = ",
    "negative.json": "[100, -2]",
    "none.json": "[]",
    "halves.json": "[1.5]",
    "keys.json": '{"batches": [{"documents": [1]}]}',
    "small.json": '{"batches": [{"docs": [100, 200]}]}',
    "list.json": "[100, 200]",
    "mamba.json": '{"model_type": "mamba"}',
    "a-file": "",
    "deep.json": "[" * 100_000,
    "digits.json": "[100, 12345678901234567890123]",
    "groups.toml": CONFIG.replace("nodes = 2", 'groups = [{device = "H100", nodes = -4}]'),
    "mixed.toml": CONFIG.replace("nodes = 2", 'slow_ranks = [0]\ngroups = [{device = "H100", nodes = 2}]'),
    "slow-site.toml": CONFIG + '[[sites]]\nname = "a"\nspeed = 0.0\n',
    "sites.toml": CONFIG + '[[sites]]\nname = "a"\n',
    "same-sites.toml": CONFIG + 2 * '[[sites]]\nname = "a"\n',
    "kernel-sites.toml": CONFIG + '[[sites]]\nname = "a"\n[[sites]]\nname = "b"\ndevice = "B200"\n',
}
MISTAKES = [
    # degrees
    ("--parallel.tensor 3", "tensor=3 does not divide the 32 heads of llama3-8b; nearest: tensor=2"),
    ("--parallel.tensor 0", "tensor=0, expected 1 or more; nearest: 1"),
    ("--parallel.tensor 16", "more than the 8 devices of a node; nearest: tensor=8"),
    ("--parallel.data 3", "makes 12 devices, the cluster has 16; nearest: data=4"),
    ("--parallel.context 3", "the cluster has 16; nearest: data=2, tensor=4, context=2"),
    ("--parallel.stage 64", "needs 64 layers, llama3-8b has 32; nearest: stage=32"),
    ("--parallel.stage 2 --parallel.virtual-stages 3 --run.policy wlb --run.micro-batches 4", "virtual_stages=2"),
    ("--parallel.stage 2 --parallel.virtual-stages 2", "nearest: virtual_stages=1"),
    ("--parallel.shard-ranks 3", "does not divide the 4 ranks of data × context; nearest: shard_ranks=2"),
    ("--cluster.devices 7", "the cluster has 7; nearest: data=7, tensor=1"),
    ("--cluster.nodes 100000000", "expected at most 262,144; nearest: nodes=32768"),
    ("--cluster.slow-ranks 99", "slow_ranks holds 99, expected ranks 0 … 3"),
    ("--cluster.devices 12 --parallel.tensor 8", "the cluster has 12; nearest: data=3, tensor=4, context=1, stage=1"),
    ("--cluster.devices 48 --parallel.tensor 8 --parallel.stage 36", "needs 36 layers"),
    ("--cluster.devices 36 --parallel.tensor 4 --parallel.stage 32", "nearest: data=1, tensor=4, context=1, stage=9"),
    # devices
    ("--cluster.device H300", "unknown device 'H300'; did you mean 'h200'?"),
    ("--cluster.device nowhere.toml", "device profile nowhere.toml: there is no such file"),
    ("--cluster.device lacks.toml", "constants lacks node_floor_s; add each with value and source"),
    ("--cluster.device typo.toml", "unknown entry constants.node_flor_s; did you mean node_floor_s?"),
    ("--cluster.device no-kernel.toml", "no attention kernel; add a table [kernels.NAME]"),
    ("--cluster.device negative.toml", "constants.memory_bytes_per_s=-1.0, expected a number, more than 0"),
    ("--cluster.device zero.toml", "constants.memory_bytes_per_s=0.0, expected a number, more than 0"),
    ("--cluster.device nan.toml", "constants.memory_bytes_per_s=nan, expected a number, more than 0"),
    ("--cluster.device words.toml", "constants.memory_bytes_per_s='fast', expected a number, more than 0"),
    ("--cluster.device broken.toml", "device profile broken.toml: not valid TOML"),
    ("--run.precision fp8 --cluster.device A100", "has no fp8 matrix units; choose one of bf16"),
    ("--run.kernel fa9", "has no attention kernel 'fa9'; expected fa2"),
    # documents
    ("--documents.length 200000", "more than the 32768 that data × context × chunk_tokens hold"),
    ("--documents.length 200000", "nearest: chunk_tokens=50000"),
    ("--documents.length -5", "length=-5"),
    ("--documents.lengths 0", "lengths holds 0, expected positive numbers"),
    ("--documents.lengths 10 --documents.sampler batches", "needs a file with batches; nearest: sampler='shuffle'"),
    ("--documents.length 200 --documents.context-tokens 100", "nearest: context_tokens=200"),
    ("--documents.file negative.json", "negative.json holds -2, expected positive whole numbers"),
    ("--documents.file none.json", "holds no length"),
    ("--documents.file halves.json", "holds 1.5, expected positive whole numbers"),
    ("--documents.file keys.json", 'nor a workload, {"batches": [{"docs": [lengths]}, …]}'),
    ("--documents.file list.json --documents.sampler batches", "is a list of lengths"),
    ("--documents.file small.json --documents.sampler batches", "the configuration needs 32768 a step"),
    ("--documents.file nowhere.json", "there is no file nowhere.json"),
    ("--documents.file folder", "data source folder: nothing to read: expected text files, found no file at all"),
    ("--documents.file folder --documents.sampler batches", "folder is a folder, sampler='batches' needs batches"),
    ("--documents.median 0", "median=0.0"),
    ("--documents.length 1 --run.chunk-tokens 1000000000", "expected at most 10,000,000; nearest: chunk_tokens="),
    ("--documents.file deep.json", "has lists within lists without end; expected one of lengths"),
    ("--documents.file digits.json", "digits.json holds 12,345,678,901,234,567,890,123, expected fewer than"),
    ("--documents.length 2000000000", "expected fewer than 1,073,741,824"),
    ("--documents.sigma 1e9", "sigma=1000000000.0, longest=32768, expected"),
    # the rest
    ("--sampling.seed -1", "seed=-1, expected 0 or more; nearest: 0"),
    ("--sampling.batches 100000000", "batches=100,000,000, expected at most 10,000"),
    ("--sampling.batches 9000 --run.micro-batches 4", "expected at most 20,000 plans; nearest: batches=5000"),
    ("--run.micro-batches 100000", "nearest: batches=1 and micro_batches=20000"),
    ("--sampling.batches 10000 --documents.length 16", "expected at most 10,000,000 together; nearest: batches=4882"),
    ("--run.exchange-overhead-s -1", "exchange_overhead_s=-1.0, expected 0 … 10 seconds"),
    ("--run.exchange-overhead-s 1e9", "expected 0 … 10 seconds of each dispatch; nearest: 10"),
    ("--run.chunk-tokens 2000000000", "expected 1 … 1,073,741,824"),
    ("--cluster.slow-factor 1e9", "slow_factor=1000000000.0, expected more than 0 and at most 1,000"),
    ("--model.name llama9", "no built-in model 'llama9'; did you mean"),
    ("--model.name nowhere.json", "there is no file nowhere.json"),
    ("--model.name mamba.json", "model_type='mamba' is not supported; expected one of llama"),
    ("--run.chunk-tokens 0", "chunk_tokens=0"),
    ("--run.policy best", "Expected one of ('packed', 'wlb', 'per_document_cp', 'balanced')"),
    ("--run.ping-pong --run.policy packed", "nearest: policy='balanced', or ping_pong=false"),
    ("--run.tolerance -1", "tolerance=-1.0, expected a number from 0"),
    ("--sync.period 0", "sync: period=0, expected at least 1"),
    ("--plot a-file", "it is a file; expected a folder"),
    ("--plot a-file/below", "a-file is a file; expected a folder"),
    ("--paralel.tensor 2", "unknown flag --paralel.tensor; did you mean --parallel.tensor?"),
]  # fmt: skip
OTHER_COMMANDS = [
    ("simulate groups.toml", "a group of nodes=-4 H100, expected 1 … 262,144; nearest: nodes=1"),
    ("simulate slow-site.toml", "speed=0.0 of 'a', expected more than 0"),
    ("simulate same-sites.toml", "two are called 'a'; give each a name of its own"),
    ("simulate kernel-sites.toml --run.kernel fa2", "sites: 'b' with B200: B200 SXM 180 GB has no attention kernel"),
    ("advise mixed.toml", "the search does not take cluster.groups, cluster.slow_ranks; leave it out here"),
    ("advise sites.toml", "the search does not take [[sites]]"),
    ("advise c.toml --parallel.shard-ranks 2", "the search does not take parallel.shard_ranks"),
    ("advise c.toml --documents.context-tokens 100 --documents.length 200", "nearest: context_tokens=200"),
    ("advise c.toml --limit 0", "--limit 0: expected at least 1"),
    ("advise c.toml --processes 0", "--processes 0: expected at least 1"),
    ("advise c.toml --tokens-per-step -7", "--tokens-per-step -7: expected at least 1"),
    ("advise c.toml --tokens-per-step 65536 --documents.length 900000", "nearest: 900000"),
    ("advise c.toml --plot map.doc", "--plot map.doc: expected a file that ends in .png, .svg or .pdf"),
    ("advise c.toml --plot nowhere/map.png", "--plot nowhere/map.png: there is no folder nowhere"),
    ("validate --data folder", "no *.json in it; expected tables of the form validation-table/1"),
    ("validate --plot nowhere/p.png", "there is no folder nowhere"),
    ("calibrate --out nowhere/x.toml", "expected a file that ends in .toml in a folder that exists"),
    ("calibrate --nproc two", "--nproc 'two': expected a whole number"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("call", "message"), [*((f"simulate c.toml {flags}", message) for flags, message in MISTAKES), *OTHER_COMMANDS]
)
def test_a_mistake_is_told_in_one_line(call: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call.split()) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("steelyard: error: ")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.usefixtures("files")
def test_a_file_that_is_no_text_is_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bytes.toml").write_bytes(b"\xff\xfe\x00")
    assert main(["simulate", "c.toml", "--cluster.device", "bytes.toml"]) == 2
    assert "bytes.toml: cannot be read as a TOML file" in capsys.readouterr().err


@pytest.mark.usefixtures("files")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which not even root can make a file")
@pytest.mark.parametrize(
    "call",
    [
        "simulate c.toml --plot /proc/report", "advise c.toml --plot /proc/map.png", "validate --plot /proc/p.png",
        "plan c.toml --plot /proc/p.png", "calibrate --out /proc/x.toml",
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_found_before_computing(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.cli.simulate.simulate_step", None)
    monkeypatch.setattr("steelyard.cli.advise.advise", None)
    monkeypatch.setattr("steelyard.cli.validate.validate", None)
    assert main(call.split()) == 2
    said = capsys.readouterr().err
    assert "no file can be made in /proc" in said
    assert len(said.splitlines()) == 1
