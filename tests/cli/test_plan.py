from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.main import main
from steelyard.cli.plan import said_if_slow
from steelyard.planner.measure import COMPARED

KEYS = [
    "batch", "plan_ms", "tables_ms", "work_max_over_mean", "bytes_total", "bytes_out_max_over_mean",
    "bytes_in_max_over_mean", "busiest_bytes", "busiest_lower_bound_bytes", "lower_bound_bytes", "pairs_total",
    "received_tokens_max", "buffer_bytes_max", "tasks", "moved_tasks", "tokens_max_over_mean",
    "spanning_lower_bound_bytes", "work_by_rank", "memory_limited",
]  # fmt: skip
WORKLOAD = {
    "tokens_per_rank": 4_000,
    "ranks": 4,
    "batches": [{"docs": [4_000, *[200] * 20, *[1_000] * 8]}, {"docs": [9_000, 3_000, 4_000]}],
}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


def figures(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, list[dict[str, Any]]]:
    assert main(["plan", *argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == [
        "policies", "workload", "documents", "batches", "ranks", "tokens_per_rank", "model", "tolerance", "window",
        "layout", "row_keys", "refused",
    ]  # fmt: skip
    assert result["refused"] == []
    policies: dict[str, list[dict[str, Any]]] = result["policies"]
    return policies


def test_json_has_exactly_the_keys_of_the_contract(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = figures(capsys, str(workload), "--policy", "all")
    assert list(policies) == list(COMPARED)
    for rows in policies.values():
        assert [list(row) for row in rows] == [KEYS, KEYS]
        assert [row["batch"] for row in rows] == [0, 1]
        for row in rows:
            numbers = {k: v for k, v in row.items() if not k.endswith("lower_bound_bytes")}
            assert sum(numbers.pop("work_by_rank")) == row["pairs_total"]
            assert all(isinstance(v, (int, float)) for v in numbers.values())
    whole, spanning = policies["balanced"]
    assert whole["lower_bound_bytes"] <= whole["bytes_total"]
    assert whole["busiest_lower_bound_bytes"] is not None
    assert whole["spanning_lower_bound_bytes"] is None
    assert spanning["lower_bound_bytes"] is None
    assert 0 < spanning["spanning_lower_bound_bytes"] <= spanning["bytes_total"]
    assert spanning["busiest_lower_bound_bytes"] is None


def test_policies_differ_as_they_should(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = figures(capsys, str(workload), "--policy", "all", "--tolerance", "0.02")
    whole = 9_000 * 9_001 // 2 + 3_000 * 3_001 // 2 + 4_000 * 4_001 // 2
    assert policies["balanced"][1]["pairs_total"] == policies["wlb"][1]["pairs_total"] == whole
    assert policies["packed"][1]["pairs_total"] < whole
    assert all(row["work_max_over_mean"] <= 1.02 for row in policies["balanced"])
    assert policies["packed"][0]["work_max_over_mean"] > 1.5
    assert policies["packed"][1]["bytes_total"] == policies["wlb"][1]["bytes_total"] == 0
    assert policies["wlb"][1]["tokens_max_over_mean"] > 2
    assert policies["balanced"][1]["tokens_max_over_mean"] == 1
    assert policies["per_document_cp"][0]["work_max_over_mean"] < 1.01
    assert 0 < policies["balanced"][0]["bytes_total"] < policies["per_document_cp"][0]["bytes_total"]


def test_flags_reach_the_planner(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = figures(capsys, str(workload))["balanced"][0]
    larger = figures(capsys, str(workload), "--model", "llama-34b")["balanced"][0]
    assert larger["bytes_total"] > 1.2 * plain["bytes_total"]
    slow = figures(capsys, str(workload), "--speeds", "1,1,0.5,1")["balanced"][0]
    assert slow["work_max_over_mean"] <= 1.05
    assert slow["bytes_total"] != plain["bytes_total"]
    capped = figures(capsys, str(workload), "--memory-tokens", "9000")["balanced"][1]
    assert capped["received_tokens_max"] <= 9_000
    cp = figures(capsys, str(workload), "--policy", "per_document_cp", "--node-size", "2")
    assert cp["per_document_cp"][0]["work_max_over_mean"] > 1.1
    given = figures(capsys, str(workload), "--layout", "given")["balanced"]
    assert given[0]["bytes_total"] == plain["bytes_total"]  # no document spans ranks
    assert given[1]["bytes_total"] > figures(capsys, str(workload))["balanced"][1]["bytes_total"]
    window = figures(capsys, str(workload), "--window", "64")["balanced"][0]
    assert window["pairs_total"] < plain["pairs_total"] / 10


def test_nodes_reach_the_planner(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = [4_000, *[2_000] * 2, 3_500, 500, *[250] * 16]
    workload.write_text(json.dumps({"tokens_per_rank": 4_000, "ranks": 4, "batches": [{"docs": docs}]}))
    rows = [
        figures(capsys, str(workload), *argv)["balanced"][0]
        for argv in ([], ["--node-size", "2"], ["--node-size", "2", "--node-weight", "1"])
    ]
    assert rows[0]["bytes_total"] == rows[2]["bytes_total"]
    assert rows[0]["bytes_total"] != rows[1]["bytes_total"]


def test_tables_fit_80_columns(
    workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["plan", str(workload), "--policy", "all"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "2 batches, 32 documents, 4 ranks × 4,000 tokens; model llama3-8b, tolerance 0.05" in lines[0]
    assert [line.strip() for line in lines if line.strip() in COMPARED] == list(COMPARED)
    rows = [line for line in lines if line.startswith(("    0", "    1"))]
    assert len(rows) == 2 * len(COMPARED)
    assert all(len(line) <= 80 and "…" not in line for line in rows)
    assert "[/]" not in out


def test_a_memory_cap_that_comes_first_is_said(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"tokens_per_rank": 4_000, "ranks": 2, "batches": [{"docs": [4_000, *[100] * 40]}]}
    workload.write_text(json.dumps(document))
    assert main(["plan", str(workload), "--memory-tokens", "500"]) == 0
    assert "the memory cap came before balance in batch 0" in capsys.readouterr().out


def test_a_memory_cap_that_a_policy_does_not_know_is_said(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(workload), "--policy", "all", "--memory-tokens", "9000"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "per_document_cp: cap not honoured by this policy; exceeded in batch 0, 1" in out
    assert "greedy: cap not honoured by this policy; exceeded in no batch" in out
    assert "wlb: cap not honoured by this policy; exceeded in no batch" in out
    assert not [line for line in out if line.startswith("balanced: cap")]
    assert main(["plan", str(workload), "--policy", "per_document_cp", "--memory-tokens", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert "per_document_cp: cap not honoured by this policy; exceeded in batch 0, 1" in captured.err
    assert list(json.loads(captured.out)["policies"]["per_document_cp"][0]) == KEYS
    assert main(["plan", str(workload), "--policy", "all"]) == 0
    assert "honoured" not in capsys.readouterr().out


def test_a_batch_without_a_plan_leaves_the_other_tables(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(workload), "--policy", "all", "--memory-tokens", "0", "--json"]
    assert main([*arguments, "--plot", str(workload.with_name("plan.png"))]) == 1
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    batches = {policy: [row["batch"] for row in rows] for policy, rows in result["policies"].items()}
    assert batches == {policy: [0] if policy == "balanced" else [0, 1] for policy in COMPARED}
    (refused,) = result["refused"]
    assert (refused["policy"], refused["batch"]) == ("balanced", 1)
    lines = captured.err.splitlines()
    assert "balanced: no plan for batch 1" in lines and not [x for x in lines if x.startswith("balanced: cuts")]
    assert lines[-1] == f"steelyard: error: balanced, batch 1: {refused['reason']}"
    assert "raise --memory-tokens or" in refused["reason"] and "memory_tokens" not in refused["reason"]
    assert workload.with_name("plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_without_any_plan_says_why(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(json.dumps({"tokens_per_rank": 4, "ranks": 2, "batches": [{"docs": [8]}] * 5}))
    assert main(["plan", str(workload), "--memory-tokens", "0"]) == 1
    captured = capsys.readouterr()
    assert "balanced: no plan for batch 0, 1, 2, 3, 4" in captured.out and "tables ms" not in captured.out
    assert captured.err.count("\n") == 1 and re.findall(r"balanced, batch (\d): ", captured.err) == ["0", "1", "2"]


@pytest.mark.parametrize(("scale", "unit"), [(1, "KiB"), (100, "MiB"), (20_000, "GiB"), (0, "GiB")])
def test_bytes_have_a_unit_that_shows_them(
    scale: int, unit: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = [10 * scale, *[scale] * 10]
    workload.write_text(json.dumps({"tokens_per_rank": 10 * scale or 1, "ranks": 2, "batches": [{"docs": docs}]}))
    sent = figures(capsys, str(workload))["balanced"][0]["bytes_total"]
    assert main(["plan", str(workload)]) == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("    0")]
    assert re.search(rf"batch +work +{unit} ", out) and f"{unit}: sent by all ranks" in out
    assert float(row[2]) == pytest.approx(sent / {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit], rel=0.02)


def test_what_is_small_beside_the_rest_is_not_0(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [{"docs": [400_000, *[40_000] * 10]}, {"docs": [100, *[10] * 10]}]
    workload.write_text(json.dumps({"tokens_per_rank": 400_000, "ranks": 2, "batches": batches}))
    assert main(["plan", str(workload)]) == 0
    large, small = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert float(large[2]) > 0.1 and 0 < float(small[2]) < 0.01 and 0 < float(small[4]) < 0.001


def test_an_objective_reaches_the_planner(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = [4_000, *[64] * 62, 32, *[500] * 8, 2_000, *[1_000] * 2]
    workload.write_text(json.dumps({"tokens_per_rank": 4_000, "ranks": 4, "batches": [{"docs": docs}]}))
    pairs = figures(capsys, str(workload))["balanced"][0]
    time = figures(capsys, str(workload), "--objective", "time", "--device", "h200")["balanced"][0]
    assert time["pairs_total"] == pairs["pairs_total"]
    assert time["bytes_total"] != pairs["bytes_total"]
    assert time["lower_bound_bytes"] is time["busiest_lower_bound_bytes"] is time["spanning_lower_bound_bytes"] is None
    assert main(["plan", str(workload), "--policy", "all", "--objective", "time", "--device", "h200"]) == 0
    assert "work is time: a query row costs 186 keys besides" in capsys.readouterr().out
    # All policies are measured in the same unit, that of `balanced`.
    arguments = [str(workload), "--policy", "all", "--objective", "time", "--device", "h200"]
    for rows in figures(capsys, *arguments).values():
        work = rows[0]["work_by_rank"]
        assert sum(work) == rows[0]["pairs_total"] + 186 * sum(docs)
        assert rows[0]["work_max_over_mean"] == pytest.approx(max(work) * 4 / sum(work))
    # One rank sends queries to all others: sent again they stand beside their gradients there.
    docs = [*[1_000] * 4, *[100] * 120]
    workload.write_text(json.dumps({"tokens_per_rank": 4_000, "ranks": 4, "batches": [{"docs": docs}]}))
    kept = figures(capsys, str(workload))["balanced"][0]
    resent = figures(capsys, str(workload), "--memory", "resend", "--passes", "forward")["balanced"][0]
    assert resent["buffer_bytes_max"] > kept["buffer_bytes_max"]


def test_a_weaker_bound_is_marked(
    workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["plan", str(workload)]) == 0
    whole, spanning = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert float(whole[3]) >= 1 and not whole[3].endswith("*")
    assert spanning[3].endswith("*") and float(spanning[3].rstrip("*")) >= 1
    assert spanning[5] == "–"  # of the busiest rank none is known


@pytest.mark.parametrize("argv", [[], ["--policy", "wlb"], ["--policy", "all", "--speeds", "1,1,0,1"]])
def test_plot(workload: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    picture = workload.with_name("plan.png")
    assert main(["plan", str(workload), "--plot", str(picture), *argv]) == 0
    assert "plan.png" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_work_is_no_picture(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(json.dumps({"tokens_per_rank": 10, "ranks": 2, "batches": [{"docs": []}, {"docs": [0]}]}))
    picture = workload.with_name("n.png")
    assert main(["plan", str(workload), "--plot", str(picture)]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("holds no document, so there is no work to draw\n") and captured.out == ""
    assert main(["plan", str(workload)]) == 0
    assert "2 batches, 0 documents, 2 ranks" in capsys.readouterr().out


def test_a_picture_that_fails_comes_after_the_figures(
    workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("steelyard.plots.plans.work_by_policy", full)
    picture = workload.with_name("n.png")
    assert main(["plan", str(workload), "--plot", str(picture), "--json"]) == 1
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["policies"]) == ["balanced"]
    assert f"--plot {picture}: the picture cannot be written ([Errno 28] No space left" in captured.err
    picture.mkdir()
    assert main(["plan", str(workload), "--plot", str(picture)]) == 2
    assert "this is a folder; expected a file" in capsys.readouterr().err


def test_a_rank_of_speed_0_that_has_work_is_said(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(workload), "--policy", "all", "--speeds", "1,1,0,1"]) == 0
    out = capsys.readouterr().out
    assert "packed: ranks of speed 0 have work; it cannot finish" in out
    assert "balanced: ranks of speed 0" not in out


def test_policies_that_cut_documents_are_named(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(workload), "--policy", "all"]) == 0
    out = capsys.readouterr().out
    assert "packed: cuts documents, so that 41.4M of 65.4M pairs are computed: another function" in out
    assert "balanced: cuts" not in out and "steelyard train" not in out


def test_figures_are_never_cropped(
    workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for columns in ("30", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["plan", str(workload), "--policy", "wlb"]) == 0
        rows.append([line.split()[:9] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")])
    assert rows[0] == rows[1] and len(rows[0]) == 2


def test_one_of_each_is_not_many(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(json.dumps({"tokens_per_rank": 9, "ranks": 1, "batches": [{"docs": [5]}]}))
    assert main(["plan", str(workload)]) == 0
    assert ": 1 batch, 1 document, 1 rank × 9 tokens; model" in capsys.readouterr().out


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = threading.Event()
    with said_if_slow("planning", 0.0, lambda line: (print(line), said.set())):
        assert said.wait(30)
    with said_if_slow("planning", 1e6):
        pass
    captured = capsys.readouterr()
    assert captured.out == "planning …\n" and captured.err == ""


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, length in enumerate([2_000, 100, 3_000, 500, 900, 400, 1_200, 700]):
        (folder / f"{number}.txt").write_text("a" * (length - 1))
    return folder


def test_documents_become_batches(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = figures(capsys, str(documents), "--ranks", "4", "--chunk-tokens", "1000")["balanced"]
    assert len(rows) == 2  # 8,800 tokens
    rows = figures(capsys, str(documents), "--ranks", "4", "--chunk-tokens", "1000", "--batches", "1")["balanced"]
    assert len(rows) == 1
    assert rows[0]["tokens_max_over_mean"] == 1


def test_documents_can_be_cut_as_training_cuts_them(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = [str(documents), "--ranks", "4", "--chunk-tokens", "1000", "--batches", "2"]
    policies = figures(capsys, *folder, "--documents", "cut", "--policy", "all")
    for rows in policies.values():
        assert [row["pairs_total"] for row in rows] == [row["pairs_total"] for row in policies["packed"]]
        assert len(rows) == 2
    assert main(["plan", *folder, "--documents", "cut", "--policy", "packed"]) == 0
    assert "cuts documents" not in capsys.readouterr().out
    assert main(["plan", *folder]) == 0
    assert "`steelyard train` cuts documents where chunks end" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--documents", "cut"]])
def test_what_is_left_out_is_said(
    documents: Path, more: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (documents / "empty.txt").touch()
    (documents / "small.jsonl").write_text('{"text": "a"}')
    for name in ("bad", "worse"):
        (documents / f"{name}.txt").write_bytes(b"\xff" * 50)
    folder = [str(documents), "--ranks", "4", "--chunk-tokens", "1000", "--batches", "2"]
    assert main(["plan", *folder, "--batches", "3" if more else "2", *more]) == 0
    out = capsys.readouterr().out
    assert "files of other kinds, not read: .jsonl (1); --suffixes chooses" in out
    assert re.search(r"left out \d encoding, for example .*bad\.txt.*; .*worse\.txt", out)
    assert not caplog.records  # nor said a second time


def test_documents_that_cannot_be_used_are_a_fault_of_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    assert main(["plan", str(tmp_path), "--ranks", "1", "--field", "body"]) == 1
    assert f"error: data source {tmp_path}: no document could be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["{texts}"],
            "{texts} is no workload file (.json) but documents; say on how many ranks, for example --ranks 8",
        ),
        (["{texts}", "--ranks", "0"], "--ranks 0: expected at least 1"),
        (
            ["{texts}", "--ranks", "64"],
            "{texts}: its documents hold 8,800 tokens, less than one batch of 64 ranks × 8,192 tokens = 524,288; "
            "use fewer ranks, smaller chunks or more documents",
        ),
        (["{file}x"], "no file or folder {file}x (did you mean {file}?)"),
        (
            ["{file}", "--ranks", "4"],
            "--ranks 4: a workload file says all itself; the flag is for folders of documents",
        ),
        (["{file}", "--policy", "greddy"], "--policy greddy: expected one of balanced, packed, wlb, per_document_cp, "
         "head_tail, greedy, reference, all; did you mean greedy?"),
        (["{file}", "--model", "llama3-8"], "no built-in model 'llama3-8'; did you mean 'llama3-8b'? "
         "(or give the path of a Transformers config.json)"),
        (["{file}", "--speeds", "1,fast"], "--speeds: number 2 is 'fast', expected for example 1,1,0.5"),
        (["{file}", "--speeds", "1,1"], "--speeds gives 2 speeds, the workload has 4 ranks; give one each"),
        (["{file}", "--speeds", "1,1,nan,1"],
         "--speeds: number 3 (rank 2) is nan, expected a finite number, at least 0"),
        (["{file}", "--speeds", "0,0,0,0"], "--speeds: all are 0, expected one above 0 at least"),
        (["{texts}", "--tolerance", "-1"],
         "--tolerance -1.0: expected a number from 0 to 131,072 such as 0.05, which is 5 %"),
        (["{texts}", "--node-size", "2", "--node-weight", "1.5"],
         "--node-weight 1.5: expected a number from 0 to 1 such as 0.125"),
        (["{file}", "--node-weight", "0.5"], "--node-weight 0.5 has a meaning with nodes only; add --node-size"),
        (["{file}", "--memory-tokens", "-1"], "--memory-tokens -1: expected at least 0"),
        (["{file}", "--window", "2.5"], "--window '2.5': expected a whole number; see steelyard plan --help"),
        (["{file}", "--device"], "--device has no value; see steelyard plan --help"),
        (["{file}", "--suffixes", ".py", ".md"],
         "--suffixes .py .md: a workload file says all itself; the flag is for folders of documents"),
        (["{file}", "--documents", "cut"],
         "--documents cut: a workload file says all itself; the flag is for folders of documents"),
        (["{file}", "--objective", "time", "--device", "nope"], "unknown device 'nope'; known are a100, h100, h200, "
         "b200, cpu-local, or a profile file *.toml"),
        (["{texts}", "--ranks", "1" + "0" * 12], "--ranks 1000000000000: expected at most 131,072"),
        (["{texts}", "--ranks", "4", "--chunk-tokens", "1" + "0" * 18],
         "--chunk-tokens 1000000000000000000: expected at most 1,073,741,824"),
        (["{file}", "--node-size", "1" + "0" * 18],
         "--node-size 1000000000000000000: expected 1 to 131,072 ranks"),
        (["{texts}", "--window", "1" + "0" * 18],
         "--window 1000000000000000000: expected 1 to 1,073,741,824 keys, or none"),
        (["{file}", "--window", "1" + "0" * 21],
         "--window 1000000000000000000000: expected a whole number of at most 64 bits; see steelyard plan --help"),
        (["{file}", "--objective", "time"], "--objective time needs to know whose time; add --device h100 (or a100, "
         "h100, h200, b200, cpu-local, or a profile from `steelyard calibrate`)"),
        (["{file}", "--device", "h200"],
         "--device h200 has a meaning with --objective time only; add that or leave it out"),
        (["{file}", "--policy", "wlb", "--passes", "forward"],
         "--passes forward: only the policy `balanced` has a use for it, not wlb"),
        (["{file}", "--plot", "x.gif"], "--plot x.gif: expected a file that ends in .png, .svg or .pdf"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(
    workload: Path, documents: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def filled(text: str) -> str:
        return text.replace("{file}", str(workload)).replace("{texts}", str(documents))

    assert main(["plan", *map(filled, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"steelyard: error: {filled(message)}\n"
    assert captured.out == ""


def test_a_broken_workload_names_batch_and_key(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(json.dumps({**WORKLOAD, "batches": [{"docs": [5]}, {"docs": [7, "9"]}]}))
    assert main(["plan", str(workload), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f'steelyard: error: {workload}: batches[1].docs[1] is "9", expected the length')
    assert captured.out == ""


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"ranks": ' + "9" * 5_000,
        '{"tokens_per_rank": 1' + "0" * 21 + ', "ranks": 2, "batches": [{"docs": [5]}]}',
        '{"tokens_per_rank": 1e21, "ranks": 2, "batches": [{"docs": [5]}]}',
        '{"tokens_per_rank": 5, "ranks": 1000000000000, "batches": [{"docs": [5]}]}',
        json.dumps({"tokens_per_rank": 2**30, "ranks": 20, "batches": [{"docs": [2**30 - 1] * 20}]}),
    ],
    ids=["deep", "digits", "tokens", "float", "ranks", "pairs"],
)
def test_absurd_workloads_are_one_line(workload: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(text)
    assert main(["plan", str(workload)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"steelyard: error: {workload}: ")
    assert captured.err.count("\n") == 1 and len(captured.err) < 400 + len(str(workload))
    assert captured.out == ""


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"head_dim": ' + "9" * 5_000, '{"num_attention_heads": 1' + "0" * 21 + ', "head_dim": 4}']
)
def test_absurd_models_are_one_line(
    workload: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    assert main(["plan", str(workload), "--model", str(config)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"steelyard: error: model {config}: ")
    assert captured.err.count("\n") == 1 and len(captured.err) < 300 + len(str(config))


def test_heads_that_do_not_divide(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_attention_heads": 8, "num_key_value_heads": 3, "hidden_size": 64}')
    assert main(["plan", str(workload), "--model", str(config)]) == 2
    assert "num_attention_heads=8 is not a multiple of num_key_value_heads=3" in capsys.readouterr().err
