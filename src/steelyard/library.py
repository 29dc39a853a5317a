"""What `import steelyard` offers without torch: `steelyard.plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from steelyard.cost.profiles import BUILT_IN, load_profile
from steelyard.domain.layout import Layout
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS, MAX_HIDDEN, MAX_RANKS
from steelyard.domain.model_shape import MODEL_SHAPES, model_shape
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import make_plan
from steelyard.planner.objective import Memory, Passes, row_keys_of

LengthsByRank: TypeAlias = Sequence[Sequence[int]]
Shards: TypeAlias = Iterable[tuple[int, int, int, int]]
Goal: TypeAlias = Literal["pairs", "time"]
MAX_DOCUMENTS = 1 << 24  # numbers of documents in shards


def plan(
    layout: Layout | LengthsByRank | Shards,
    model: str | Path | AttentionShape = "llama3-8b",
    tolerance: float = 0.05,
    *,
    ranks: int | None = None,
    policy: str = "balanced",
    topology: Topology | None = None,
    window: int | None = None,
    passes: Passes = "both",
    memory: Memory = "keep",
    objective: Goal = "pairs",
    device: str | Path | None = None,
) -> DispatchPlan:
    """Decide which rank computes the core attention of which queries. Torch-free, deterministic.

    Args:
        layout: where the documents are: for each rank a list of the lengths of its whole documents, in tokens; or
            shards (document, start, length, rank), for documents that span ranks: each a tuple, since lists are read
            as lengths; or a `Layout`. It is taken as it is: `planner.layouts.choose_layout` places tokens well.
        model: "llama3-8b", "llama-34b" or another of `domain.model_shape`, the path of a Transformers `config.json` (or
            of its folder), or a shape: it decides how many bytes a query and a key have.
        tolerance: no rank's work exceeds (1 + tolerance) × its share.
        ranks: number of ranks, for shards; None: up to the last one that holds any.
        policy: "balanced"; or a baseline to compare with: "packed", "wlb", "per_document_cp", "head_tail", "greedy",
            which take no account of memory caps; or "reference": the fewest bytes that any plan within the tolerance
            sends, from an integer program. It needs scipy, and is for small cases: query rows × ranks up to 4,000.
        topology: speeds, memory caps and nodes of the ranks; equal ranks by default.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        passes: "forward", "backward" or "both": the pass whose bytes "balanced" makes few.
        memory: "keep" or "resend": whether ranks keep what they received until backward, or have it sent again then.
            It decides what both passes send.
        objective: what "balanced" balances: "pairs" of query and key; or "time" of the attention kernel of `device`,
            for which short documents are more work than their pairs say.
        device: for "time": "h200", "h100", "a100", "b200", "cpu-local", or the path of a profile that
            `steelyard calibrate` wrote.

    Returns:
        The plan: `plan.tasks` are its columns, one row a task; `planner.tables.build_tables(plan, rank)` what a rank
        needs to carry it out; `planner.checks.verify(plan)` proves it and counts work and bytes.

    Raises:
        UsageError: a layout, model, number or combination that cannot be right; it is named.
        PlanError: no plan was found that keeps the memory caps.

    >>> import steelyard
    >>> result = steelyard.plan([[4], [12]], tolerance=0.0)
    >>> from steelyard.planner.checks import verify
    >>> verify(result).work_by_server.tolist()
    [44, 44]
    """
    _require_kinds(model, tolerance, ranks, policy, topology, window, device)
    shape = model if isinstance(model, AttentionShape) else attention_shape(model)
    _require_shape(shape, "plan")
    if objective == "time" and policy != "balanced":
        raise UsageError(f"plan: objective='time' with policy={policy!r}; expected 'time' with policy 'balanced' only")
    row_keys = keys_of_a_row(objective, device, shape, names=("objective=", "device="))
    return make_plan(
        _layout_of(layout, ranks), policy=policy, topology=topology, shape=shape, tolerance=tolerance, window=window,
        passes=passes, memory=memory, objective=objective, row_keys=row_keys,
    )  # fmt: skip


def keys_of_a_row(
    objective: str, device: str | Path | None, shape: AttentionShape, *, names: tuple[str, str]
) -> int | None:
    """What a query row costs the device's best kernel besides the keys that it sees, in keys; None to balance pairs.

    Args:
        names: how a message calls the objective and the device: of an argument or a flag.

    Raises:
        UsageError: another objective, time without a device, a device without time, or one that is not known.
    """
    if objective not in get_args(Goal):
        raise UsageError(f"{names[0]}{objective!r}, expected 'pairs' or 'time'")
    if objective != "time":
        if device is not None:
            raise UsageError(f"{names[1]}{device} has a meaning with {names[0]}time only; add that or leave it out")
        return None
    if device is None:
        raise UsageError(
            f"{names[0]}time needs to know whose time; add {names[1]}{BUILT_IN[1]} (or {', '.join(BUILT_IN)}, or a "
            "profile from `steelyard calibrate`)"
        )
    return row_keys_of(load_profile(device).kernel(), shape.head_dim)


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
        why = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise UsageError(f"model {path}: not a JSON file in UTF-8 ({why})") from error
    except RecursionError:
        raise UsageError(f"model {path}: lists or objects within each other too deep for a config.json") from None
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
    shape = AttentionShape(heads, kv_heads, head_dim)
    _require_shape(shape, f"model {path}")
    return shape


def _require_kinds(
    model: object, tolerance: object, ranks: object, policy: object, topology: object, window: object, device: object
) -> None:
    """Refuse arguments of another type than they should have, with their names. Ranges are the planner's to check."""
    for name, value in (("ranks", ranks), ("window", window)):
        if value is not None and not _is_whole(value):
            raise UsageError(f"plan: {name}={_shown(value)}, expected a whole number, or None")
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real):
        raise UsageError(f"plan: tolerance={_shown(tolerance)}, expected a number such as 0.05, which is 5 %")
    if not isinstance(model, (str, Path, AttentionShape)):
        raise UsageError(
            f"plan: model={_shown(model)}, expected a name such as 'llama3-8b', the path of a config.json, or an "
            "AttentionShape"
        )
    if not isinstance(policy, str):
        raise UsageError(f"plan: policy={_shown(policy)}, expected a name such as 'balanced'")
    if topology is not None and not isinstance(topology, Topology):
        raise UsageError(
            f"plan: topology={_shown(topology)}, expected a steelyard.domain.topology.Topology, such as "
            "Topology(4, speeds=(1, 1, 1, 0.5)), or None"
        )
    if device is not None and not isinstance(device, (str, Path)):
        raise UsageError(f"plan: device={_shown(device)}, expected a name such as 'h200' or the path of a profile")


