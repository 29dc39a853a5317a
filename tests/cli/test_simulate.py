"""The commands: their JSON contracts, files and errors."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from steelyard.cli.main import main

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
batches = 2
"""
CONTRACT = {
    "step_time_s", "step_time_band_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "memory_gib_by_rank_max",
    "verdict", "dominant", "idle_share", "bubble_share", "exposed_comm_share", "not_modelled",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json", "--debug"]) == 0
    captured = capsys.readouterr()
    [line] = captured.out.splitlines()
    assert captured.err
    values: dict[str, Any] = json.loads(line)
    return values


def test_simulate_prints_its_contract(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = run(capsys, "simulate", config)
    assert set(values) >= CONTRACT
    assert values["verdict"] in ("fits", "tight", "does not fit")
    assert values["step_time_band_s"][0] < values["step_time_s"] < values["step_time_band_s"][1]
    assert len(values["next"]) == 2


def test_flags_replace_the_file_and_all_policies_are_compared(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = run(capsys, "simulate", config, "--run.chunk-tokens", "4096")
    more = run(capsys, "simulate", config, "--policy", "all")
    assert few["tokens_per_step"] == more["tokens_per_step"] / 2
    assert set(more["policies"]) == {"packed", "wlb", "per_document_cp", "balanced"}
    packed = run(capsys, "simulate", config, "--policy", "packed")
    assert packed["step_time_s"] == more["policies"]["packed"]["step_time_s"]


def test_the_report_is_one_file_without_links(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run(capsys, "simulate", config, "--plot", str(tmp_path / "out"), "--policy", "all")
    files = {Path(p).name for p in values["written"]}
    assert files == {"report.html", "split.png", "memory.png", "work.png", "timeline.png", "trace.json.gz"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert len(pictures) == 8  # each for a desk and for a phone
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert f"{values['verdict']}" in page
    trace = json.loads(gzip.decompress((tmp_path / "out" / "trace.json.gz").read_bytes()))
    assert len(trace["traceEvents"]) > 100


SITES = """
[[sites]]
name = "north"
[[sites]]
name = "south [1]"
device = "A100"
bytes_per_s = 1e6
"""


@pytest.mark.parametrize("chunk_tokens", [8192, 65536])
def test_an_answer_for_several_sites_is_true_of_all(
    chunk_tokens: int, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config).write_text(CONFIG.replace("8192", str(chunk_tokens)) + SITES)
    values = run(capsys, "simulate", config, "--plot", str(tmp_path / "out"), "--policy", "all")
    north, south = values["replicas"]["sites"]
    verdict = "fits" if chunk_tokens == 8192 else "does not fit"
    assert values["verdict"] == values["replicas"]["verdict"] == south["verdict"] == verdict
    assert north["verdict"] == "fits"
    assert values["site"] == "south [1]"
    assert "replicas.step_time_s" in values["scope"]
    for key in ("step_time_s", "memory_gib_by_rank_max", "memory_capacity_gib", "device", "kernel"):
        assert values[key] == south[key]
    assert all(p["device"] == south["device"] for p in values["policies"].values())
    assert values["replicas"]["step_time_s"] > 100 * values["step_time_s"]
    assert values["replicas"]["slowest_link"] == "south [1]"
    assert any("sync mode" in line for line in values["not_modelled"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(text in page for text in ("north", "south [1]", "of 79 GiB", "one of 2 replicas"))
    assert main(["simulate", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3-8b (8.0 B parameters) at 2 sites of 16 devices, each: data 4, tensor 4")
    where = "fits at every site; south [1]: " if verdict == "fits" else "does not fit at south [1]: "
    assert lines[1].startswith(where)
    assert "a step of all together under every_step" in lines[2]
    assert "slowest link: south [1]" in lines[2]
    assert any(line.startswith("one replica by itself, at south [1], on 16 × A100") for line in lines)


def test_a_suggestion_is_better_or_there_is_none(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["--cluster.device", "B200", "--cluster.devices", "1", "--parallel.tensor", "1", "--run.chunk-tokens", "16",
             "--model.name", "qwen3-0.6b", "--documents.length", "16", "--run.recompute", "none"]  # fmt: skip
    assert main(["simulate", config, *alone]) == 0
    assert "try next: nothing one change away is known to be better" in capsys.readouterr().out
    assert run(capsys, "simulate", config, *alone)["next"] == []


def test_no_verdict_of_a_comparison_is_cut_off(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["simulate", config, "--policy", "all", "--cluster.devices", "1", "--parallel.tensor", "1"]
    assert main(call) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("packed", "wlb", "per_document_cp", "balanced"))]
    assert len(rows) == 4
    assert all(row.rstrip().endswith("does not fit") for row in rows)


def test_pipelines_have_a_picture_of_their_stages(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = run(
        capsys, "simulate", config, "--policy", "packed", "--parallel.stage", "2", "--run.micro-batches", "4",
        "--plot", str(tmp_path / "out"),
    )  # fmt: skip
    assert values["bubble_share"] > 0
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 10_000


def test_advise(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "map.png"
    values = run(
        capsys, "advise", config, "--tokens-per-step", "131072", "--limit", "10", "--processes", "1",
        "--plot", str(picture),
    )  # fmt: skip
    assert values["tried"] == 10
    assert values["untried"] > 0
    assert values["best"][0]["verdict"] in ("fits", "tight")
    assert values["best"][0]["reason"]
    assert picture.stat().st_size > 10_000


def test_list_picture_and_json_of_advise_say_the_same(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("steelyard.plots.simulation.picture", lambda path, **said: _drawn_on(drawn, said["title"]))
    call = ["advise", config, "--tokens-per-step", "131072", "--limit", "30", "--processes", "1", "--json",
            "--sampling.batches", "3", "--plot", str(tmp_path / "map.png")]  # fmt: skip
    assert main(call) == 0
    said = capsys.readouterr()
    values = json.loads(said.out)
    best, fit, tried = values["best"], values["fit"], values["tried"]
    rates = [b["tokens_per_s_per_device"] for b in best]
    assert drawn[0].startswith(f"{fit} of {tried} tried configurations fit")
    assert drawn[0].endswith(f"the best makes {rates[0]:,.0f} tokens/s per device")
    assert f"{tried} configurations tried; {fit} of them fit\n" in said.err
    assert f"{values['slower']:,} more not tried: by bounds of their memory and time" in said.err
    assert f"1. {rates[0]:,.0f} tokens/s" in said.err
    assert all(b["verdict"] in ("fits", "tight") for b in best)
    refused = {r["reason"]: r["configurations"] for r in values["refused"]}
    assert sum(refused.values()) + fit + values["slower"] + values["untried"] == values["configurations"]
    assert main([*call, "--limit", "12"]) == 0
    said = capsys.readouterr()
    left = json.loads(said.out)["untried"]
    assert f"{left:,} more left out by --limit 12: they promise less" in said.err


def _drawn_on(titles: list[str], title: str) -> contextlib.AbstractContextManager[Figure]:
    titles.append(title)
    return contextlib.nullcontext(Figure())


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="looks up child processes in /proc"
)
def test_ctrl_c_in_a_search_is_quiet_and_leaves_no_worker(config: str) -> None:
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); " \
           "from steelyard.cli.main import main; sys.exit(main())"  # fmt: skip
    search = subprocess.Popen(
        [sys.executable, "-c", code, "advise", config, "--tokens-per-step", "4194304", "--processes", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    workers = f"/proc/{search.pid}/task/{search.pid}/children"
    deadline = time.monotonic() + 60
    while len(Path(workers).read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(workers).read_text().split()
    assert len(children) == 2
    os.killpg(search.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = search.communicate(timeout=60)
    assert (search.returncode, out, err) == (130, "", "steelyard: interrupted\n")
    assert not any(_runs(child) for child in children)


def _runs(process: str) -> bool:
    """Whether it still does: not whether init has taken note of its end."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = {"model": "llama3-8b", "gpu": "H100", "n_gpus": 8, "seq_len": 8192, "micro_batch": 1, "global_batch": 8,
             "fsdp": 8, "step_time_s": 1.0}  # fmt: skip
    table = {"schema": "validation-table/1", "tables": [{"title": "t", "points": [point, {}]}]}
    (tmp_path / "own.json").write_text(json.dumps(table))
    values = run(capsys, "validate", "--data", str(tmp_path), "--plot", str(tmp_path / "p.png"))
    [source] = values["sources"]
    assert source["name"] == "own"
    assert source["role"] == "held_out"
    assert source["points"] == 1
    assert source["excluded"] == [{"reason": "the model's shape is not stated", "points": 1}]
    assert abs(source["worst_pct_error"]) == pytest.approx(source["mean_abs_pct_error"])
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate"], "expected a configuration file: steelyard simulate CONFIG.toml"),
        (["simulate", "{}", "--parallel.tensor", "3"], "nearest: tensor=2"),
        (["simulate", "{}", "--cluster.device", "H300"], "unknown device 'H300'"),
        (["simulate", "{}", "--paralel.tensor", "3"], "did you mean --parallel.tensor?"),
        (["advise", "{}", "--limit", "0"], "expected at least 1"),
        (["validate", "--data", "/nowhere"], "there is no such folder"),
        (["calibrate", "--nproc", "0"], "expected at least 1"),
        (["calibrate", "--out", "x.json"], "expected a file that ends in .toml"),
    ],
)
def test_wrong_usage(argv: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([a.format(config) for a in argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_calibrate_writes_a_profile_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it takes a minute on two quiet cores, so nothing of it is asked for in every run of the tests."""
    values = run(capsys, "calibrate", "--nproc", "2", "--rounds", "1", "--out", str(tmp_path / "mine.toml"))
    assert values["took_s"] < 300
    assert {p.name for p in tmp_path.iterdir()} == {"mine.toml"}
    (tmp_path / "c.toml").write_text(
        '[cluster]\ndevices = 2\n[run]\nprecision = "fp32"\nchunk_tokens = 1024\n[documents]\nlength = 64\n'
    )
    found = run(
        capsys, "simulate", str(tmp_path / "c.toml"), "--model.name", "qwen3-0.6b",
        "--cluster.device", str(tmp_path / "mine.toml"),
    )  # fmt: skip
    assert found["step_time_s"] > 0
    assert all("measured on" in values["sources"][f"kernels.measured.{c}"] for c in ("row_s", "product_s"))


@pytest.mark.parametrize("command", ["simulate", "advise", "validate", "calibrate"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"steelyard {command}" in capsys.readouterr().out
