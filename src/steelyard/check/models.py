"""The models that can be checked by name, from a folder, or from a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.balance import Balancer
from steelyard.check.families import family_config
from steelyard.check.request import CheckRequest
from steelyard.check.source import has_weights, module_place
from steelyard.data.stable import stable_hash
from steelyard.errors import UsageError, first_line
from steelyard.model.config import ModelConfig
from steelyard.model.transformer import Decoder

_DECODER = ModelConfig(
    vocab_size=97, hidden_size=64, layers=2, heads=4, kv_heads=2, ffn_size=128, max_positions=256, initializer_range=0.1
)


@dataclass(frozen=True)
class Builder:
    """A function that builds a model; `who` names it in errors."""

    who: str
    build: Callable[..., object]
    takes_balancer: bool = False


def builder_of(request: CheckRequest) -> Builder:
    """The function that builds a request's model.

    Raises:
        UsageError: there is none; says why.
    """
    source = request.source
    if source.kind == "decoder":
        return Builder("the built-in decoder", lambda balancer: BalancedDecoder(_DECODER, balancer, request.seed), True)
    if source.kind == "family":
        return Builder(f"the built-in {source.name}", lambda: _random_family(source.name, source.layers))
    if source.kind == "folder":
        return Builder(source.name, lambda: _from_folder(Path(source.name), source.layers, request))
    function = _users_function(source.name, request.search_paths)
    return Builder(f"{source.name}()", function, _takes_balancer(function, source.name))


class BalancedDecoder(nn.Module):
    """Our decoder as a user's model would be: it calls the balancer in every layer."""

    def __init__(self, config: ModelConfig, balancer: Balancer, seed: int) -> None:
        super().__init__()
        self.config, self.balancer = config, balancer
        self.decoder = Decoder(config)
        self.decoder.init_weights(torch.Generator().manual_seed(seed))

    def forward(self, input_ids: Tensor, position_ids: Tensor, doc_lens: list[int]) -> Tensor:
        """logits (T, V) of packed tokens (T); positions restart per document."""

        def attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int) -> Tensor:
            return self.balancer.attention(q_TNH, k_TKH, v_TKH, doc_lens=doc_lens, layer=layer)

        logits: Tensor = self.decoder(input_ids, position_ids, attention)
        return logits


def _transformers(what: str) -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise UsageError(f'{what} needs the transformers package: pip install "steelyard[hf]"') from None
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def _random_family(name: str, layers: int | None) -> object:
    transformers = _transformers(f"the built-in {name}")
    config = family_config(transformers, name)
    _keep_layers(config, layers)
    return transformers.AutoModelForCausalLM.from_config(config)


def _from_folder(folder: Path, layers: int | None, request: CheckRequest) -> object:
    """The folder's model; with random weights if it holds none."""
    transformers = _transformers(f"the model {folder}")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    _keep_layers(config, layers)
    dtype = getattr(torch, request.dtype)
    if not has_weights(folder):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)


def _keep_layers(config: Any, layers: int | None) -> None:
    if layers is None:
        return
    have = getattr(config, "num_hidden_layers", None)
    if have is None or layers > have:
        raise UsageError(f"--layers {layers}: the model has {have} layers (num_hidden_layers)")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:layers]


def _users_function(name: str, search_paths: tuple[str, ...]) -> Callable[..., object]:
    where, function_name = module_place(name)
    try:
        module = (
            _import_file(Path(where).expanduser().resolve()) if where.endswith(".py") else _import(where, search_paths)
        )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--module {name}: {first_line(error)}; modules are looked for in the working directory"
        ) from error
    except Exception as error:
        raise UsageError(
            f"--module {name}: importing it raised {type(error).__name__}: {first_line(error)}; --debug shows where"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "nothing" if function is None else f"a {type(function).__name__}"
        raise UsageError(f"--module {name}: {function_name!r} is {what} in {where}, expected a function")
    found: Callable[..., object] = function
    return found


def _import(name: str, search_paths: tuple[str, ...]) -> ModuleType:
    for path in reversed(search_paths):
        if path not in sys.path:
            sys.path.insert(0, path)
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """A file by its place, under a name of its own, so that `model.py` or `test.py` hides nothing. It can import its
    neighbours."""
    name = f"checked_{path.stem}_{stable_hash(str(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _takes_balancer(function: Callable[..., object], name: str) -> bool:
    """Whether the function has a parameter without a default: it is given the balancer.

    Raises:
        UsageError: it has several.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1 or any(p.name in needed and p.kind not in kinds for p in parameters):
        raise UsageError(
            f"--module {name}: it needs {', '.join(needed)}; expected no parameter (a Transformers model), or one (the "
            "balancer)"
        )
    return bool(needed)
