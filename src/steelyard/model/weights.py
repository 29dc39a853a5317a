"""Load and export Transformers folders: `config.json` and safetensors, in one file or several with an index.

Both directions go tensor by tensor through one table of names, so that nothing is renamed, transposed or fused
silently: what the folder lacks, has too much of, or has in another shape is an error that names the tensor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig
from steelyard.model.transformer import Decoder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_FILE_BYTES = 5 * 10**9
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

_BLOCK_NAMES = {
    "before_attention.norm.weight": "input_layernorm.weight",
    "before_attention.query.weight": "self_attn.q_proj.weight",
    "before_attention.query.bias": "self_attn.q_proj.bias",
    "before_attention.key.weight": "self_attn.k_proj.weight",
    "before_attention.key.bias": "self_attn.k_proj.bias",
    "before_attention.value.weight": "self_attn.v_proj.weight",
    "before_attention.value.bias": "self_attn.v_proj.bias",
    "before_attention.query_norm.weight": "self_attn.q_norm.weight",
    "before_attention.key_norm.weight": "self_attn.k_norm.weight",
    "after_attention.output.weight": "self_attn.o_proj.weight",
    "after_attention.norm.weight": "post_attention_layernorm.weight",
    "after_attention.gate.weight": "mlp.gate_proj.weight",
    "after_attention.up.weight": "mlp.up_proj.weight",
    "after_attention.down.weight": "mlp.down_proj.weight",
}
_OUTER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """Our parameter's name in a Transformers folder: `blocks.3.after_attention.up.weight` →
    `model.layers.3.mlp.up_proj.weight`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[rest]}"


def read_config(folder: str | Path) -> ModelConfig:
    """`config.json` of a Transformers folder.

    Raises:
        UsageError: it is missing, is not JSON, or describes a model that is not supported.
    """
    return ModelConfig.from_hf(_read_json_object(Path(folder) / "config.json"))


def load_hf(
    folder: str | Path, dtype: torch.dtype = torch.float32, *, checkpoint_token_wise: bool = False
) -> tuple[ModelConfig, Decoder]:
    """A decoder on CPU with the folder's weights, converted to `dtype`.

    Raises:
        UsageError: `config.json` is not supported; a tensor is missing, unexpected, not floating point or has another
            shape; or a file is missing or damaged.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config, checkpoint_token_wise=checkpoint_token_wise)
    state = read_state(folder, config, dtype, model)
    for name, tensor in state.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    if config.tied_head:
        model.head.weight = model.embedding.weight
    return config, model


def read_state(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, model: Decoder | None = None
) -> dict[str, Tensor]:
    """The folder's tensors by the decoder's own parameter names (a tied head once, as `embedding.weight`).

    Raises:
        UsageError: as `load_hf`.
    """
    folder = Path(folder)
    if model is None:
        with torch.device("meta"):
            model = Decoder(config)
    ours_by_hf = {hf_name(name): (name, parameter.shape) for name, parameter in model.named_parameters()}
    files = _tensor_files(folder)
    _check_names(folder, set(ours_by_hf), set(files), tied=config.tied_head)
    state: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        for name, tensor in _read_tensors(path, [n for n, p in files.items() if p == path and n in ours_by_hf]):
            ours, expected = ours_by_hf[name]
            if tensor.shape != expected:
                raise UsageError(
                    f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} from "
                    "config.json; the two do not belong together"
                )
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise UsageError(
                    f"{path}: tensor {name} is {tensor.dtype}, expected float32, float16 or bfloat16; "
                    "quantised weights are not supported"
                )
            state[ours] = tensor.to(dtype, memory_format=torch.contiguous_format)
    if config.tied_head and "lm_head.weight" in files:
        _check_tied(files["lm_head.weight"], state["embedding.weight"])
    return state


def export_hf(
    model: Decoder,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    extra: Mapping[str, object] | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> Path:
    """Write a folder that `transformers` (and `load_hf`) loads. See `export_state`, which takes a gathered state."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return export_state(
        state, config, folder, dtype=dtype, model_type=model_type, extra=extra, max_file_bytes=max_file_bytes
    )


