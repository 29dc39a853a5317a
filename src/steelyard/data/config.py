"""What to read and how to pack it, as the user writes it in a TOML file or in flags."""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass
from typing import Literal, get_args

from steelyard.errors import UsageError

Format = Literal["auto", "text", "jsonl", "parquet", "datasets"]
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents: a file, a folder (walked recursively, in sorted order) or a glob pattern.

    Raises:
        UsageError: a value that cannot be right.
    """

    path: str
    """File, folder or glob pattern (`data/**/*.jsonl.zst`). `~` is expanded."""

    weight: float = 1.0
    """Share of this source in the mix, in tokens, relative to the other sources' weights."""

    format: Format = "auto"
    """`text`: one file is one document; `jsonl`: one line is one record (also `.gz`, `.zst`); `parquet`: one row is one
    document; `datasets`: a folder written by `datasets.Dataset.save_to_disk`; `auto`: by file name; in a folder, the
    format that holds the most bytes."""

    field: str = "text"
    """Field (JSONL) or column (Parquet, datasets) that holds the document's text."""

    suffixes: tuple[str, ...] = ()
    """File-name endings to read, for example `.py .md`; empty: the usual endings of the format; `*`: every file."""

    exclude: tuple[str, ...] = ()
    """Patterns of file names, relative to `path`, to leave aside, for example `test/*`; `*` also matches `/`."""

    encoding: str = "utf-8"
    """Encoding of text files. JSONL is always UTF-8."""

    min_bytes: int = 0
    """Documents of fewer UTF-8 bytes are left out (and counted)."""

    max_bytes: int | None = None
    """Documents of more UTF-8 bytes are left out (and counted); None: no limit."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UsageError("data source: path is empty, expected a file, a folder or a glob pattern")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(f"data source {self.path}: weight={self.weight}, expected a number above 0")
        if self.format not in get_args(Format):
            raise UsageError(
                f"data source {self.path}: format={self.format!r}, expected one of {', '.join(get_args(Format))}"
            )
        if not self.field:
            raise UsageError(f"data source {self.path}: field is empty, expected the name of the text field")
        for name in ("suffixes", "exclude"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"data source {self.path}: {name}={getattr(self, name)!r}, expected a list")
        if self.min_bytes < 0 or (self.max_bytes is not None and self.max_bytes < max(1, self.min_bytes)):
            raise UsageError(
                f"data source {self.path}: min_bytes={self.min_bytes}, max_bytes={self.max_bytes}, "
                "expected 0 <= min_bytes <= max_bytes and max_bytes >= 1"
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise UsageError(
                f"data source {self.path}: encoding={self.encoding!r} is unknown; 'utf-8' and 'latin-1' are common ones"
            ) from None


@dataclass(frozen=True)
class DataConfig:
    """Sources, tokenizer and packing of one stream of chunks.

    The order of documents depends on these values and on the files alone, never on the number of ranks.

    Raises:
        UsageError: a value that cannot be right.
    """

    sources: tuple[SourceConfig, ...]
    """What to read. With several, the next document comes from the source furthest behind its share of tokens."""

    tokenizer: str = "bytes"
    """`bytes` (256 byte values and an end-of-document token), or the path of a `tokenizer.json` or of its folder."""

    eos_token: str | None = None
    """End-of-document token of a Hugging Face tokenizer; None: what its folder declares."""

    append_eos: bool = True
    """Append the end-of-document token to every document."""

    prepend_bos: bool = False
    """Put the tokenizer's begin-of-document token before every document."""

    chunk_tokens: int = 8192
    """Tokens of a chunk: what one rank computes on at a time."""

    batch_chunks: int = 1
    """Chunks of a global step, over all ranks and micro-batches. Each is fed by a lane of its own, so that the order of
    data is the same on any number of ranks."""

    seed: int = 0
    """Seed of the order of documents."""

    shuffle: bool = True
    """Read in an order drawn from the seed, new in each epoch; False: the order of names, lines and rows."""

    epochs: int | None = None
    """Passes over each source; None: without end. A source that has ended leaves the mix; the others go on."""

    documents: Literal["cut", "whole"] = "cut"
    """`cut`: a document is cut where a chunk ends, and the rest begins the next chunk as a document of its own.
    `whole`: a document that does not fit in the room left begins the next chunk, and the chunk stays short."""

    oversize: Literal["split", "refuse"] = "split"
    """With `whole`, a document longer than a chunk is cut as few times as possible (`split`) or treated as an error
    (`refuse`; see `on_error`)."""

    on_error: Literal["stop", "skip"] = "stop"
    """A document that cannot be read: `stop` raises an error that names it; `skip` goes on, warns once a file and
    counts. Empty documents and those outside min_bytes … max_bytes are counted and never stop the run."""

    eval_fraction: float = 0.0
    """Share of documents kept for evaluation, chosen by a hash of their text: a copy of an evaluation document never
    appears in training, whatever file or source it stands in."""

    cache_dir: str | None = None
    """Folder for decompressed copies of compressed JSONL files, kept and shared by all ranks of a machine; None: a
    private temporary folder that is removed at exit."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError('data: no sources; give at least one, for example [[data.sources]] path = "texts/"')
        for name in ("chunk_tokens", "batch_chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"data: {name}={getattr(self, name)}, expected at least 1")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"data: epochs={self.epochs}, expected at least 1, or none for an endless stream")
        for name, expected in (("documents", ("cut", "whole")), ("oversize", ("split", "refuse")),
                               ("on_error", ("stop", "skip"))):  # fmt: skip
            if getattr(self, name) not in expected:
                raise UsageError(f"data: {name}={getattr(self, name)!r}, expected one of {', '.join(expected)}")
        if not 0 <= self.eval_fraction < 1:
            raise UsageError(f"data: eval_fraction={self.eval_fraction}, expected 0 <= eval_fraction < 1")
