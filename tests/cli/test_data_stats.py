from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.progress import Progress

from steelyard.cli import data_stats
from steelyard.cli.data_stats import BAR_WIDTH, scan_progress, text_bar
from steelyard.cli.main import main
from steelyard.data.lengths import ScanProgress


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, length in enumerate([10, 100, 100, 1000, 5000]):
        (folder / f"{number}.txt").write_text("a" * (length - 1))
    (folder / "empty.txt").write_text("")
    (folder / "broken.txt").write_bytes(b"\xff\xfe\xfa\xfa")
    return folder


def test_json_has_the_figures_and_nothing_else_on_stdout(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["data", "stats", str(documents), "--chunk-tokens", "512", "--ranks", "2", "4", "--json", "--out", str(out)]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["documents"], result["tokens"], result["length"]["max"]) == (5, 6210, 5000)
    assert [i["ranks"] for i in result["imbalance"]] == [2, 4]
    assert all(1 < i["work_max_over_mean"] <= i["ranks"] for i in result["imbalance"])
    assert result["skipped"] == {"empty": 1, "encoding": 1}
    assert sorted(map(Path, result["written"])) == [out / "data-stats.json", out / "data-stats.png"]
    assert (out / "data-stats.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "data-stats.json").read_text())["tokens"] == 6210


def test_tables_fit_80_columns_and_name_what_was_left_out(
    documents: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "stats", str(documents), "--max-documents", "99"]) == 0
    out = capsys.readouterr().out
    assert "5 documents in 7 files" in out
    rows = [line for line in out.splitlines() if "█" in line]
    assert rows
    assert all(len(line) <= 80 for line in rows)
    assert "4,096 … 8,191" in out
    assert "80.5%" in out  # 5000 of 6210 tokens
    assert "left out 1 encoding" in out
    assert "broken.txt" in out
    assert "[/]" not in out


def test_a_scan_that_was_cut_short_says_so(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", str(documents), "--max-documents", "2"]) == 0
    assert "there are more documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{}s"], "no file or folder {}s (did you mean {}?)"),
        (["{}", "--plot", "x.gif"], "--plot x.gif: expected a file that ends in .png, .svg or .pdf"),
        (["{}", "--plot", "{}/none/x.png"], "--plot {}/none/x.png: there is no folder {}/none"),
        (["{}", "--chunk-tokens", "0"], "data: chunk_tokens=0, expected at least 1"),
        (["{}", "--max-documents", "0"], "data stats: max_documents=0, expected at least 1"),
    ],
)
def test_wrong_usage(documents: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", *(a.replace("{}", str(documents)) for a in argv)]) == 2
    assert capsys.readouterr().err == f"steelyard: error: {message.replace('{}', str(documents))}\n"


def test_bars() -> None:
    assert text_bar(0) == ""
    assert text_bar(1) == text_bar(7) == "█" * BAR_WIDTH
    assert text_bar(1 / BAR_WIDTH / 2) == "▌"
    assert text_bar(0.5, plain=True) == "#" * (BAR_WIDTH // 2)


def test_progress_is_shown_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    shown: list[Progress] = []

    class Recorded(Progress):
        def __enter__(self) -> Recorded:
            shown.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            shown.append(self)

    monkeypatch.setattr(data_stats, "Progress", Recorded)
    with scan_progress(quiet_s=2.0, clock=lambda: now_s) as progress:
        progress(ScanProgress(1, 1000, 4000))
        assert not shown
        now_s = 2.5
        progress(ScanProgress(3, 3000, 4000))
        assert len(shown) == 1
        assert shown[0].tasks[0].percentage == 75
    assert len(shown) == 2