def export_state(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    extra: Mapping[str, object] | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> Path:
    """Write whole (unsharded) tensors, by the decoder's parameter names, as a Transformers folder.

    The folder appears at once, complete, or not at all: everything is written beside it, flushed and renamed. An
    existing folder is replaced only if it holds nothing but an earlier export (no tokenizer, say, is deleted).

    Args:
        dtype: of the stored tensors; unset: as they are.
        model_type: see `ModelConfig.to_hf`.
        extra: further keys for `config.json`, such as `eos_token_id`; they may not contradict the model's shape.
        max_file_bytes: start another file beyond this; several files get an index.

    Returns:
        The folder.

    Raises:
        UsageError: the state is not that of `config`, the target is something else, or `extra` changes a key of ours.
        OSError: the disk refused (the target is then untouched).
    """
    folder = Path(folder)
    tensors = _exportable(state, config, dtype)
    values = _config_values(config, tensors, model_type, extra)
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_json(staging / "config.json", values)
        _write_tensors(staging, tensors, max_file_bytes)
        for path in staging.iterdir():
            _flush(path)
        staging.chmod(0o755)  # mkdtemp's 0700 would hide the export from everybody else
        _swap_in(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def _exportable(state: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype | None) -> dict[str, Tensor]:
    with torch.device("meta"):
        expected = {name: parameter.shape for name, parameter in Decoder(config).named_parameters()}
    given = {name: tensor for name, tensor in state.items() if not (config.tied_head and name == "head.weight")}
    for name in sorted(expected.keys() ^ given.keys()):
        what = "is missing from the state" if name in expected else "is not a parameter of this configuration"
        raise UsageError(f"export: {name} {what}; pass the configuration the model was built from")
    tensors = {}
    for name, shape in expected.items():
        if given[name].shape != shape:
            raise UsageError(
                f"export: {name} has shape {tuple(given[name].shape)}, expected {tuple(shape)}; "
                "gather sharded parameters first, and pass the configuration the model was built from"
            )
        tensors[hf_name(name)] = given[name].to("cpu", dtype or given[name].dtype).contiguous()
    return tensors


def _config_values(
    config: ModelConfig, tensors: Mapping[str, Tensor], model_type: str | None, extra: Mapping[str, object] | None
) -> dict[str, object]:
    values = config.to_hf(model_type)
    values["dtype"] = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    clash = sorted(values.keys() & (extra or {}).keys())
    if clash:
        raise UsageError(f"export: extra sets {clash[0]}, which the model decides; leave it out")
    # Missing token ids would get the family's defaults (1 and 2), which are ordinary tokens of other tokenizers.
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **values, **(extra or {})}


def _check_target(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"export: {folder} is a file; name a folder")
    for path in folder.iterdir():
        if path.name not in ("config.json", INDEX_FILE) and not _WEIGHT_FILE.fullmatch(path.name):
            raise UsageError(
                f"export: {folder} exists and holds {path.name}, which an export would delete; name a new folder"
            )


def _swap_in(staging: Path, folder: Path) -> None:
    """Rename `staging` to `folder`; an earlier folder moves aside first and is deleted last."""
    if not folder.exists():
        staging.rename(folder)
        return
    aside = staging.with_name(f"{staging.name}.replaced")
    folder.rename(aside)
    try:
        staging.rename(folder)
    except BaseException:
        aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], max_file_bytes: int) -> None:
    groups: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > room:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    if len(groups) == 1:
        save_file(groups[0], folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Every tensor's name and the file that holds it."""
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(_names_in(folder / SINGLE_FILE), folder / SINGLE_FILE)
    if not index.is_file():
        raise UsageError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; expected a Transformers folder with "
            "safetensors (convert other formats with save_pretrained)"
        )
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UsageError(f"{index}: expected an object weight_map from tensor names to file names")
    files: dict[str, Path] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if Path(file_name).name != file_name or not path.is_file():
            raise UsageError(f"{index}: names the file {file_name}, which is not in the folder; download it again")
        files |= dict.fromkeys(_names_in(path), path)
    return files


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({error}); download or export it again") from error


def _read_tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as handle:
            for name in names:
                yield name, handle.get_tensor(name)
    except SafetensorError as error:
        raise UsageError(f"{path}: not a readable safetensors file ({error}); download or export it again") from error


def _check_tied(path: Path, embedding_VC: Tensor) -> None:
    """A stored head that differs from the embedding it is said to share would be dropped silently."""
    for name, head_VC in _read_tensors(path, ["lm_head.weight"]):
        if head_VC.shape != embedding_VC.shape or not torch.equal(head_VC.to(embedding_VC.dtype), embedding_VC):
            raise UsageError(
                f"{path}: tensor {name} differs from model.embed_tokens.weight, but config.json says they are tied; "
                "set tie_word_embeddings to false there, or remove the tensor"
            )


def _check_names(folder: Path, expected: set[str], found: set[str], *, tied: bool) -> None:
    missing = sorted(expected - found)
    if missing:
        raise UsageError(
            f"{folder}: tensor {missing[0]} is missing{_and_others(missing)}; config.json asks for it"
            + (" (is tie_word_embeddings missing there?)" if missing == ["lm_head.weight"] else "")
        )
    # A tied head may be stored a second time, and old Llama folders store the rotary frequencies: both are redundant.
    redundant = {name for name in found if name.endswith("rotary_emb.inv_freq")} | (
        {"lm_head.weight"} if tied else set()
    )
    unexpected = sorted(found - expected - redundant)
    if unexpected:
        raise UsageError(
            f"{folder}: tensor {unexpected[0]} is not part of the model in config.json{_and_others(unexpected)}; "
            "the two do not belong together, or the model has a feature that is not supported"
        )


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; expected a Transformers folder with {path.name}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a JSON {type(values).__name__}, expected an object")
    return values


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
