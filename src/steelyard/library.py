"""What `import steelyard` offers without torch: `steelyard.plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from steelyard.domain.layout import Layout
from steelyard.domain.model_shape import MODEL_SHAPES, model_shape
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import make_plan

LengthsByRank: TypeAlias = Sequence[Sequence[int]]
Shards: TypeAlias = Iterable[tuple[int, int, int, int]]


def plan(
    layout: Layout | LengthsByRank | Shards,
    model: str | Path | AttentionShape = "llama3-8b",
    tolerance: float = 0.05,
    *,
    ranks: int | None = None,
    policy: str = "balanced",
    topology: Topology | None = None,
    window: int | None = None,
) -> DispatchPlan:
    """Decide which rank computes the core attention of which queries. Torch-free, deterministic.

    Args:
        layout: where the documents are: for each rank a list of the lengths of its whole documents, in tokens; or
            shards (document, start, length, rank) as tuples, for documents that span ranks; or a `Layout`.
        model: "llama3-8b", "llama-34b" or another of `domain.model_shape`, the path of a Transformers `config.json` (or
            of its folder), or a shape: it decides how many bytes a query and a key have.
        tolerance: no rank's work exceeds (1 + tolerance) × its share.
        ranks: number of ranks, for shards; None: up to the last one that holds any.
        policy: "balanced", or a baseline to compare with: "packed", "wlb", "per_document_cp", "head_tail", "greedy".
        topology: speeds, memory caps and nodes of the ranks; equal ranks by default.
        window: keys that a query sees at most, its own included; None: all earlier ones.

    Returns:
        The plan: `plan.tasks` are its columns, one row a task; `planner.tables.build_tables(plan, rank)` what a rank
        needs to carry it out; `planner.checks.verify(plan)` proves it and counts work and bytes.

    Raises:
        UsageError: a layout, model or number that cannot be right; it is named.
        PlanError: memory caps that no plan can keep.

    >>> import steelyard
    >>> result = steelyard.plan([[4], [12]], tolerance=0.0)
    >>> from steelyard.planner.checks import verify
    >>> verify(result).work_by_server.tolist()
    [44, 44]
    """
    shape = model if isinstance(model, AttentionShape) else attention_shape(model)
    return make_plan(
        _layout_of(layout, ranks), policy=policy, topology=topology, shape=shape, tolerance=tolerance, window=window
    )


def attention_shape(model: str | Path) -> AttentionShape:
    """Heads and sizes of a model: a built-in name ("llama3-8b"), or a Transformers `config.json` or the folder of one.

    Only the sizes of its attention are read, so any architecture with grouped heads will do. Elements have 2 bytes.

    Raises:
        UsageError: an unknown name, or a file that cannot be read or lacks a size.
    """
    name = str(model)
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name].attention()
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if path.suffix == ".json":
            raise UsageError(f"model {path}: there is no such file")
        return model_shape(name).attention()  # raises, and names the nearest
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model {path}: not a JSON file in UTF-8 ({error})") from error
    if not isinstance(values, Mapping):
        raise UsageError(
            f"model {path}: holds {type(values).__name__}, expected a JSON object with num_attention_heads"
        )
    if "num_attention_heads" not in values and isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]  # a model of several kinds of input
    return _shape_of_config(values, path)


def _shape_of_config(values: Mapping[str, object], path: Path) -> AttentionShape:
    heads = _size(values, "num_attention_heads", path)
    kv_heads = heads if values.get("num_key_value_heads") is None else _size(values, "num_key_value_heads", path)
    if values.get("head_dim") is not None:
        head_dim = _size(values, "head_dim", path)
    else:
        hidden = _size(values, "hidden_size", path)
        if hidden % heads:
            raise UsageError(
                f"model {path}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
                "correct one of them or give head_dim"
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise UsageError(
            f"model {path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; "
            "every key/value head must serve the same number of query heads"
        )
    return AttentionShape(heads, kv_heads, head_dim)


def _size(values: Mapping[str, object], key: str, path: Path) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        given = f"lacks the key {key}" if value is None else f"{key} is {value!r}"
        raise UsageError(f"model {path}: {given}; expected a positive whole number")
    return value


def _layout_of(given: Layout | LengthsByRank | Shards, ranks: int | None) -> Layout:
    if isinstance(given, Layout):
        layout = given
    else:
        given = list(given)
        rows = [[int(value) for value in row] for row in given]
        if not rows:
            raise UsageError("plan: the layout is empty; give a list of document lengths for each rank, or shards")
        if any(isinstance(row, tuple) for row in given):
            layout = _from_shards(rows, ranks)
        else:
            layout = Layout.from_doc_lengths(rows)
    if ranks is not None and ranks != layout.ranks:
        raise UsageError(f"plan: ranks={ranks}, but the layout has {layout.ranks}; leave `ranks` out")
    return layout


def _from_shards(rows: list[list[int]], ranks: int | None) -> Layout:
    for index, row in enumerate(rows):
        if len(row) != 4:
            raise UsageError(
                f"plan: shard {index} has {len(row)} values; expected (document, start, length, rank). "
                "Lengths per rank are lists, shards are tuples"
            )
    shards = cast("list[tuple[int, int, int, int]]", [tuple(row) for row in rows])
    return Layout.from_shards(shards, ranks if ranks is not None else 1 + max(row[3] for row in rows))
