"""Published measurements as scenarios: what each source says, what it leaves open and what we assume instead.

A source is a file of the form `validation-table/1`. Its rows become cases: a scenario, its documents, and what was
measured. Rows that cannot be compared fairly are excluded by name, with the reason. Each row has a role: `fitted` rows
are those that constants of the profiles were fitted on (benchmarks/fit_profiles.py reads the same roles); all others
are `held_out`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from steelyard.cost.linear import model_flops
from steelyard.cost.profiles import DeviceProfile, load_profile
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import MODEL_SHAPES, ModelShape, gpt_shape
from steelyard.errors import UsageError
from steelyard.simulate.scenario import Scenario

Role: TypeAlias = Literal["fitted", "held_out"]
Point: TypeAlias = Mapping[str, Any]
MemoryKind: TypeAlias = Literal["allocated", "reserved"]
GIB = 2**30


@dataclass(frozen=True, eq=False)
class Case:
    """One published row.

    Attributes:
        source, table, label: where it stands, and what it is in a few words.
        role: whether constants were fitted on it.
        scenario: None if it is excluded.
        document_tokens: length of its (equal) documents.
        step_time_s, memory_bytes: what was measured; None where it was not.
        memory_kind: what was measured: tensors alive, or what the allocator holds for them.
        out_of_memory: the run did not fit.
        excluded: the reason, or "".
        time_excluded: the reason why only the memory of the row is compared, or "".
        group: rows of one group are compared by rank.
    """

    source: str
    table: str
    label: str
    role: Role
    scenario: Scenario | None
    document_tokens: int = 0
    step_time_s: float | None = None
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "reserved"
    out_of_memory: bool = False
    excluded: str = ""
    time_excluded: str = ""
    group: str = ""


class _ExcludedError(Exception):
    """A row that cannot be compared; its text is the reason."""


def cases_of(
    source: str, content: Mapping[str, Any], profiles: Mapping[str, DeviceProfile] | None = None
) -> list[Case]:
    """All rows of a source, kernels and collectives excepted (see `simulate.microbenchmarks`).

    Args:
        profiles: replaces built-in profiles by name, while constants are fitted.
    """
    read = _READERS.get(source, _plain)
    cases = []
    for table in content["tables"]:
        for number, point in enumerate(points_of(table)):
            label = _label(point)
            try:
                found = read(table["title"], number, point)
                scenario = _scenario(found, profiles or {})
                cases.append(
                    Case(
                        source, table["title"], label, found.role, scenario, found.document_tokens,
                        found.step_time_s or _time_from_rate(found, scenario), found.memory_bytes,
                        found.memory_kind, bool(point.get("oom")), time_excluded=found.time_excluded,
                        group=found.group,
                    )
                )  # fmt: skip
            except _ExcludedError as reason:
                cases.append(Case(source, table["title"], label, "held_out", None, excluded=str(reason)))
            except UsageError as error:
                reason_text = re.sub(r"\s+", " ", str(error)).split(";")[0]
                cases.append(Case(source, table["title"], label, "held_out", None, excluded=f"refused: {reason_text}"))
    return cases


def points_of(table: Mapping[str, Any]) -> Iterator[Point]:
    """Rows of a table, written as dictionaries or as columns with rows."""
    if "points" in table:
        yield from table["points"]
        return
    for row in table["rows"]:
        yield {k: v for k, v in zip(table["columns"], row, strict=True) if v is not None}


@dataclass
class _Row:
    """What a reader found in a row, before it becomes a scenario."""

    model: ModelShape
    device: str
    degrees: Degrees
    chunk_tokens: int
    micro_batches: int
    document_tokens: int
    choices: dict[str, Any]
    step_time_s: float | None = None
    tflops: float | None = None
    count_causal: bool = False
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "reserved"
    role: Role = "held_out"
    time_excluded: str = ""
    group: str = ""
    tune: Callable[[DeviceProfile], DeviceProfile] | None = None


def _scenario(row: _Row, profiles: Mapping[str, DeviceProfile]) -> Scenario:
    profile = profiles.get(row.device) or load_profile(row.device)
    if row.tune is not None:
        profile = row.tune(profile)
    scenario = Scenario(
        model=row.model, profile=profile, degrees=row.degrees, chunk_tokens=row.chunk_tokens,
        micro_batches=row.micro_batches, policy="packed", **row.choices,
    )  # fmt: skip
    scenario.check()
    return scenario


def _time_from_rate(row: _Row, scenario: Scenario) -> float | None:
    """Step time from printed TFLOP/s per device, by the source's way of counting attention."""
    if row.tflops is None:
        return None
    length, tokens = row.document_tokens, scenario.tokens_per_step
    pairs = tokens * ((length + 1) / 2 if row.count_causal else length)
    return model_flops(scenario.model, tokens, pairs) / (row.tflops * 1e12 * scenario.degrees.devices)


