"""What `steelyard simulate` and `steelyard advise` can be told: frozen dataclasses, read from TOML and flags.

A file of ten lines is enough:

    [model]
    name = "llama3-8b"
    [cluster]
    device = "H200"
    nodes = 8
    [parallel]
    tensor = 8
    [run]
    chunk_tokens = 131072
    [documents]
    median = 4096
    sigma = 1.5
    longest = 131072
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from steelyard.cost.collectives import WideLink
from steelyard.cost.peak_memory import Recompute
from steelyard.cost.profiles import DeviceProfile, Precision, load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees, Sharding
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS, MAX_TOKENS_PER_RANK
from steelyard.domain.model_shape import MODEL_SHAPES, ModelShape, model_shape
from steelyard.domain.sync_mode import Compression, ModeName, SyncMode
from steelyard.errors import UsageError
from steelyard.model.hf_config import config_from_hf
from steelyard.simulate.documents import Documents, Sampler, documents_from_json, lognormal_documents, uniform_documents
from steelyard.simulate.scenario import ContextExchange, Scenario
from steelyard.simulate.workloads import LayoutName, PolicyName

MOST_DEVICES = 1 << 18
MOST_DOCUMENTS = 10_000_000
MOST_BATCHES = 10_000
MOST_MICRO_BATCHES = 1 << 20
MOST_PLANS = 20_000
"""A typing error of some zeros is told as one, instead of filling this machine's memory."""


@dataclass(frozen=True)
class ModelSection:
    """The model."""

    name: str = "llama3-8b"
    """A built-in shape (llama3-8b, llama-34b, llama3-70b, qwen3-8b, gpt3-175b, ...) or a Transformers config.json."""

    def shape(self) -> ModelShape:
        path = Path(self.name).expanduser()
        if self.name not in MODEL_SHAPES and (path.suffix == ".json" or (path / "config.json").is_file()):
            return shape_from_file(path)
        return model_shape(self.name)


