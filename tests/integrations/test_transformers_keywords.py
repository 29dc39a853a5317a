"""Every keyword that a model of the installed Transformers hands to attention is one that was looked at."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import transformers

from steelyard.integrations.transformers import registered


def calls_in(text: str) -> Iterator[ast.Call]:
    """Calls of `attention_interface` in a source, each parsed alone: whole files take ten seconds."""
    for start in re.finditer(r"\battention_interface\(", text):
        end, depth = start.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        call = ast.parse(text[start.start() : end], mode="eval").body
        assert isinstance(call, ast.Call)
        yield call


def test_keywords_of_all_models_are_known() -> None:
    """A new one in a new version must be judged: does it change the result?"""
    named = set(inspect.signature(registered.attention_forward).parameters)
    judged = named | set(registered._NOT_OURS) | registered._NO_MATTER
    found: dict[str, set[str]] = {}
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for call in calls_in(file.read_text()):
            for keyword in call.keywords:
                if keyword.arg is not None:
                    found.setdefault(keyword.arg, set()).add(file.parent.name)
    assert {"scaling", "sliding_window", "s_aux", "position_bias"} <= found.keys(), "the calls are no longer found"
    assert {name: models for name, models in found.items() if name not in judged} == {}