def _label(point: Point) -> str:
    parts = [str(point.get("model", point.get("n_params_b", "")))[:24]]
    for key in ("gpu", "n_gpus", "seq_len", "tp", "pp", "cp", "sp", "dp", "method", "precision", "recompute"):
        if point.get(key) not in (None, ""):
            parts.append(f"{key} {point[key]}")
    return ", ".join(parts)


_DEVICES = (("H200", "h200"), ("B200", "b200"), ("H100", "h100"), ("A800", "a100"), ("A100", "a100"))


def device_of(text: str) -> str:
    """The profile of a printed device name.

    Raises:
        UsageError: none is meant.
    """
    for part, name in _DEVICES:
        if part in text:
            return name
    raise UsageError(f"unknown device {text!r}; expected one that names {', '.join(p for p, _ in _DEVICES)}")


def _shape(point: Point) -> ModelShape:
    name = str(point.get("model", "model"))
    base = MODEL_SHAPES.get(name)
    if base is not None:
        return base.with_layers(int(point.get("layers") or base.layers))
    if all(point.get(k) for k in ("layers", "hidden", "heads", "ffn")):
        heads = int(point["heads"])
        kv = int(point.get("kv_heads") or heads)
        sizes = (int(point["layers"]), int(point["hidden"]), heads, kv, int(point["ffn"]))
        return ModelShape(name, *sizes, int(point.get("vocab") or 32000))
    if all(point.get(k) for k in ("layers", "hidden", "heads")):
        vocab = int(point.get("vocab") or 51200)
        return gpt_shape(name, int(point["layers"]), int(point["hidden"]), int(point["heads"]), vocab)
    raise _ExcludedError("the model's shape is not stated")


def _row(point: Point, *, device: str | None = None, model: ModelShape | None = None, **choices: Any) -> _Row:
    """A row by the standard keys."""
    shape = model or _shape(point)
    devices = int(point["n_gpus"])
    tensor, stage, context = (int(point.get(k) or 1) for k in ("tp", "pp", "cp"))
    data = devices // (tensor * stage * context)
    if data * tensor * stage * context != devices:
        raise _ExcludedError("printed degrees do not multiply to the printed number of devices")
    sequence = int(point["seq_len"])
    micro_batch = int(point.get("micro_batch") or 1)
    batch = int(point.get("global_batch") or micro_batch * data)
    count = batch // (data * micro_batch)
    if count < 1 or count * data * micro_batch != batch:
        raise _ExcludedError("global batch is not micro-batch × data × accumulation")
    precision = "fp8" if "fp8" in str(point.get("precision", "")) else "bf16"
    degrees = Degrees(data, tensor, context, stage, int(point.get("vp") or 1))
    step_time = point.get("step_time_s")
    if step_time is None and point.get("tokens_per_s"):
        step_time = batch * sequence / float(point["tokens_per_s"])
    if step_time is None and point.get("tokens_per_s_per_gpu"):
        step_time = batch * sequence / devices / float(point["tokens_per_s_per_gpu"])
    given: dict[str, Any] = {"precision": precision, **choices}
    return _Row(
        shape, device or device_of(str(point.get("gpu", "A100"))), degrees, micro_batch * sequence // context, count,
        sequence, given, None if step_time is None else float(step_time),
    )  # fmt: skip


