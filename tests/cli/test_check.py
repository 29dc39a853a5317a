from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.check import run as check_run
from steelyard.check.report import NAMES
from steelyard.check.request import ModelSource
from steelyard.check.source import read_documents
from steelyard.cli.main import main
from steelyard.data.config import SourceConfig
from steelyard.testing.pool import WorkerPool

USERS = Path(__file__).resolve().parents[1] / "check" / "users_models.py"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


BUILT_IN_NAMES = "decoder, llama, mistral, mixtral, qwen2, qwen3, gemma2, gemma3"


@pytest.fixture
def shared_pool(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command uses the tests' processes instead of starting its own."""

    class Borrowed:
        def __enter__(self) -> WorkerPool:
            return pool

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(check_run, "WorkerPool", lambda ranks, **_: Borrowed())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Transformers folder without weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.mkdir()
    for number, length in enumerate([400, 5, 60, 33, 90, 21]):
        (path / f"{number}.txt").write_text("".join(chr(97 + (number * 7 + i * i) % 26) for i in range(length)))
    return path


def checks(out: str) -> dict[str, dict[str, Any]]:
    result = json.loads(out)
    assert list(result) == ["checks"]
    for check in result["checks"]:
        assert list(check) == ["name", "passed", "max_abs_diff", "tolerance"]
    assert [check["name"] for check in result["checks"]] == list(NAMES)
    return {check["name"]: check for check in result["checks"]}


def test_a_folder_and_documents(
    shared_pool: None, folder: Path, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    argv = ["check", str(folder), "--data", str(texts), "--layers", "1", "--ranks", "1,4"]
    assert main([*argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert all(check["passed"] for check in checks(captured.out).values())
    assert "checking documents one by one (1 of 3)\nchecking on 1 process (2 of 3)\n" in captured.err
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "random weights (the folder holds none)" in out
    assert "6 documents (" in out and "on 1 and 4 CPU processes" in out
    rows = [line for line in out.splitlines() if line.startswith(NAMES)]
    assert len(rows) == 6 and all(" pass " in row and len(row.rstrip()) <= 80 for row in rows)
    assert "all 6 checks passed in " in out


def test_a_fault_fails_with_advice(shared_pool: None, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "--module", f"{USERS}:own_rolled", "--ranks", "2"]
    assert main([*argv, "--json"]) == 1
    found = checks(capsys.readouterr().out)
    assert {name for name, check in found.items() if not check["passed"]} == {"rank_count_invariance", "label_shift"}
    shift = found["label_shift"]
    assert shift["max_abs_diff"] > shift["tolerance"] > 0
    assert main(argv) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "label_shift FAIL" in out and "token_weighted_loss pass" in out
    assert "has label" in out and "labels are shifted once" in out
    assert "2 of 6 checks failed" in out and "float64" not in out, "far too much for rounding"


def test_numbers_that_are_none_become_null(shared_pool: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--module", f"{USERS}:own_broken", "--ranks", "1", "--json"]) == 1
    found = checks(capsys.readouterr().out)
    assert found["rank_count_invariance"]["max_abs_diff"] is None and not found["rank_count_invariance"]["passed"]


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """In processes of its own, with a module of the working directory that prints while it is built."""
    (tmp_path / "leaky_model.py").write_text(
        USERS.read_text(encoding="utf-8")
        + "\n\ndef build(balancer):\n    print('building')\n    return Leaky(balancer)\n"
    )
    command = [sys.executable, "-m", "steelyard", "check", "--module", "leaky_model:build", "--ranks", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(USERS.parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert not checks(done.stdout)["document_isolation"]["passed"]
    assert "building" in done.stderr


def test_documents_are_cut_and_counted(texts: Path) -> None:
    source = SourceConfig(str(texts))
    read = read_documents(source, ModelSource(), tokenizer="bytes", documents=12, max_tokens=50)
    assert sorted(map(len, read)) == [6, 22, 34, 50, 50, 50]  # an end-of-document token is counted
    assert all(doc[-1] == 256 for doc in read if len(doc) < 50)
    assert len(read_documents(source, ModelSource(), tokenizer=None, documents=3, max_tokens=None)) == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{tmp}/modle"], "no model folder {tmp}/modle (did you mean {tmp}/model?); expected the folder of a "
         "Transformers model (nothing is downloaded) or one of " + BUILT_IN_NAMES),
        (["lama"], "no model folder lama (did you mean the built-in llama?); expected the folder of a Transformers "
         "model (nothing is downloaded) or one of " + BUILT_IN_NAMES),
        (["{tmp}/texts"], "model {tmp}/texts holds no config.json; expected the folder of a Transformers model"),
        (["{tmp}/texts/0.txt"], "model {tmp}/texts/0.txt is a file; expected the folder of a Transformers model"),
        (["--module", "models"], "--module models: expected pkg.mod:build or path/to/file.py:build, a function that "
         "builds the model"),
        (["--module", "no-module:build"], "--module no-module:build: 'no-module' is no module; expected pkg.mod:build "
         "or path/to/file.py:build"),
        (["--module", "no_such_package.models:build"], "--module no_such_package.models:build: there is no module "
         "no_such_package, in the working directory or installed"),
        (["--module", "{tmp}/mine.py:build"], "--module {tmp}/mine.py:build: there is no file {tmp}/mine.py"),
        (["llama", "--module", "a:b"], "llama and --module a:b are two models; give one of them"),
        (["--layers", "1"], "--layers: only for Transformers models; the built-in decoder has 2"),
        (["--max-doc-tokens", "9"], "--max-doc-tokens says how to read documents; give them with --data"),
        (["--data", "{tmp}/texts", "--documents", "1"], "--documents 1: expected at least 2"),
        (["{tmp}/model", "--data", "{tmp}/texts", "--max-doc-tokens", "65"], "--max-doc-tokens 65: longer than the "
         "context of {tmp}/model, 64 tokens (max_position_embeddings)"),
        (["--data", "{tmp}/texts", "--ranks", "7"], "the data hold 6 documents of two or more tokens, expected at "
         "least 7 to deal to 7 processes; give more documents or a lower --ranks"),
        (["--ranks", "1,x"], "--ranks 1,x: expected whole numbers, such as 1 2 4 or 1,2,4"),
        (["--ranks", "2", "-1"], None),
        (["--ping-pong"], "--checkpointing, --ping-pong: only for Transformers models; the built-in decoder is none"),
        (["--ranks", "0"], "--ranks 0: expected numbers from 1, such as 1 2 3 4"),
        (["--dtype", "float16"], None),
        (["--data", "{tmp}/textss"], None),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_starts_nothing(
    folder: Path,
    texts: Path,
    tmp_path: Path,
    argv: list[str],
    message: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_run, "run_checks", None)
    assert main(["check", *(a.replace("{tmp}", str(tmp_path)) for a in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    if message is not None:
        assert captured.err == f"steelyard: error: {message.replace('{tmp}', str(tmp_path))}\n"


def test_a_vocabulary_that_is_too_small(folder: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 100}))
    assert main(["check", str(folder), "--data", str(texts)]) == 2
    assert f"the tokenizer bytes has 257 token ids, {folder} only knows 100" in capsys.readouterr().err


def test_a_refused_feature(shared_pool: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "attention_dropout": 0.1}))
    assert main(["check", str(folder), "--ranks", "1"]) == 2
    assert "uses attention dropout (attention_dropout=0.1); build the model with" in capsys.readouterr().err
