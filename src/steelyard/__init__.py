"""Steelyard: long-context language-model training in which nobody waits.

`steelyard.plan` decides, without torch, which rank computes which part of core attention; `steelyard.Balancer` carries
such plans out in any PyTorch model. Both are imported when first asked for, so that `import steelyard` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.balance.balancer import Balancer as Balancer
    from steelyard.library import plan as plan

__version__ = "0.1.0"
__all__ = ["Balancer", "__version__", "plan"]

_HOMES = {"Balancer": "steelyard.balance", "plan": "steelyard.library"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
