"""Where the model and the documents of a check come from, as the user names them. Without torch: mistakes are found
before any process is started."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from steelyard.check.families import FAMILIES
from steelyard.check.request import ModelSource
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.stream import ChunkStream
from steelyard.data.tokenizers import load_tokenizer
from steelyard.errors import UsageError
from steelyard.settings import nearest, nearest_sibling

DECODER = "decoder"
BUILT_IN = (DECODER, *FAMILIES)
DOCUMENT_TOKENS = 128
_CHUNK_DOCUMENTS = 64


def model_source(model: str | None, module: str | None, layers: int | None, search_path: str) -> ModelSource:
    """The model that `MODEL` or `--module` names.

    Raises:
        UsageError: both are given, or there is no such thing.
    """
    if module is not None:
        if model is not None:
            raise UsageError(f"{model} and --module {module} are two models; give one of them")
        if layers is not None:
            raise UsageError("--layers: a function builds its model itself; let it build fewer layers")
        where, _ = module_place(module)
        package = where.split(".")[0]
        is_known = where.endswith(".py") or PathFinder.find_spec(package, [search_path]) is not None
        if not is_known and importlib.util.find_spec(package) is None:
            raise UsageError(f"--module {module}: there is no module {package}, in the working directory or installed")
        return ModelSource("module", module)
    if model is None or model == DECODER:
        if layers is not None:
            raise UsageError("--layers: only for Transformers models; the built-in decoder has 2")
        return ModelSource()
    if model in FAMILIES:
        _need_transformers(f"the built-in {model}")
        return ModelSource("family", model, layers)
    path = Path(model).expanduser()
    if not path.exists():
        close = nearest(model, BUILT_IN)
        hint = f" (did you mean the built-in {close}?)" if close else nearest_sibling(path)
        raise UsageError(
            f"no model folder {model}{hint}; expected the folder of a Transformers model (nothing is downloaded) or "
            f"one of {', '.join(BUILT_IN)}"
        )
    _config(path)
    _need_transformers(f"the model {model}")
    return ModelSource("folder", str(path), layers)


def module_place(name: str) -> tuple[str, str]:
    """(module or file, function) of `pkg.mod:build` or `path/to/file.py:build`.

    Raises:
        UsageError: not of that form, or there is no such file.
    """
    where, separator, function = name.rpartition(":")
    if not separator or not where or not function.isidentifier():
        raise UsageError(
            f"--module {name}: expected pkg.mod:build or path/to/file.py:build, a function that builds the model"
        )
    if where.endswith(".py"):
        path = Path(where).expanduser()
        if not path.is_file():
            raise UsageError(f"--module {name}: there is no file {where}{nearest_sibling(path)}")
        return where, function
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(f"--module {name}: {where!r} is no module; expected pkg.mod:build or path/to/file.py:build")
    return where, function


def has_weights(folder: Path) -> bool:
    """Whether a Transformers folder holds weights, or only says what the model is."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def read_documents(
    data: SourceConfig, source: ModelSource, *, tokenizer: str | None, documents: int, max_tokens: int | None
) -> tuple[tuple[int, ...], ...]:
    """The first documents of the user's data in the order of training, each cut to `max_tokens`.

    Args:
        tokenizer: as for training; None: that of the model's folder if it has one, else bytes.
        documents: how many; there may be fewer.
        max_tokens: None: 128, or the model's context if that is shorter.

    Raises:
        UsageError: a number that cannot be right, data that cannot be found, a tokenizer that does not fit the model.
        DataError: data that cannot be read.
    """
    for name, value in (("--documents", documents), ("--max-doc-tokens", max_tokens)):
        if value is not None and value < 2:
            raise UsageError(f"{name} {value}: expected at least 2")
    config = _config(Path(source.name)) if source.kind == "folder" else {}
    context = config.get("max_position_embeddings")
    if max_tokens is None:
        max_tokens = min(DOCUMENT_TOKENS, context) if isinstance(context, int) else DOCUMENT_TOKENS
    elif isinstance(context, int) and max_tokens > context:
        raise UsageError(
            f"--max-doc-tokens {max_tokens}: longer than the context of {source.name}, {context} tokens "
            "(max_position_embeddings)"
        )
    if tokenizer is None:
        own = source.kind == "folder" and (Path(source.name) / "tokenizer.json").is_file()
        tokenizer = source.name if own else "bytes"
    loaded = load_tokenizer(tokenizer)
    vocab_size = config.get("vocab_size")
    if isinstance(vocab_size, int) and loaded.vocab_size > vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer} has {loaded.vocab_size} token ids, {source.name} only knows {vocab_size}; give "
            "the model's own --tokenizer"
        )
    stream_config = DataConfig(
        sources=(data,), tokenizer=tokenizer, epochs=1, chunk_tokens=_CHUNK_DOCUMENTS * max_tokens,
        append_eos=loaded.eos_id is not None,
    )  # fmt: skip
    stream = ChunkStream(stream_config, tokenizer=loaded)
    found: list[tuple[int, ...]] = []
    while len(found) < documents and not stream.exhausted:
        [chunk] = stream.next_chunks()
        begin = 0
        for length, start in zip(chunk.doc_lengths.tolist(), chunk.doc_start.tolist(), strict=True):
            if start == 0 and length > 1:  # a document's later parts are left out, and what has no label
                found.append(tuple(chunk.tokens[begin : begin + min(length, max_tokens)].tolist()))
            begin += length
    return tuple(found[:documents])


def _config(folder: Path) -> Mapping[str, Any]:
    """config.json of a Transformers folder.

    Raises:
        UsageError: there is none, or it is no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        what = "holds no config.json" if folder.is_dir() else "is a file"
        raise UsageError(f"model {folder} {what}; expected the folder of a Transformers model")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not a JSON file in UTF-8 ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file}: holds {type(values).__name__}, expected a JSON object")
    inner = values.get("text_config")
    return {**inner, **values} if isinstance(inner, dict) else values


def _need_transformers(what: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f'{what} needs the transformers package: pip install "steelyard[hf]"')