def _plain(table: str, number: int, point: Point) -> _Row:
    """Any further table: standard keys, common defaults."""
    full = bool(point.get("fsdp")) or "zero3" in str(point.get("sharding", ""))
    recompute = {"full": "full", "selective": "alternate"}.get(str(point.get("recompute", "none")), "none")
    row = _row(point, sharding="full" if full else "optimizer", recompute=recompute, tensor_overlap=True)
    if row.step_time_s is None and not point.get("oom"):
        raise _ExcludedError("no step time and no rate of tokens")
    memory = point.get("peak_mem_gib")
    row.memory_bytes = float(memory) * GIB if memory else None
    return row


_DGXC_FITTED = {("llama3.1-8b", 8), ("llama3.1-70b", 64), ("nemotron4-15b", 16), ("gpt3-175b", 128)}


_DGXC_16_BIT_GRADIENTS = ("gpt3-175b", "nemotron4-340b")
"""Whose configuration files in the source say `grad_sync_dtype: bf16`; that of the 15B does not, and those of the Llama
models were not found."""


def _dgxc(table: str, number: int, point: Point) -> _Row:
    if "Paxml" in table:
        raise _ExcludedError("degrees and recomputation are not printed (Paxml)")
    if "Maxtext" in table:
        raise _ExcludedError("the recomputation policy is not printed, and without one it would not fit (MaxText)")
    recompute = "none"
    row = _row(
        point, sharding="optimizer", recompute=recompute, kernel="cudnn", tensor_overlap=True, context_exchange="ring",
        gradient_bytes=2 if point["model"] in _DGXC_16_BIT_GRADIENTS else 4,
    )  # fmt: skip
    if "v24.11.1" in table and (point["model"], point["n_gpus"]) in _DGXC_FITTED:
        row.role = "fitted"
    return row


def _vtrain_shape(point: Point) -> ModelShape:
    return gpt_shape(
        f"gpt-{point.get('n_params_b', point['hidden'])}", point["layers"], point["hidden"], point["heads"]
    )


def _four_ports(profile: DeviceProfile) -> DeviceProfile:
    """800 Gb/s a node, half of the profile's: `inter_node_bandwidth` in the configurations of the source's repository,
    whose program also counts 2 bytes a parameter for gradients."""
    return profile.replace(network_bytes_per_s=profile.network_bytes_per_s / 2)


def _vtrain_multi(table: str, number: int, point: Point) -> _Row:
    row = _row(
        point, model=_vtrain_shape(point), device="a100", sharding="none", recompute="full", kernel="unfused",
        sequence_parallel=False, gradient_overlap=False, gradient_bytes=2, fused=False,
    )  # fmt: skip
    row.tune = _four_ports
    row.role = "fitted" if number % 4 == 0 else "held_out"
    row.group = f"{point['n_params_b']}B on {point['n_gpus']}, batch {point['global_batch']}"
    return row


def _vtrain_single(table: str, number: int, point: Point) -> _Row:
    row = _row(
        point, model=_vtrain_shape(point), device="a100", sharding="none", recompute="full", kernel="unfused",
        sequence_parallel=False, gradient_overlap=False, gradient_bytes=2, fused=False,
    )  # fmt: skip
    row.role = "fitted" if number % 48 == 0 else "held_out"
    row.group = f"h{point['hidden']} L{point['layers']} on {point['n_gpus']}, batch {point['global_batch']}"
    return row


def _korthikanti(table: str, number: int, point: Point) -> _Row:
    if not table.startswith("Table 5"):
        raise _ExcludedError("single layers and memory shares, compared in their own tests")
    selective = point["recompute"] == "selective"
    return _row(
        point, device="a100", sharding="none", recompute="attention" if selective else "full", kernel="unfused",
        sequence_parallel=bool(point["sequence_parallel"]), gradient_overlap=False, fused=False,
    )  # fmt: skip


