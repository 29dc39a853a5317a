"""Configurations as a user writes them, for the tests of several modules."""

from __future__ import annotations

from pathlib import Path

from steelyard.settings import load_toml
from steelyard.simulate.config import SimulateConfig

SMALL = """
[cluster]
device = "H200"
nodes = 2
[parallel]
tensor = 4
[run]
chunk_tokens = 16384
[documents]
median = 1000
sigma = 1.5
"""


def load(text: str, folder: Path) -> SimulateConfig:
    """What `text` says, read from a file."""
    path = folder / "c.toml"
    path.write_text(text)
    return load_toml(SimulateConfig, path)
