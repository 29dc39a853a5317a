"""Small data sets in every format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

WriteDocuments = Callable[[str, Sequence[str]], Path]


@pytest.fixture
def texts() -> list[str]:
    """120 different documents of 1 … 400 bytes, mostly short."""
    random = np.random.default_rng(7)
    sizes = np.minimum(400, 1 + random.pareto(1.2, 120) * 12).astype(int)
    return [f"{i}:" + "x" * int(n) for i, n in enumerate(sizes)]


@pytest.fixture
def write(tmp_path: Path) -> WriteDocuments:
    """write(kind, texts) → path of a source that holds them: text, jsonl, jsonl.gz, jsonl.zst, parquet or datasets."""

    def write_documents(kind: str, documents: Sequence[str]) -> Path:
        folder = tmp_path / kind.replace(".", "_")
        folder.mkdir()
        if kind == "text":
            for i, text in enumerate(documents):
                (folder / f"part{i % 5}").mkdir(exist_ok=True)
                (folder / f"part{i % 5}" / f"{i:04d}.txt").write_text(text)
        elif kind.startswith("jsonl"):
            for f in range(3):
                lines = "".join(json.dumps({"text": t, "n": f}) + "\n" for t in documents[f::3]).encode()
                if kind == "jsonl.gz":
                    lines = gzip.compress(lines)
                elif kind == "jsonl.zst":
                    zstandard = pytest.importorskip("zstandard")
                    lines = zstandard.ZstdCompressor().compress(lines)
                (folder / f"f{f}.{kind}").write_bytes(lines)
        elif kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            for f in range(2):
                table = pa.table({"n": list(range(len(documents[f::2]))), "text": list(documents[f::2])})
                pq.write_table(table, folder / f"f{f}.parquet", row_group_size=9)
        elif kind == "datasets":
            pa = pytest.importorskip("pyarrow")
            table = pa.table({"text": list(documents)})
            path = str(folder / "data-00000-of-00001.arrow")  # as save_to_disk writes it
            with pa.OSFile(path, "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table, max_chunksize=11)
            (folder / "state.json").write_text("{}")
            (folder / "dataset_info.json").write_text("{}")
        else:
            raise AssertionError(kind)
        return folder

    return write_documents


ALL_KINDS = ("text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "datasets")


@pytest.fixture(params=ALL_KINDS)
def any_source(request: pytest.FixtureRequest, write: WriteDocuments, texts: list[str]) -> Path:
    """The same documents in each format."""
    return write(request.param, texts)
