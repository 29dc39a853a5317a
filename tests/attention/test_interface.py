"""What is refused when a back end is built, and which one "auto" takes."""

from __future__ import annotations

import logging

import pytest
import torch

from steelyard.attention import build_backend
from steelyard.errors import UsageError

SHAPE = {"head_dim": 8, "heads": 4, "kv_heads": 2, "device": "cpu", "dtype": torch.float32}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "cpu", "dropout": 0.1}, "dropout"),
        ({"name": "reference", "dropout": 0.1}, "dropout"),
        ({"name": "auto", "dropout": 0.1}, "dropout"),
        ({"name": "cpu", "dtype": torch.int64}, "dtype"),
        ({"name": "cpu", "dtype": torch.float8_e4m3fn}, "dtype"),
        ({"name": "auto", "device": "cuda"}, "flash"),
        ({"name": "cpu", "device": "cuda"}, "flash"),
        ({"name": "fastest"}, "fastest"),
        ({"heads": 3}, "kv_heads"),
        ({"window": 0}, "window"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_refusals_name_the_argument(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        build_backend(**{"name": "auto", **SHAPE, **options})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "cpu"),
        ({"dtype": torch.bfloat16}, "cpu"),
        ({"dtype": torch.float64}, "reference"),
        ({"window": 4}, "cpu"),
        ({"softcap": 1.0}, "cpu"),
        ({"window": 4, "dtype": torch.float64}, "reference"),
    ],
)
def test_auto_chooses_and_says_so(options: dict[str, object], name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert build_backend(**{**SHAPE, **options}).name == name  # type: ignore[arg-type]
    assert name in caplog.text
