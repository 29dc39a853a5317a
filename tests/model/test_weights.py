"""Transformers folders in both directions: equal logits, clear refusals, exports that appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard.errors import UsageError
from steelyard.model import weights
from steelyard.model.transformer import Decoder
from steelyard.model.weights import export_hf, export_state, load_hf, read_state

MakeModel = Callable[..., Decoder]
MakeChunk = Callable[..., Any]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 24, "rms_norm_eps": 1e-6},
    "mistral": {"sliding_window": None, "head_dim": 16},
}


def _transformers_model(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = transformers.AutoConfig.for_model(family.split("-")[0], **(sizes | FAMILIES[family]))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0 and norms at 1: move them too
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
    return model


def _assert_equal_logits(theirs: Any, ours: Decoder, chunk: Any) -> None:
    """Theirs one document at a time, ours packed."""
    logits_TV = ours(chunk.tokens, chunk.positions, chunk.attention)
    with torch.no_grad():
        alone = [theirs(input_ids=d.tokens[None]).logits[0] for d in chunk.documents()]
    assert logits_TV.std() > 0.3
    torch.testing.assert_close(logits_TV, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_logits_both_ways(family: str, tmp_path: Path, make_chunk: MakeChunk) -> None:
    theirs = _transformers_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    config, ours = load_hf(tmp_path / "theirs")
    chunk = make_chunk([40, 3, 1, 17])
    with torch.no_grad():
        _assert_equal_logits(theirs, ours, chunk)
        for parameter in ours.parameters():  # a changed model goes back, so that theirs cannot be what is compared
            parameter.mul_(1.1)
        export_hf(ours, config, tmp_path / "ours", model_type=family.split("-")[0], extra={"eos_token_id": 5})
        back = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32)
        assert type(back) is type(theirs) and back.config.eos_token_id == 5 and back.config.bos_token_id is None
        _assert_equal_logits(back, ours, chunk)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"qk_norm": True, "tied_head": True}])
def test_own_models_load_in_transformers_and_here(
    changes: dict[str, object], tmp_path: Path, make_model: MakeModel, make_chunk: MakeChunk
) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model(**changes)
    export_hf(model, model.config, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        _assert_equal_logits(theirs, model, make_chunk([12, 5]))
    config, again = load_hf(tmp_path / "out", checkpoint_token_wise=True)
    assert config.parameter_count == model.config.parameter_count
    for (name, mine), (other_name, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other_name and torch.equal(mine, other) and other.requires_grad
    assert (again.head.weight is again.embedding.weight) == config.tied_head


def test_several_files_with_an_index(tmp_path: Path, make_model: MakeModel, make_chunk: MakeChunk) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model()
    folder = export_hf(model, model.config, tmp_path / "out", max_file_bytes=10_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and all(f.stat().st_size < 12_000 for f in files)
    index = json.loads((folder / weights.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 4 * model.config.parameter_count
    state = read_state(folder, model.config, torch.float32)
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        _assert_equal_logits(theirs, model, make_chunk([12, 5]))
    files[1].unlink()
    with pytest.raises(UsageError, match=f"names the file {files[1].name}, which is not in the folder"):
        load_hf(folder)


def test_dtype_in_and_out(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model()
    export_hf(model, model.config, tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out" / weights.SINGLE_FILE)
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    _, again = load_hf(tmp_path / "out", torch.float32)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert torch.equal(again.head.weight, model.head.weight.bfloat16().float())


@pytest.fixture
def exported(tmp_path: Path, make_model: MakeModel) -> Path:
    model = make_model()
    return export_hf(model, model.config, tmp_path / "out")


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / weights.SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / weights.SINGLE_FILE, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"tensor {UP} is missing; "),
        (lambda t: [t.pop(UP), t.pop("model.norm.weight")], f"tensor {UP} is missing \\(and 1 more\\)"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing.*tie_word_embeddings"),
        (lambda t: t.update(extra=torch.ones(1)), "tensor extra is not part of the model"),
        (lambda t: t.update({UP: torch.ones(48, 31)}), r"has shape \(48, 31\), expected \(48, 32\)"),
        (lambda t: t.update({UP: torch.ones(48, 32, dtype=torch.int8)}), "is torch.int8, expected float32"),
    ],
)
def test_a_wrong_tensor_is_named(
    exported: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    _edit(exported, change)
    with pytest.raises(UsageError, match=message):
        load_hf(exported)


def test_redundant_tensors_are_accepted(exported: Path) -> None:
    _, before = load_hf(exported)
    _edit(exported, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    _, after = load_hf(exported)
    for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_tied_head_stored_twice_must_agree(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model(tied_head=True)
    folder = export_hf(model, model.config, tmp_path / "out")
    _edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_hf(folder)
    _edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.raises(UsageError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_hf(folder)


def test_missing_and_damaged_files_are_named(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/config.json: no such file"):
        load_hf(tmp_path / "nowhere")
    data = (exported / weights.SINGLE_FILE).read_bytes()
    (exported / weights.SINGLE_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        load_hf(exported)
    (exported / weights.SINGLE_FILE).unlink()
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        load_hf(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not readable as JSON"):
        load_hf(exported)


def test_a_failed_export_leaves_what_was_there(
    exported: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    other = make_model(seed=7)
    with monkeypatch.context() as patched:
        patched.setattr(weights, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            export_hf(other, other.config, exported)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    export_hf(other, other.config, exported)
    assert torch.equal(load_hf(exported)[1].head.weight, other.head.weight)
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_an_export_deletes_nobody_elses_files(exported: Path, make_model: MakeModel) -> None:
    model = make_model()
    (exported / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds tokenizer.json, which an export would delete"):
        export_hf(model, model.config, exported)
    with pytest.raises(UsageError, match="is a file"):
        export_hf(model, model.config, exported / "tokenizer.json")


def test_an_export_that_does_not_fit_its_configuration_is_refused(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model()
    state = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"blocks.2.after_attention.down.weight is missing"):
        export_state(state, make_model(layers=3).config, tmp_path / "out")
    with pytest.raises(UsageError, match=r"head.norm.weight has shape \(3,\), expected \(32,\)"):
        export_state(state | {"head.norm.weight": torch.ones(3)}, model.config, tmp_path / "out")
    with pytest.raises(UsageError, match="extra sets vocab_size"):
        export_state(state, model.config, tmp_path / "out", extra={"vocab_size": 5})
    assert not any(tmp_path.iterdir())