@dataclass(frozen=True)
class DeviceGroup:
    """Nodes of one kind in a mixed cluster."""

    device: str
    """Profile of these nodes' devices."""
    nodes: int
    """How many."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_DEVICES:
            raise UsageError(
                f"cluster: a group of nodes={self.nodes} {self.device}, expected 1 … {MOST_DEVICES:,}; nearest: "
                f"nodes={min(max(self.nodes, 1), MOST_DEVICES)}, or leave the group out"
            )


@dataclass(frozen=True)
class ClusterSection:
    """The machines of one site."""

    device: str = "H100"
    """Built-in profile (A100, H100, H200, B200, cpu-local) or a profile file that `calibrate` wrote."""
    nodes: int = 1
    """Nodes of the profile's size."""
    devices: int | None = None
    """Number of devices, where they do not fill nodes; unset: all of them."""
    groups: tuple[DeviceGroup, ...] = ()
    """A mixed cluster: nodes by kind, in rank order; replaces `nodes`."""
    slow_ranks: tuple[int, ...] = ()
    """Ranks of the data x context axes that are slower than the others."""
    slow_factor: float = 1.5
    """How many times longer slow ranks take."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or (self.devices is not None and self.devices < 1):
            raise UsageError(f"cluster: nodes={self.nodes}, devices={self.devices}, expected at least 1")
        if not 0 < self.slow_factor <= 1000:
            raise UsageError(f"cluster: slow_factor={self.slow_factor}, expected more than 0 and at most 1,000")


@dataclass(frozen=True)
class ParallelSection:
    """Degrees; `data` of 0 takes what the others leave."""

    data: int = 0
    """Ranks that hold different documents; 0: devices / (tensor x context x stage)."""
    tensor: int = 1
    """Devices that share every layer's matrices."""
    context: int = 1
    """Ranks that share a sequence."""
    stage: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Model chunks per stage (interleaved schedule; not with policy balanced)."""
    sharding: Sharding = "optimizer"
    """What data parallelism shards: none (DDP), optimizer (ZeRO-1), full (FSDP2, ZeRO-3)."""
    shard_ranks: int = 0
    """Ranks over which state is sharded; 0: all of data x context."""
    sequence_parallel: bool = True
    """Norms and residuals are split over the tensor axis too."""
    tensor_overlap: bool = False
    """Transfers of the tensor axis run beside the products that they feed."""
    gradient_overlap: bool = True
    """Gradients are reduced while backward still runs."""
    context_exchange: ContextExchange = "gather"
    """How keys reach the ranks of the context axis: gather, gather_overlapped or ring."""

    def __post_init__(self) -> None:
        for name, least in (("data", 0), ("tensor", 1), ("context", 1), ("stage", 1), ("virtual_stages", 1),
                            ("shard_ranks", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise UsageError(f"parallel: {name}={getattr(self, name)}, expected {least} or more; nearest: {least}")


@dataclass(frozen=True)
class RunSection:
    """What a step is."""

    policy: PolicyName = "balanced"
    """packed, wlb, per_document_cp or balanced."""
    chunk_tokens: int = 8192
    """Tokens of a rank in one nano-batch."""
    micro_batches: int = 1
    """Micro-batches of a step; with ping-pong each is two chunks."""
    ping_pong: bool = False
    """Two nano-batches alternate so that transfers hide under work (policy balanced)."""
    keep_received: bool = True
    """Servers keep what they received until backward; else it is sent again."""
    tolerance: float = 0.05
    """Of the balanced policy."""
    layout: LayoutName = "contiguous"
    """Of the balanced policy: contiguous (documents fill rank after rank) or chosen by the planner for few bytes."""
    precision: Precision = "bf16"
    """bf16, fp8 (matrix products) or fp32."""
    recompute: Recompute = "none"
    """none, attention, feed_forward, products, alternate, token_wise or full."""
    kernel: str = "auto"
    """Attention kernel generation of the profile: fa2, fa3, cudnn, ...; auto: its first."""
    fused: bool = True
    """Element-wise kernels are fused or compiled."""
    chunked_loss: bool = False
    """The loss is computed chunk by chunk."""
    mixed_precision: bool = True
    """16-bit weights beside a 32-bit master copy; false: one type."""
    extra_overhead: float = 0.0
    """Share added to every step for what is not modelled."""
    exchange_overhead_s: float = 0.0
    """Seconds added to each dispatch to servers, per layer and direction."""
    hidden_gather: float = 0.0
    """Share of an exposed gather of keys that is hidden after all."""
    skip_optimizer: bool = False
    """Leave the optimizer step out."""

    def __post_init__(self) -> None:
        for name, most in (("chunk_tokens", MAX_TOKENS_PER_RANK), ("micro_batches", MOST_MICRO_BATCHES)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"run: {name}={getattr(self, name)}, expected 1 … {most:,}")
        if not 0 <= self.exchange_overhead_s <= 10:
            raise UsageError(
                f"run: exchange_overhead_s={self.exchange_overhead_s}, expected 0 … 10 seconds of each dispatch; "
                f"nearest: {10 if self.exchange_overhead_s > 10 else 0}"
            )


@dataclass(frozen=True)
class DocumentsSection:
    """Lengths of the documents: one of `length`, `file`, `lengths` or a log-normal distribution."""

    length: int = 0
    """All documents have this length; 0: see the others."""
    lengths: tuple[int, ...] = ()
    """Lengths to draw from."""
    file: str = ""
    """A JSON list of lengths, a workload file with batches, or a folder of documents, which are read and counted."""
    tokenizer: str = "bytes"
    """Counts the tokens of a folder's documents: `bytes`, or a Hugging Face `tokenizer.json` or the folder of one."""
    sampler: Sampler = "shuffle"
    """shuffle (draw at random), in_order, or batches (as the file gives them)."""
    median: float = 2048
    """Of the log-normal distribution, in tokens."""
    sigma: float = 1.2
    """Its spread."""
    longest: int = 0
    """Documents of a distribution or a folder are cut at this length; 0: a distribution's at the context."""
    context_tokens: int = 0
    """Longest document that the model takes; 0: what fits a step's ranks."""
    cut_at_chunks: bool = False
    """Balanced: documents end with their chunk, as packed training cuts them; else they continue on the next rank."""

    def documents(self, context: int) -> Documents:
        """The stream. `context`: longest document that is possible."""
        most = max(self.length, self.longest, self.context_tokens, *self.lengths, 0)
        if most >= MAX_DOCUMENT_TOKENS:
            raise UsageError(
                f"documents: {most:,} tokens, expected fewer than {MAX_DOCUMENT_TOKENS:,} in length, lengths, longest "
                f"and context_tokens; nearest: {MAX_DOCUMENT_TOKENS - 1}"
            )
        if self.length < 0 or self.longest < 0 or self.context_tokens < 0:
            raise UsageError(
                f"documents: length={self.length}, longest={self.longest}, context_tokens={self.context_tokens}, "
                "expected 0 (not given) or more"
            )
        if self.sampler == "batches" and not self.file:
            raise UsageError("documents: sampler='batches' needs a file with batches; nearest: sampler='shuffle'")
        given = [name for name in ("length", "lengths", "file") if getattr(self, name)]
        if len(given) > 1:
            raise UsageError(f"documents: {' and '.join(given)} are given, expected one of them; leave the others out")
        if self.length:
            return uniform_documents(self.length)
        if self.lengths:
            if min(self.lengths) < 1:
                raise UsageError(f"documents: lengths holds {min(self.lengths)}, expected positive numbers")
            return Documents("given lengths", int_column(self.lengths), self.sampler)
        if self.file:
            path = Path(self.file).expanduser()
            return self._of_folder(path) if path.is_dir() else documents_from_json(path, self.sampler)
        return lognormal_documents(self.median, self.sigma, min(self.longest or context, context))

    def _of_folder(self, path: Path) -> Documents:
        from steelyard.data.lengths import data_statistics  # readers of all formats: not for other documents

        if self.sampler == "batches":
            raise UsageError(f"documents: {path} is a folder, sampler='batches' needs batches; use 'in_order'")
        lengths = data_statistics(str(path), tokenizer=self.tokenizer, ranks=()).lengths
        lengths = lengths[lengths > 0]
        return Documents(path.name, int_column(np.minimum(lengths, self.longest or lengths.max())), self.sampler)


