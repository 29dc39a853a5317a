"""Writes configuration.md beside this file, from the dataclasses that a configuration is read into.

Run it after changing a field, its default or its docstring; `tests/docs/test_configuration.py` fails until it was run.
"""

from __future__ import annotations

from pathlib import Path

from steelyard.settings import config_reference_markdown
from steelyard.train.config import TrainConfig

TARGET = Path(__file__).with_name("configuration.md")
COMMAND = "python docs/generate_configuration.py"

HEAD = f"""\
<!-- Written by `{COMMAND}`; change the dataclasses, not this file. -->

# Configuration

What `steelyard train CONFIG.toml` reads. Every key has a default unless it says **required**; the only thing that a
file must say is where the documents are. A key that does not exist is an error that names the nearest one that does.

Every key is also a flag that replaces the file's value: `steps` is `--steps`, `lr` in `[optimizer]` is
`--optimizer.lr`, `path` of the second source is `--data.sources.1.path`, `true` and `false` are `--log.tensorboard` and
`--log.no-tensorboard`. `steelyard train --help` lists them. A key that is *unset* is left out of the file. Several
sources are several `[[data.sources]]`. Paths are relative to the working directory. The run writes what it was told,
all defaults included, to `config.toml` in its `out_dir`.

"""


def page() -> str:
    """The whole text of configuration.md."""
    return HEAD + config_reference_markdown(TrainConfig)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {TARGET.name}")
