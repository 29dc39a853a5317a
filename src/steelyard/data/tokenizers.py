"""From text to token ids: raw bytes, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from steelyard.data.listing import nearest_existing
from steelyard.data.stable import stable_hash
from steelyard.domain.arrays import IntArray
from steelyard.errors import UsageError

EOS_GUESSES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        name: what the user gave.
        vocab_size: one more than the largest id: the least vocabulary of a model that can read the tokens.
        eos_id, bos_id: end- and begin-of-document tokens, None where there is none.
        fingerprint: equal for tokenizers that encode alike; kept in checkpoints.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> IntArray:
        """Token ids without any special token, int64 (tokens,)."""
        ...

    def decode(self, tokens: IntArray) -> str:
        """Text of token ids, special tokens left out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes 0 … 255, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eos_id: int | None = 256
    bos_id: int | None = None
    fingerprint = "bytes"

    def encode(self, text: str) -> IntArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: IntArray) -> str:
        return bytes(tokens[tokens < 256].astype(np.uint8)).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, or the folder of a Transformers tokenizer that holds one.

    The end-of-document token is `eos_token` if given, else what `tokenizer_config.json` or `special_tokens_map.json`
    beside the file declare, else the only one of the usual names (such as <|endoftext|>) that the vocabulary has.

    Raises:
        UsageError: no such file, no `tokenizers` package, a file that it cannot read, an unknown `eos_token`.
    """

    def __init__(self, path: str, eos_token: str | None = None) -> None:
        file = _tokenizer_file(path)
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError:
            raise UsageError(f'tokenizer {path} needs the tokenizers package: pip install "steelyard[hf]"') from None
        try:
            content = file.read_text(encoding="utf-8")
            self._tokenizer: Any = HuggingFaceTokenizer.from_str(content)
        except Exception as error:  # tokenizers raises bare Exception
            raise UsageError(f"tokenizer {file}: not a readable tokenizer.json: {error}") from error
        # A stored truncation would silently drop the end of long documents, a stored padding would add tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"tokenizer {file}: its vocabulary is empty")
        self.name = path
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = f"{self.vocab_size} tokens {stable_hash(content):016x}"
        if eos_token is not None and eos_token not in vocabulary:
            raise UsageError(f"tokenizer {file}: eos_token={eos_token!r} is not in its vocabulary of {len(vocabulary)}")
        declared = _declared_tokens(file.parent)
        guesses = [t for t in EOS_GUESSES if t in vocabulary]
        eos = eos_token or declared.get("eos_token") or (guesses[0] if len(guesses) == 1 else None)
        self.eos_id: int | None = vocabulary.get(eos) if eos else None
        bos = declared.get("bos_token")
        self.bos_id: int | None = vocabulary.get(bos) if bos else None

    def encode(self, text: str) -> IntArray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, tokens: IntArray) -> str:
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=True))


def load_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer called `name`: "bytes", or the path of a `tokenizer.json` or of its folder.

    Raises:
        UsageError: see `FileTokenizer`.
    """
    if name == "bytes":
        if eos_token is not None:
            raise UsageError(f"tokenizer bytes: eos_token={eos_token!r} cannot be chosen; its end of document is 256")
        return ByteTokenizer()
    return FileTokenizer(name, eos_token)


def _tokenizer_file(path: str) -> Path:
    given = Path(path).expanduser()
    if given.is_file():
        return given
    if given.is_dir():
        if (given / "tokenizer.json").is_file():
            return given / "tokenizer.json"
        held = ", ".join(sorted(p.name for p in given.iterdir())[:6]) or "nothing"
        raise UsageError(
            f"tokenizer {path}: the folder holds no tokenizer.json (it holds {held}); "
            "write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    raise UsageError(
        f"tokenizer {path}: no such file or folder; expected 'bytes' or the path of a tokenizer.json "
        f"(nothing is downloaded); {nearest_existing(given)}"
    )


def _declared_tokens(folder: Path) -> dict[str, str]:
    """eos_token and bos_token that the files beside a tokenizer.json declare."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key in ("eos_token", "bos_token"):
            value = content.get(key) if isinstance(content, dict) else None
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                found.setdefault(key, token)
    return found