@dataclass(frozen=True)
class SiteSection:
    """One replica's site and its link."""

    name: str
    """Shown in reports."""
    device: str = ""
    """Profile of its devices, as many as [cluster] has; empty: those of [cluster]."""
    speed: float = 1.0
    """Relative speed beside what the profile says."""
    round_trip_s: float = 0.05
    """Latency to the others, there and back."""
    bytes_per_s: float = 1.25e8
    """Rate of its link."""
    streams: int = 4
    """Connections used side by side."""
    window_bytes: float = 16777216
    """Most unacknowledged bytes of a connection."""
    loss: float = 0.0
    """Share of packets lost."""

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1000:
            raise UsageError(
                f"sites: speed={self.speed} of {self.name!r}, expected more than 0 and at most 1,000; nearest: 1"
            )
        for name in ("round_trip_s", "bytes_per_s", "window_bytes"):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"sites: {name}={getattr(self, name)} of {self.name!r}, expected a number")
        self.link()  # refuses what no link can be

    def link(self) -> WideLink:
        return WideLink(self.round_trip_s, self.bytes_per_s, self.streams, self.window_bytes, self.loss)


@dataclass(frozen=True)
class SyncSection:
    """How replicas stay together; used where [[sites]] are given."""

    mode: ModeName = "every_step"
    """every_step, bounded_staleness, local_sgd, diloco, parameter_server or gossip."""
    period: int = 1
    """Steps between two exchanges (local_sgd, diloco)."""
    lead: int = 1
    """Steps by which a fast replica may be ahead (bounded_staleness)."""
    fragments: int = 1
    """Parts that diloco exchanges one after another."""
    overlap: int = 0
    """Steps under which an exchange may hide."""
    compression: Compression = "none"
    """none, bf16, int8, int4 or topk."""
    topk_share: float = 0.01
    """Share of values that topk sends."""
    fraction: float = 1.0
    """Share of the parameters that gossip sends."""

    def __post_init__(self) -> None:
        self.sync_mode()  # refuses what no mode can do, also where there are no sites yet

    def sync_mode(self) -> SyncMode:
        return SyncMode(
            self.mode, self.period, self.lead, self.fragments, self.overlap, self.compression, self.topk_share,
            self.fraction,
        )  # fmt: skip


@dataclass(frozen=True)
class SamplingSection:
    """Monte Carlo over batches."""

    batches: int = 8
    """Batches sampled."""
    seed: int = 0
    """Of the sampler."""

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise UsageError(f"sampling: batches={self.batches}, expected at least 1")
        if self.batches > MOST_BATCHES:
            raise UsageError(
                f"sampling: batches={self.batches:,}, expected at most {MOST_BATCHES:,}; nearest: {MOST_BATCHES}"
            )
        if self.seed < 0:
            raise UsageError(f"sampling: seed={self.seed}, expected 0 or more; nearest: 0")


