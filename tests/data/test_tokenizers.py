from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from steelyard.data.tokenizers import load_tokenizer
from steelyard.errors import UsageError


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "</s>": 1, "<s>": 2, "a": 3, "b": 4, "c": 9}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5, pad_id=0)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode("aé")
    assert tokens.tolist() == [97, 0xC3, 0xA9] and tokens.dtype == np.int64
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.decode(np.array([97, 0xC3, 0xA9, 256])) == "aé"


def test_file_and_folder(tokenizer_folder: Path) -> None:
    for path in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(path))
        # Neither the stored truncation to 2, nor the padding to 5, nor the post-processor's <s> touches the text.
        assert tokenizer.encode("a b c a").tolist() == [3, 4, 9, 3]
        assert tokenizer.encode("").tolist() == [] and tokenizer.encode("").dtype == np.int64
        # One more than the largest id, not the number of entries: the vocabulary has a gap.
        assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (10, 1, 2)
        assert tokenizer.decode(np.array([3, 4])) == "a b"


def test_chosen_eos(tokenizer_folder: Path) -> None:
    assert load_tokenizer(str(tokenizer_folder), eos_token="c").eos_id == 9
    with pytest.raises(UsageError, match="'<end>' is not in its vocabulary of 6"):
        load_tokenizer(str(tokenizer_folder), eos_token="<end>")
    with pytest.raises(UsageError, match="its end of document is 256"):
        load_tokenizer("bytes", eos_token="x")


def test_eos_guessed_only_where_unambiguous(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(tokenizer_folder)).eos_id == 1
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<eos>"] = 5
    (tokenizer_folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tokenizer_folder)).eos_id is None


def test_mistakes(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"expected 'bytes' or the path.*did you mean .*tokenizer"):
        load_tokenizer(str(tmp_path / "tokenzer"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no tokenizer\.json \(it holds nothing\)"):
        load_tokenizer(str(tmp_path / "empty"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UsageError, match=r"not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path / "binary.json"))


def test_missing_package(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r'pip install "steelyard\[hf\]"'):
        load_tokenizer(str(tokenizer_folder))
