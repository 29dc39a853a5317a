"""One configuration to be simulated: model, device, degrees and every choice that changes time or memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from steelyard.cost.peak_memory import Recompute
from steelyard.cost.profiles import DeviceProfile, Precision
from steelyard.domain.degrees import Degrees, Sharding, check_degrees
from steelyard.domain.model_shape import ModelShape
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.simulate.workloads import LayoutName, PolicyName, WorkRequest

ContextExchange: TypeAlias = Literal["gather", "gather_overlapped", "ring"]
ScheduleName: TypeAlias = Literal["1f1b", "interleaved", "lockstep"]


@dataclass(frozen=True)
class Scenario:
    """Everything an estimate depends on, except the documents.

    Attributes:
        model, profile, degrees: what runs on what, and how it is divided.
        chunk_tokens: tokens of a rank in a nano-batch. With a context axis, its ranks hold a sequence together.
        micro_batches: per step; with ping-pong each is two nano-batches.
        policy: who computes core attention.
        precision: of matrix products; attention stays in 16 bits under fp8.
        sharding: what data parallelism shards.
        shard_ranks: ranks over which state is sharded, the rest being copies of them; 0: all of data × context.
        recompute: what backward computes again.
        kernel: attention kernel generation; `auto`: the profile's first.
        ping_pong: two nano-batches alternate so that transfers hide under work (balanced only).
        sequence_parallel: norms and residuals are split over the tensor axis too.
        fused: element-wise kernels are fused (compiled or hand-written), not run one by one.
        tensor_overlap: transfers of the tensor axis run beside the products that they feed.
        context_exchange: how keys reach the ranks of the context axis.
        gradient_overlap: gradients are reduced while backward still runs.
        gradient_bytes: of each parameter's gradient as it is reduced.
        sliced_state: with a sharded optimizer, ranks own a slice of every tensor and copy each slice by itself.
        interleaved: virtual stages are used as the interleaved schedule (else 1F1B).
        keep_received: servers keep what they received until backward; else it is sent again.
        cut_documents: documents end with their chunk (balanced).
        packing_breakpoint: wlb: 0 packs with the planner's policy; else as `simulate.packing` with this breakpoint.
        tolerance: of the balanced policy.
        planner: of the balanced policy: ours, or `greedy`, the published idea, for comparisons.
        layout: of the balanced policy: documents fill rank after rank, or lie as the planner chooses (no pipeline).
        speeds: relative speed of each rank of data × context; () means equal.
        speed: of all devices beside what the profile says: a step takes 1/speed times as long.
        extra_overhead: share of a step lost to what is not modelled; 0 by default, named in every report.
        hidden_gather: share of an exposed gather of keys that is hidden after all: a free constant of reproductions.
        exchange_overhead_s: of each dispatch to servers, per layer and direction, beside the transfer itself.
        chunked_loss: the loss is computed chunk by chunk: logits are never there as a whole.
        mixed_precision: 16-bit weights beside a 32-bit master copy; else one type.
        skip_optimizer: leave the optimizer step out (some benchmarks do).
    """

    model: ModelShape
    profile: DeviceProfile
    degrees: Degrees
    chunk_tokens: int
    micro_batches: int = 1
    policy: PolicyName = "balanced"
    precision: Precision = "bf16"
    sharding: Sharding = "optimizer"
    shard_ranks: int = 0
    recompute: Recompute = "none"
    kernel: str = "auto"
    ping_pong: bool = False
    sequence_parallel: bool = True
    fused: bool = True
    tensor_overlap: bool = False
    context_exchange: ContextExchange = "gather"
    gradient_overlap: bool = True
    gradient_bytes: int = 4
    sliced_state: bool = False
    keep_received: bool = True
    cut_documents: bool = False
    packing_breakpoint: int = 0
    tolerance: float = 0.05
    planner: Literal["balanced", "greedy"] = "balanced"
    layout: LayoutName = "contiguous"
    speeds: tuple[float, ...] = ()
    speed: float = 1.0
    extra_overhead: float = 0.0
    hidden_gather: float = 0.0
    exchange_overhead_s: float = 0.0
    skip_optimizer: bool = False
    chunked_loss: bool = False
    mixed_precision: bool = True

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.micro_batches < 1:
            raise UsageError(
                f"scenario: chunk_tokens={self.chunk_tokens}, micro_batches={self.micro_batches}, expected at least 1"
            )
        if not 0 <= self.extra_overhead < 10 or not 0 <= self.hidden_gather <= 1:
            raise UsageError(
                f"scenario: extra_overhead={self.extra_overhead}, hidden_gather={self.hidden_gather}, "
                "expected 0 … 10 and 0 … 1"
            )
        lanes = self.degrees.lanes
        if self.speeds and len(self.speeds) != lanes:
            raise UsageError(f"scenario: {len(self.speeds)} speeds for {lanes} ranks of data × context; give one each")
        if min((*self.speeds, self.speed)) <= 0:
            raise UsageError(f"scenario: speeds={self.speeds}, speed={self.speed}, expected positive numbers")
        virtual, stages = self.degrees.virtual_stages, self.degrees.stage
        if virtual > 1 and stages == 1:
            raise UsageError(f"degrees: virtual_stages={virtual} with one stage; nearest: virtual_stages=1")
        if virtual > 1 and self.policy == "balanced":
            raise UsageError(
                "policy 'balanced' runs stages in lockstep ticks, which have no virtual stages; "
                "nearest: virtual_stages=1"
            )
        if virtual > 1 and self.micro_batches % stages:
            above = -(-self.micro_batches // stages) * stages
            raise UsageError(
                f"the interleaved schedule needs micro_batches ({self.micro_batches}) to be a multiple of the stages "
                f"({stages}); nearest: micro_batches={above}"
            )
        if self.ping_pong and self.policy != "balanced":
            raise UsageError(
                f"ping_pong hides dispatched attention; policy {self.policy!r} dispatches none: set it false"
            )

    @property
    def nano_batches(self) -> int:
        """Chunks of a rank in a micro-batch."""
        return 2 if self.ping_pong else 1

    @property
    def keeps_received(self) -> bool:
        """Whether servers keep what they received; backward ticks of a lockstep pipeline run on other ranks."""
        return self.keep_received and self.schedule_name != "lockstep"

    @property
    def shares_documents(self) -> bool:
        """Whether a document may lie on all ranks of data × context, so that they must hold it together.

        Other policies cut documents where a group's tokens end, at any number of stages, or give a group as many tokens
        as it needs.
        """
        return self.policy == "balanced" and not self.cut_documents

    @property
    def shards(self) -> int:
        """Ranks over which state is sharded."""
        return min(self.shard_ranks or self.degrees.lanes, self.degrees.lanes)

    @property
    def tokens_per_step(self) -> int:
        return self.degrees.lanes * self.chunk_tokens * self.micro_batches * self.nano_batches

    @property
    def schedule_name(self) -> ScheduleName | None:
        """Which pipeline schedule runs; None without a pipeline."""
        if self.degrees.stage == 1:
            return None
        if self.policy == "balanced":
            return "lockstep"
        return "interleaved" if self.degrees.virtual_stages > 1 else "1f1b"

    @property
    def element_bytes(self) -> int:
        """Of an activation; matrix products in fp8 have theirs in 16 bits outside."""
        return 4 if self.precision == "fp32" else 2

    @property
    def kernel_name(self) -> str:
        """Attention kernel generation; `auto` by its name."""
        return next(iter(self.profile.kernels)) if self.kernel == "auto" else self.kernel

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one tensor index on a node."""
        return max(1, self.profile.node_size // self.degrees.tensor)

    @property
    def local_attention(self) -> AttentionShape:
        """Heads of one device of the tensor axis."""
        tensor, model = self.degrees.tensor, self.model
        heads = model.heads // tensor
        return AttentionShape(heads, max(1, model.kv_heads // tensor), model.head_size, self.element_bytes)

    def check(self, devices: int | None = None) -> None:
        """Refuse degrees that cannot be laid out. Raises UsageError."""
        self.profile.peak_flops(self.precision)
        self.profile.kernel(self.kernel)
        check_degrees(self.degrees, self.model, devices or self.degrees.devices, node_size=self.profile.node_size)

    def request(self, batches: int, seed: int) -> WorkRequest:
        """What must be planned for it."""
        degrees = self.degrees
        balanced = self.policy == "balanced"
        return WorkRequest(
            policy=self.policy,
            data=degrees.data,
            context=degrees.context,
            stage=degrees.stage if balanced else 1,
            chunk_tokens=self.chunk_tokens,
            micro_batches=self.micro_batches,
            nano_batches=self.nano_batches,
            ranks_per_node=self.ranks_per_node if balanced else degrees.context,
            tolerance=self.tolerance,
            planner=self.planner if balanced else "balanced",
            layout=self.layout if balanced else "contiguous",
            kernel=self.profile.kernel(self.kernel) if balanced else None,
            memory="keep" if self.keeps_received else "resend",
            shape=self.local_attention if balanced else self.model.attention(),
            speeds=self.speeds if balanced else (),
            cut_documents=self.cut_documents,
            batches=batches,
            seed=seed,
            packing_breakpoint=self.packing_breakpoint if self.policy == "wlb" else 0,
        )

    def replace(self, **changes: Any) -> Scenario:
        """A copy with other choices."""
        return dataclasses.replace(self, **changes)