@dataclass(frozen=True)
class SimulateConfig:
    """A configuration to be simulated."""

    model: ModelSection = field(default_factory=ModelSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    run: RunSection = field(default_factory=RunSection)
    documents: DocumentsSection = field(default_factory=DocumentsSection)
    sync: SyncSection = field(default_factory=SyncSection)
    sites: tuple[SiteSection, ...] = ()
    """Replicas at several sites, each one whole cluster as above."""
    sampling: SamplingSection = field(default_factory=SamplingSection)

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise UsageError(f"sites: two are called {twice!r}; give each a name of its own")

    def devices(self) -> int:
        """Devices of one site."""
        profile = load_profile(self.cluster.device)
        nodes = sum(g.nodes for g in self.cluster.groups) or self.cluster.nodes
        devices = self.cluster.devices or nodes * profile.node_size
        if devices > MOST_DEVICES:
            raise UsageError(
                f"cluster: {devices:,} devices, expected at most {MOST_DEVICES:,}; nearest: "
                f"nodes={MOST_DEVICES // profile.node_size}"
            )
        return devices

    def degrees(self) -> Degrees:
        """With `data` filled in. Raises UsageError where the others do not divide the devices."""
        p, devices = self.parallel, self.devices()
        rest = p.tensor * p.context * p.stage
        data = p.data or max(1, devices // rest)
        return Degrees(data, p.tensor, p.context, p.stage, p.virtual_stages)

    def scenario(self, *, policy: PolicyName | None = None, site: SiteSection | None = None) -> Scenario:
        """The scenario of one site; None: of `[cluster]`.

        Raises:
            UsageError: something cannot be laid out; names the nearest valid choice.
        """
        device = site.device if site is not None else ""
        profile, p, r = self._profile(device), self.parallel, self.run
        degrees = self.degrees()
        chosen = policy or r.policy
        if r.ping_pong and r.policy != "balanced" and chosen == r.policy:
            raise UsageError(
                f"run: ping_pong hides dispatched attention, and policy={r.policy!r} dispatches none; nearest: "
                "policy='balanced', or ping_pong=false"
            )
        virtual = 1 if chosen == "balanced" and chosen != r.policy else p.virtual_stages
        degrees = Degrees(degrees.data, p.tensor, p.context, p.stage, virtual)
        scenario = Scenario(
            model=self.model.shape(), profile=profile, degrees=degrees, chunk_tokens=r.chunk_tokens,
            micro_batches=r.micro_batches, policy=chosen, precision=r.precision, sharding=p.sharding,
            shard_ranks=p.shard_ranks, recompute=r.recompute, kernel=r.kernel,
            ping_pong=r.ping_pong and chosen == "balanced", sequence_parallel=p.sequence_parallel, fused=r.fused,
            tensor_overlap=p.tensor_overlap, context_exchange=p.context_exchange, gradient_overlap=p.gradient_overlap,
            keep_received=r.keep_received, cut_documents=self.documents.cut_at_chunks, tolerance=r.tolerance,
            speeds=self._speeds(profile, degrees, mixed=not device), speed=site.speed if site is not None else 1.0,
            extra_overhead=r.extra_overhead, hidden_gather=r.hidden_gather,
            exchange_overhead_s=r.exchange_overhead_s, skip_optimizer=r.skip_optimizer, chunked_loss=r.chunked_loss,
            mixed_precision=r.mixed_precision, layout=r.layout,
        )  # fmt: skip
        if chosen != r.policy and r.ping_pong and chosen != "balanced":  # the same tokens a step
            scenario = scenario.replace(micro_batches=2 * r.micro_batches)
        scenario.check(self.devices())
        if p.shard_ranks and degrees.lanes % p.shard_ranks:
            near = max(d for d in range(1, p.shard_ranks + 1) if degrees.lanes % d == 0)
            raise UsageError(
                f"parallel: shard_ranks={p.shard_ranks} does not divide the {degrees.lanes} ranks of data × context; "
                f"nearest: shard_ranks={near}"
            )
        return scenario

    def _profile(self, device: str) -> DeviceProfile:
        """Of the site's devices; of mixed ones `cluster.device` with the memory of the smallest."""
        profile, groups = load_profile(device or self.cluster.device), self.cluster.groups
        if device or not groups:
            return profile
        others = [load_profile(group.device) for group in groups]
        names = list(dict.fromkeys(other.name for other in others))
        return profile.replace(
            name=profile.name if names == [profile.name] else f"{' and '.join(names)} (reckoned as {profile.name})",
            memory_bytes=min(other.memory_bytes for other in others),
        )

    def _speeds(self, profile: DeviceProfile, degrees: Degrees, *, mixed: bool) -> tuple[float, ...]:
        """Args: mixed: whether the devices are those of `cluster.groups`."""
        lanes, groups = degrees.lanes, self.cluster.groups if mixed else ()
        bad = [r for r in self.cluster.slow_ranks if not 0 <= r < lanes]
        if bad:
            raise UsageError(f"cluster: slow_ranks holds {bad[0]}, expected ranks 0 … {lanes - 1} of data × context")
        if not groups and not self.cluster.slow_ranks:
            return ()
        speeds = np.ones(lanes)
        if groups:
            rate = self.run.precision
            own = profile.peak_flops(rate) * profile.gemm_efficiency
            by_device: list[float] = []
            for group in groups:
                other = load_profile(group.device)
                relative = other.peak_flops(rate) * other.gemm_efficiency / own
                by_device += [relative] * (group.nodes * other.node_size)
            inner = degrees.tensor
            speeds = np.array([by_device[min(i * inner, len(by_device) - 1)] for i in range(lanes)])
        for rank in self.cluster.slow_ranks:
            speeds[rank] /= self.cluster.slow_factor
        return tuple(float(s) for s in speeds)

    def stream(self, scenario: Scenario) -> Documents:
        """The documents, refused where one is longer than the context, or has to stay whole and has no room.

        Raises:
            UsageError: names the longest document and what would hold it.
        """
        one_step = scenario.tokens_per_step
        held = scenario.degrees.lanes * scenario.chunk_tokens
        section = self.documents
        context = section.context_tokens or (held if scenario.shares_documents else max(held, section.longest))
        documents = section.documents(min(context, one_step))
        longest = self.check_context(documents)
        if longest > held and scenario.shares_documents:
            needed = -(-longest // scenario.degrees.lanes)
            raise UsageError(
                f"documents: one has {longest} tokens, more than the {held} that data × context × chunk_tokens hold "
                f"together; nearest: chunk_tokens={needed}, or documents.cut_at_chunks=true, which cuts it"
            )
        self.check_number(documents, one_step, scenario)
        return documents

    def check_context(self, documents: Documents) -> int:
        """The longest document; refused where the model does not take it.

        Raises:
            UsageError: names the context that would.
        """
        longest, most = int(documents.lengths.max()), self.documents.context_tokens
        if most and longest > most:
            raise UsageError(
                f"documents: one has {longest} tokens, more than context_tokens={most}; "
                f"nearest: context_tokens={longest}"
            )
        return longest

    def check_number(self, documents: Documents, one_step: int, scenario: Scenario | None = None) -> None:
        """Refuse more documents than this machine can plan: of a step, and of all sampled ones together.

        Raises:
            UsageError: names the largest chunk or number of batches that is taken.
        """
        number = one_step / max(1.0, float(documents.lengths.mean()))
        if number > MOST_DOCUMENTS:
            share = MOST_DOCUMENTS / number
            near = f"{int(one_step * share)} tokens a step"
            if scenario is not None:
                near = f"chunk_tokens={int(scenario.chunk_tokens * share)}"
            raise UsageError(
                f"documents: a step of {one_step:,} tokens holds about {number:,.0f} documents, expected at most "
                f"{MOST_DOCUMENTS:,}; nearest: {near}"
            )
        batches = self.sampling.batches
        if scenario is not None and batches * scenario.micro_batches > MOST_PLANS:
            near = f"batches={MOST_PLANS // scenario.micro_batches}"
            if scenario.micro_batches > MOST_PLANS:
                near = f"batches=1 and micro_batches={MOST_PLANS}"
            raise UsageError(
                f"sampling: {batches:,} batches of {scenario.micro_batches:,} micro-batches, each planned, "
                f"expected at most {MOST_PLANS:,} plans; nearest: {near}"
            )
        if number * batches > MOST_DOCUMENTS:
            raise UsageError(
                f"sampling: {batches:,} batches of about {number:,.0f} documents, expected at most {MOST_DOCUMENTS:,} "
                f"together; nearest: batches={max(1, int(MOST_DOCUMENTS / number))}"
            )


def shape_from_file(path: Path) -> ModelShape:
    """The shape of a Transformers `config.json` (or the folder of one).

    Raises:
        UsageError: no such file, no JSON, or a family that the product does not know.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"model: there is no file {file}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model: {file} is no JSON: {error}") from error
    c = config_from_hf(values)
    return ModelShape(
        str(values.get("model_type", file.parent.name)), c.layers, c.hidden_size, c.heads, c.kv_heads, c.ffn_size,
        c.vocab_size, head_dim=c.head_size, tied_head=c.tied_head,
    )  # fmt: skip


PolicyOrAll = Literal["packed", "wlb", "per_document_cp", "balanced", "all"]