def _megascale(table: str, number: int, point: Point) -> _Row:
    if point["system"] != "megatron-lm":
        raise _ExcludedError("MegaScale rows use a parallel block, window attention and LAMB")
    if "step_time_s" not in point:
        raise _ExcludedError("only MFU is printed, without degrees")
    model = gpt_shape("gpt-175b", 96, 12288, 128, 64000)
    return _row(
        point, device="a100", model=model, sharding="optimizer", recompute="attention", kernel="unfused", fused=False,
        gradient_overlap=False,  # its table 3 counts overlapped data parallelism among what MegaScale adds
    )  # fmt: skip


_MPT = {  # llm-foundry's configurations: layers, hidden, heads
    "mpt-125m": (12, 768, 12), "mpt-350m": (24, 1024, 16), "mpt-760m": (24, 1536, 12), "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20), "mpt-7b": (32, 4096, 32), "mpt-13b": (40, 5120, 40), "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}  # fmt: skip


def _mosaic(table: str, number: int, point: Point) -> _Row:
    if "A100 40GB" in table:
        raise _ExcludedError("A100 40 GB: no profile")
    if point.get("activation_cpu_offload"):
        raise _ExcludedError("activations are offloaded to the host")
    layers, hidden, heads = _MPT[point["model"]]
    model = ModelShape(point["model"], layers, hidden, heads, heads, 4 * hidden, 50368, gated=False, tied_head=True)
    sharded = "full" if point["sharding"] == "zero3" else "optimizer"
    recompute = "full" if point["activation_checkpointing"] else "none"
    precise = "FP8" not in table
    row = _row(point, model=model, sharding=sharded, recompute=recompute, kernel="triton", fused=False)
    row.role = "fitted" if point["model"] == "mpt-7b" and point["n_gpus"] <= 8 and precise else "held_out"
    return row


