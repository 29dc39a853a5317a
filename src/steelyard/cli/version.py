"""`steelyard version`: what to put into a report of a problem."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import steelyard
from steelyard.cli.flags import Switch, parse_flags
from steelyard.cli.output import command_output

PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "pyarrow")


@dataclass(frozen=True)
class VersionFlags:
    json: Switch = False
    """Print one JSON object."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(VersionFlags, argv, prog="steelyard version", description="Versions, without importing them.")
    versions: dict[str, str | None] = {"steelyard": steelyard.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    with command_output(as_json=flags.json) as output:
        for name, version in {**versions, "platform": platform.platform()}.items():
            output.console.print(f"{name:<13} {version or 'not installed'}", markup=False)
        output.result({**versions, "platform": platform.platform()})
    return 0