def _is_whole(value: object) -> bool:
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _require_shape(shape: AttentionShape, where: str) -> None:
    if shape.heads * shape.head_dim > MAX_HIDDEN or shape.element_bytes > 8:
        raise UsageError(
            f"{where}: {shape.heads:,} heads of size {shape.head_dim:,} with {shape.element_bytes} bytes an element; "
            f"expected at most {MAX_HIDDEN:,} channels together and 8 bytes"
        )


def _size(values: Mapping[str, object], key: str, path: Path) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_HIDDEN:
        given = f"lacks the key {key}" if value is None else f"{key} is {_shown(value)}"
        largest = f" up to {MAX_HIDDEN:,}" if isinstance(value, int) and value > MAX_HIDDEN else ""
        raise UsageError(f"model {path}: {given}; expected a positive whole number{largest}")
    return value


def _shown(value: object) -> str:
    """The value, shortened: it goes into a message of one line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"


def _layout_of(given: Layout | LengthsByRank | Shards, ranks: int | None) -> Layout:
    if isinstance(given, Layout):
        layout = given
    elif isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(
            f"plan: the layout is {_shown(given)}; expected a list of document lengths for each rank, such as "
            "[[4096, 512], [2048]], or shards (document, start, length, rank)"
        )
    else:
        given = list(given)
        rows = [_whole_numbers(row, place) for place, row in enumerate(given)]
        if not rows:
            raise UsageError("plan: the layout is empty; give a list of document lengths for each rank, or shards")
        if len(rows) > MAX_RANKS and not any(isinstance(row, tuple) for row in given):
            raise UsageError(f"plan: lengths for {len(rows):,} ranks, expected at most {MAX_RANKS:,}")
        if any(isinstance(row, tuple) for row in given):
            layout = _from_shards(rows, ranks)
        else:
            _refuse_shards_as_lists(rows, ranks)
            layout = Layout.from_doc_lengths(rows)
    if ranks is not None and ranks != layout.ranks:
        raise UsageError(f"plan: ranks={ranks}, but the layout has {layout.ranks}; leave `ranks` out")
    return layout


def _whole_numbers(row: object, place: int) -> list[int]:
    """One rank's lengths, or one shard, in Python's integers. What is not whole is refused rather than rounded."""
    if isinstance(row, (str, bytes)) or not isinstance(row, Iterable):
        raise UsageError(
            f"plan: entry {place} of the layout is {_shown(row)}; expected a list of document lengths for each rank, "
            "or shards (document, start, length, rank)"
        )
    numbers = []
    for value in row:
        try:
            number = None if isinstance(value, bool) else index(value)
        except TypeError:
            number = None
        if number is None or abs(number) >= MAX_DOCUMENT_TOKENS:
            raise UsageError(
                f"plan: entry {place} of the layout holds {_shown(value)}; expected whole numbers below "
                f"{MAX_DOCUMENT_TOKENS:,}"
            )
        numbers.append(number)
    return numbers


def _refuse_shards_as_lists(rows: list[list[int]], ranks: int | None) -> None:
    """Lists are lengths. Those that would do as shards, one at position 0 among them, are no lengths that anybody has:
    nobody lists documents of no tokens in just these places."""
    if any(len(row) != 4 for row in rows) or not any(0 in row for row in rows):
        return
    try:
        _from_shards(rows, ranks)
    except UsageError:
        return
    raise UsageError(
        f"plan: entry 0 of the layout is {_shown(rows[0])}, and all are shards (document, start, length, rank) in "
        "shape; lists are read as the lengths of a rank's documents: give each shard as a tuple, or leave out lengths "
        "of 0"
    )


def _from_shards(rows: list[list[int]], ranks: int | None) -> Layout:
    for place, row in enumerate(rows):
        if len(row) != 4:
            raise UsageError(
                f"plan: shard {place} has {len(row)} values; expected (document, start, length, rank). "
                "Lengths per rank are lists, shards are tuples"
            )
    shards = cast("list[tuple[int, int, int, int]]", [tuple(row) for row in rows])
    for row in rows:
        if not 0 <= row[0] < MAX_DOCUMENTS:
            raise UsageError(f"plan: document number {row[0]:,}, expected numbers from 0 on, below {MAX_DOCUMENTS:,}")
        if row[3] < 0:
            raise UsageError(f"plan: shard {tuple(row)} is on rank {row[3]:,}, expected ranks from 0 on")
    count = ranks if ranks is not None else 1 + max(row[3] for row in rows)
    if count > MAX_RANKS:
        raise UsageError(f"plan: shards on {count:,} ranks, expected at most {MAX_RANKS:,}")
    return Layout.from_shards(shards, count)