def _burst(table: str, number: int, point: Point) -> _Row:
    if "attention-only" in table:
        raise _ExcludedError("attention alone, without a model")
    if str(point["model"]).startswith("80b"):
        raise _ExcludedError("the model's shape is not stated")
    method = str(point["method"]).lower()
    if "megatron-tp" in method or "ulysses" in method or "usp" in method or method == "megatron":
        raise _ExcludedError("Ulysses, tensor-only or mixed context parallelism, which the simulator does not have")
    if "megatron" in method:
        raise _ExcludedError(
            "Megatron's recomputation is not stated, and 32K tokens on a device run in one row and not in another"
        )
    if "loong" in method:
        raise _ExcludedError("LoongTrain's double ring and its buffers are not modelled")
    if "baseline" in method or "half" in method or "sl-ckpt" in method:
        raise _ExcludedError("partial or unnamed recomputation, or a baseline whose parts are not described")
    if table.endswith(" x"):
        raise _ExcludedError("a sheet that the repository's plots do not read (superseded draft)")
    if point.get("optimizer_offload"):
        raise _ExcludedError("the optimizer is offloaded to the host")
    context = int(point.get("sp") or point["n_gpus"])
    devices = int(point["n_gpus"])
    given = {**point, "cp": context, "global_batch": devices // context, "micro_batch": 1}
    if point.get("tokens_per_s_per_gpu") is None:
        given.pop("tokens_per_s_per_gpu", None)
    # "Burst-Ring" has selective checkpoints, since other rows are called "w/o sele-ckpt": attention is not repeated.
    selective = method == "burst-ring"
    recompute = "token_wise" if selective else "full"
    row = _row(
        given, device="a100", sharding="full", recompute=recompute, kernel="fa2", context_exchange="ring", fused=False,
        chunked_loss="burst" in method,
    )  # fmt: skip
    row.tune = _half_the_ports
    memory = point.get("mem_gb")
    row.memory_bytes = float(memory) * GIB if memory else None
    row.group = f"{table}, {point['seq_len']}"
    return row


def _half_the_ports(profile: DeviceProfile) -> DeviceProfile:
    """Four InfiniBand adapters for eight devices, as the source's example lists them."""
    return profile.replace(network_bytes_per_s=profile.network_bytes_per_s / 2)


def _nemo(table: str, number: int, point: Point) -> _Row:
    given = {**point, "n_gpus": point["n_gpus_from_degrees"], "micro_batch": 1}
    b200 = "B200" in str(point["gpu"])
    # The data's README: the H100 column is reached by kernels of the FlashAttention-2 class with full counting.
    kernel = "cudnn" if b200 else "fa2"
    row = _row(given, sharding="optimizer", kernel=kernel, tensor_overlap=True, context_exchange="ring")
    row.tflops = float(point["tflops_per_gpu"])
    if b200 and point["seq_len"] in (8192, 1048576):
        row.role = "fitted"
    return row


def _torchtitan(table: str, number: int, point: Point) -> _Row:
    if "rowwise" in str(point["precision"]):
        raise _ExcludedError("row-wise FP8 scaling, a different matrix product")
    if "config default" in str(point["recompute"]):
        raise _ExcludedError("recomputation is not printed (H200 page)")
    given = {**point, "micro_batch": 1}
    devices = int(point["n_gpus"])
    tensor, stage, context = (int(point.get(k) or 1) for k in ("tp", "pp", "cp"))
    data = devices // (tensor * stage * context)
    micro = stage  # the default number of micro-batches is that of the stages, and the commands set no other
    per_pass = int(point["local_batch"]) // micro
    given.update(micro_batch=per_pass, global_batch=data * micro * per_pass)
    interleaved = point.get("schedule") == "Interleaved1F1B"
    given["vp"] = 2 if interleaved else 1
    # The recipes' selective recomputation is by operation: every second product and all that is element-wise.
    recompute = {"full": "full", "selective": "products", "selective-op": "products"}
    chosen = recompute[str(point["recompute"]).split(" ")[0]]
    device = "h200" if "H200" in str(point["gpu"]) else "h100"
    row = _row(
        given, device=device, sharding="full", recompute=chosen, kernel="fa2",
        tensor_overlap=bool(point.get("async_tp")), context_exchange="ring", fused=point.get("compile") is not False,
    )  # fmt: skip
    memory = point.get("peak_mem_gib")
    row.memory_bytes = float(memory) * GIB if memory else None
    if device == "h100":
        row.tune = _low_power
        if devices == 8 and point.get("compile") and point.get("recompute") == "selective":
            row.role = "fitted"
    if context > 1:
        row.step_time_s = None
        row.time_excluded = (
            "times with a context axis: 35 to 65 % longer than predicted, the cause is not known (memory is compared)"
        )
    return row


LOW_POWER_EXPONENT = 0.75
"""Of the ratio of power limits that gives the ratio of clocks: fitted on the compiled 8B rows on 8 devices."""


def _low_power(profile: DeviceProfile) -> DeviceProfile:
    """The 96 GB HBM2e, 500 W part: memory from its data sheet, clock by the ratio of the power limits."""
    clock = (500 / 700) ** LOW_POWER_EXPONENT
    return profile.replace(
        peak_bf16_flops=profile.peak_bf16_flops * clock, peak_fp8_flops=profile.peak_fp8_flops * clock,
        memory_bytes=95.0 * GIB, memory_bytes_per_s=2.4e12,
        kernels={n: _slower(k, clock) for n, k in profile.kernels.items()},
    )  # fmt: skip


def _slower(kernel: Any, clock: float) -> Any:
    import dataclasses

    fields = ("tile_s", "block_s", "masked_block_s")
    return dataclasses.replace(kernel, **{f: getattr(kernel, f) / clock for f in fields if hasattr(kernel, f)})


_NANOTRON = {
    "1.34b": ModelShape("nanotron-1.34b", 16, 2048, 32, 32, 8192, 131072, tied_head=True),
    "3.57b": ModelShape("nanotron-3.57b", 28, 3072, 24, 24, 8192, 131072, tied_head=True),
    "8.86b": ModelShape("nanotron-8.86b", 32, 4096, 32, 32, 14336, 131072),
    "80b": ModelShape("nanotron-80b", 80, 8192, 64, 64, 28672, 131072),
}
"""Widths of Llama 3 with full heads and 131,072 tokens reproduce the printed parameter counts to three digits."""


def _nanotron(table: str, number: int, point: Point) -> _Row:
    if point["tp"] > 8:
        raise _ExcludedError("the tensor axis leaves the node, which the simulator refuses")
    model = _NANOTRON[str(point["model"]).removeprefix("nanotron-llama-")]
    sharded = "optimizer" if point["zero"] == "zero1" else "none"
    row = _row(
        point, model=model, sharding=sharded, kernel="fa2", gradient_overlap=False, fused=False, sliced_state=True
    )
    row.tflops = float(point["mfu_pct"]) / 100 * 989
    row.memory_bytes = float(point["mem_gb"]) * GIB
    return row


def _megatron(table: str, number: int, point: Point) -> _Row:
    if table.startswith("CI"):
        model = ModelShape("gpt-7b-gqa", 32, 4096, 32, 8, 16384, 131072, gated=False)
        row = _row(point, model=model, sharding="optimizer", kernel="cudnn" if "H100" in point["gpu"] else "fa2",
                   tensor_overlap=False, sequence_parallel=False)  # fmt: skip
        row.memory_bytes = float(point["mem_peak_allocated_bytes"])
        row.memory_kind = "allocated"
        row.step_time_s = None
        row.time_excluded = (
            "times in deterministic mode with NCCL_ALGO=Ring, slower than in training (memory is compared)"
        )
        return row
    size = (int(point["layers"]), int(point["hidden"]), int(point["heads"]))
    model = gpt_shape(point["model"], *size, int(point["vocab"]))
    micro = 1 if point["pp"] > 1 else int(point["global_batch"]) // int(point["dp"])
    row = _row({**point, "micro_batch": micro}, model=model, sharding="optimizer", kernel="cudnn", tensor_overlap=True)
    if point["pp"] > 1:
        raise _ExcludedError("pipeline schedule and micro-batch are not printed")
    row.tflops = float(point["tflops_per_gpu"])
    return row


def _llama3(table: str, number: int, point: Point) -> _Row:
    if point["cp"] > 1:
        raise _ExcludedError("the FLOPs convention is not stated and moves this row by 40 %")
    batch = int(point["batch_per_dp"]) * int(point["dp"])
    row = _row(
        {**point, "micro_batch": 1, "global_batch": batch, "vp": 8 if point["pp"] > 1 else 1},
        model=MODEL_SHAPES["llama3-405b"].with_layers(128), sharding="optimizer", kernel="fa2", tensor_overlap=True,
    )  # fmt: skip
    row.tflops = float(point["tflops_per_gpu"])
    return row


def _misc(table: str, number: int, point: Point) -> _Row:
    raise _ExcludedError("the data's README calls this file good for sanity only")


def _reproduction(table: str, number: int, point: Point) -> _Row:
    raise _ExcludedError("speed-ups without absolute times: the reproduction table compares them")


def _runs(table: str, number: int, point: Point) -> _Row:
    raise _ExcludedError("times over batches of unequal documents: compared beside the reproduction")


_READERS: Mapping[str, Callable[[str, int, Point], _Row]] = {
    "nvidia_dgxc_h100_weak_scaling": _dgxc,
    "vtrain_a100_multi_node": _vtrain_multi,
    "vtrain_a100_single_node": _vtrain_single,
    "korthikanti_2022_recompute": _korthikanti,
    "megascale_2024": _megascale,
    "mosaicml_llm_foundry_mpt": _mosaic,
    "burstengine_1m_context": _burst,
    "nvidia_nemo_long_sequence": _nemo,
    "torchtitan": _torchtitan,
    "nanotron_best_configs": _nanotron,
    "megatron_lm": _megatron,
    "llama3_405b": _llama3,
    "long_context_misc": _misc,
    "distca_published": _reproduction,
    "distca_runs": _runs,
}
