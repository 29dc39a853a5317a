"""Core attention of one nano-batch, computed where the plan says: four autograd steps on one chain.

`send` starts the transfer of the query, key and value rows that leave; `attend_local` computes the tasks that need only
local rows; `attend_received` waits, computes the others and starts the way back of their outputs; `finish` waits and
puts the returned outputs beside the local ones. Local and received tasks are steps of their own so that whoever
interleaves two nano-batches can put one half's local tasks under the other half's transfers.

The steps hand on a one-element *token*. It makes autograd reach each of them in backward on every rank, also on one
that sends or receives nothing: without the chain the collective of the backward pass would be missing on that rank and
the others would hang.

Autograd runs ready nodes in reverse order of creation, so a forward that interleaves two nano-batches gives a backward
that interleaves them too, with the reverse transfers hidden in the same way.

Between the passes a server keeps what it received and computed (`memory="keep"`), or drops it and the home rank sends
it again in backward (`"resend"`: 6 instead of 4 query-sized and 3 instead of 2 key/value-sized transfers over both
passes, and no memory for other ranks' rows in between). Both give the same gradients.

A sink (one more key per head without a value) is added where a row is computed; so is its gradient, and the sum of
the ranks' gradients is that of all rows. Nothing more is sent for it.

Shapes: T local tokens, N query heads, K key/value heads, H head size; Q, S rows of queries and of keys/values that are
sent or received. Keys and values travel together as (S, 2, K, H).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from steelyard.attention import accumulator_dtype
from steelyard.attention.interface import Backend
from steelyard.attention.sink import QueryRuns, add_sink, check_sink, query_runs, sink_gradient_of
from steelyard.collectives import Exchange, Point, Transfer
from steelyard.domain.plan import DispatchTables, KernelTasks
from steelyard.errors import UsageError
from steelyard.runtime.arena import Arena
from steelyard.runtime.row_runs import RowRuns, rows_per_rank

Memory: TypeAlias = Literal["keep", "resend"]


@dataclass(frozen=True, eq=False)
class Kept:
    """Results of one layer's attention, for a second pass through it under somebody else's activation checkpointing.

    The second pass brings its own q, k and v; with these it needs no transfer and no kernel. `received` is what the
    server holds between the passes (q, keys with values, outputs, log-sum-exp), four times None with "resend".
    """

    out_TNH: Tensor
    lse_TN: Tensor
    received: tuple[Tensor | None, ...]
    out_version: int

    @property
    def intact(self) -> bool:
        """Whether nobody has changed the output in place since."""
        return self.out_TNH._version == self.out_version


@dataclass
class Call:
    """What one layer's attention holds between its steps; fields are filled and dropped as the steps run.

    With `keep`, `kept` holds the results from `finish` to backward; a call with an `answer` takes its results from it.
    """

    core_attention: CoreAttention
    layer: int
    needs_backward: bool
    keep: bool = False
    kept: Kept | None = None
    answer: Kept | None = None
    backward_started: bool = False
    token: Tensor | None = None
    q_TNH: Tensor | None = None
    k_TKH: Tensor | None = None
    v_TKH: Tensor | None = None
    sink_N: Tensor | None = None
    sink_learns: bool = False
    out_TNH: Tensor | None = None
    lse_TN: Tensor | None = None
    q_QNH: Tensor | None = None
    kv_S2KH: Tensor | None = None
    out_QNH: Tensor | None = None
    lse_QN: Tensor | None = None
    dout_TNH: Tensor | None = None
    dq_TNH: Tensor | None = None
    dk_TKH: Tensor | None = None
    dv_TKH: Tensor | None = None
    dsink_N: Tensor | None = None
    sent: list[Tensor] = field(default_factory=list)
    arriving: list[Tensor] = field(default_factory=list)
    loans: tuple[Tensor | None, ...] = ()  # what the arena lent for saved tensors, whatever saved-tensor hooks keep
    transfers: list[Transfer] = field(default_factory=list)

    def start(self, phase: str, pairs: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
        """Start one transfer per (send, receive, send counts, receive counts)."""
        core = self.core_attention
        point = Point(phase, self.layer, core.nano_batch, core.step)
        for send, receive, send_counts, receive_counts in pairs:
            self.transfers.append(core.exchange.start(send, receive, send_counts, receive_counts, point))
            self.sent.append(send)
            self.arriving.append(receive)

    def wait(self) -> list[Tensor]:
        """Wait for the transfers under way, give their send buffers back and return what arrived."""
        for transfer in self.transfers:
            transfer.wait()
        self.core_attention.arena.release(*self.sent)
        arrived = self.arriving
        self.transfers, self.sent, self.arriving = [], [], []
        return arrived

    def add_sink(self, tasks: KernelTasks, out: list[Tensor], lse: list[Tensor]) -> None:
        """Take the sink's share from rows that were just computed."""
        if self.sink_N is not None:
            add_sink(self.sink_N, self.core_attention.queries_of(tasks), out, lse)

    def add_to_sink_gradient(
        self, tasks: KernelTasks, dout: list[Tensor], out: list[Tensor], lse: list[Tensor]
    ) -> None:
        """Add what rows that this server computed give to the sink's gradient, if one is asked for."""
        if self.sink_N is None or not self.sink_learns:
            return
        gradient_N = sink_gradient_of(self.sink_N, self.core_attention.queries_of(tasks), dout, out, lse)
        self.dsink_N = gradient_N if self.dsink_N is None else self.dsink_N.add_(gradient_N)


class CoreAttention:
    """Core attention of one nano-batch on one rank: call it, or take its four steps one by one.

    Args:
        tables: what this rank sends, receives and computes.
        backend: the attention kernels.
        exchange: the transfers; unused when `tables.exchanges` is False.
        arena: lends the exchange buffers.
        memory: what a server does with received rows between the passes.
        nano_batch, step: named in traces and errors.
    """

    def __init__(
        self,
        tables: DispatchTables,
        backend: Backend,
        exchange: Exchange,
        arena: Arena,
        *,
        memory: Memory = "keep",
        nano_batch: int = 0,
        step: int = 0,
    ) -> None:
        self.tables, self.backend, self.exchange, self.arena = tables, backend, exchange, arena
        self.memory = memory
        self.nano_batch, self.step = nano_batch, step
        self.meter = exchange.meter
        self._queries: WeakKeyDictionary[KernelTasks, QueryRuns] = WeakKeyDictionary()
        self.q_runs, self.kv_runs = RowRuns(tables.q_send), RowRuns(tables.kv_send)
        self.q_send_counts, self.q_receive_counts, self.kv_send_counts, self.kv_receive_counts = (
            rows_per_rank(part.peer, part.rows, tables.ranks)
            for part in (tables.q_send, tables.q_receive, tables.kv_send, tables.kv_receive)
        )

    def queries_of(self, tasks: KernelTasks) -> QueryRuns:
        """The query rows of a table, worked out once for all layers and both passes."""
        if tasks not in self._queries:
            self._queries[tasks] = query_runs(tasks)
        return self._queries[tasks]

    @contextmanager
    def kernel(self, name: str, call: Call) -> Iterator[None]:
        """Around a back end: measured, and without autocast, which would round its fp32 sums to 16 bits."""
        with (
            torch.autocast(self.arena.device.type, enabled=False),
            self.meter.span(name, "attention", layer=call.layer, nano_batch=self.nano_batch),
        ):
            yield

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int = 0) -> Tensor:
        """Attention output (T, N, H) of this rank's tokens; T rows of documents packed as in the layout."""
        call = self.send(q_TNH, k_TKH, v_TKH, layer)
        self.attend_local(call)
        self.attend_received(call)
        return self.finish(call)

    def send(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer: int,
        *,
        keep: bool = False,
        answer: Kept | None = None,
        sink_N: Tensor | None = None,
    ) -> Call:
        """Start the transfer of the rows that leave.

        Args:
            keep: leave the results in `Call.kept` until backward, also where gradients are off for now.
            answer: what an earlier call with the same rows kept: nothing is sent or computed again.
            sink_N: logits of one more key per head without a value, the same on every rank; None: no such key. Its
                gradient covers the rows that this rank computed: sum it over the ranks, as all others.

        Raises:
            UsageError: q, k or v do not have the rows of the layout, or the sink is not one logit per head.
        """
        for name, tensor in (("q", q_TNH), ("k", k_TKH), ("v", v_TKH)):
            if tensor.dim() != 3 or tensor.shape[0] != self.tables.tokens:
                raise UsageError(
                    f"core attention: {name} has shape {tuple(tensor.shape)}, expected (tokens, heads, head size) with "
                    f"{self.tables.tokens} tokens, as the plan of this nano-batch says; were the documents changed "
                    "after planning?"
                )
        given = [q_TNH, k_TKH, v_TKH]
        if sink_N is not None:
            check_sink(sink_N, q_TNH.shape[1])
            given.append(sink_N)
        needs_backward = keep or (torch.is_grad_enabled() and any(t.requires_grad for t in given))
        call = Call(self, layer, needs_backward, keep, answer=answer)
        call.token = cast(Tensor, _Send.apply(call, q_TNH, k_TKH, v_TKH, sink_N))  # type: ignore[no-untyped-call]
        return call

    def attend_local(self, call: Call) -> None:
        """Compute the tasks that need only this rank's rows."""
        call.token = cast(Tensor, _AttendLocal.apply(call, call.token))  # type: ignore[no-untyped-call]

    def attend_received(self, call: Call) -> None:
        """Wait for other ranks' rows, compute the tasks that need them and start the outputs' way back."""
        call.token = cast(Tensor, _AttendReceived.apply(call, call.token))  # type: ignore[no-untyped-call]

    def finish(self, call: Call) -> Tensor:
        """Wait for the outputs that were computed elsewhere; all outputs (T, N, H) of this rank's tokens."""
        token, call.token = call.token, None
        return cast(Tensor, _Finish.apply(call, token))  # type: ignore[no-untyped-call]


Stores: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""(q, k, v) as the kernels take them, each [own rows, received rows]."""


def _local_store(call: Call) -> Stores:
    q, k, v = call.q_TNH, call.k_TKH, call.v_TKH
    assert q is not None and k is not None and v is not None
    return [q, q[:0]], [k, k[:0]], [v, v[:0]]


def _both_stores(call: Call) -> Stores:
    q, k, v, q_QNH, kv_S2KH = call.q_TNH, call.k_TKH, call.v_TKH, call.q_QNH, call.kv_S2KH
    assert q is not None and k is not None and v is not None and q_QNH is not None and kv_S2KH is not None
    return [q, q_QNH], [k, kv_S2KH[:, 0]], [v, kv_S2KH[:, 1]]


_Pending: TypeAlias = tuple[Tensor, Tensor, list[int], list[int]]
"""What `Call.start` takes: send, receive, rows to each peer, rows from each peer."""


def _query_transfer(core: CoreAttention, rows_TX: Tensor) -> _Pending:
    """The rows of queries that leave, out of any tensor with one row per local token."""
    send = core.arena.acquire((core.tables.q_sent, *rows_TX.shape[1:]), rows_TX.dtype)
    receive = core.arena.acquire((core.tables.q_received, *rows_TX.shape[1:]), rows_TX.dtype)
    core.q_runs.pack(rows_TX, send)
    return send, receive, core.q_send_counts, core.q_receive_counts


def _return_transfer(core: CoreAttention, rows_QX: Tensor) -> _Pending:
    """One row per received query on its way home."""
    back = core.arena.acquire((core.tables.q_sent, *rows_QX.shape[1:]), rows_QX.dtype)
    return rows_QX, back, core.q_receive_counts, core.q_send_counts


def _query_key_value_transfers(call: Call) -> list[_Pending]:
    """Queries, and keys with values, on their way to the servers."""
    core, q, k, v = call.core_attention, call.q_TNH, call.k_TKH, call.v_TKH
    assert q is not None and k is not None and v is not None
    kv_send = core.arena.acquire((core.tables.kv_sent, 2, *k.shape[1:]), k.dtype)
    kv_receive = core.arena.acquire((core.tables.kv_received, 2, *k.shape[1:]), k.dtype)
    core.kv_runs.pack(k, kv_send[:, 0])
    core.kv_runs.pack(v, kv_send[:, 1])
    return [_query_transfer(core, q), (kv_send, kv_receive, core.kv_send_counts, core.kv_receive_counts)]


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sink_N: Tensor | None) -> Tensor:
        core = call.core_attention
        ctx.call, ctx.kv_dtype = call, k_TKH.dtype
        if sink_N is not None:
            ctx.sink_dtype, call.sink_N = sink_N.dtype, sink_N.detach()
            call.sink_learns = ctx.needs_input_grad[4]
        call.q_TNH, call.k_TKH, call.v_TKH = q_TNH.detach(), k_TKH.detach(), v_TKH.detach()
        if core.tables.exchanges and call.answer is None:
            call.start("dispatch", _query_key_value_transfers(call))
        return q_TNH.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtoken: Tensor) -> tuple[None, Tensor, Tensor, Tensor, Tensor | None]:
        call: Call = ctx.call
        core = call.core_attention
        dq, dk, dv = call.dq_TNH, call.dk_TKH, call.dv_TKH
        assert dq is not None and dk is not None and dv is not None
        if core.tables.exchanges:
            dq_back, dkv_back = call.wait()
            core.q_runs.put_back(dq, dq_back)
            core.kv_runs.add_back(dk, dkv_back[:, 0])
            core.kv_runs.add_back(dv, dkv_back[:, 1])
            core.arena.release(dq_back, dkv_back)
        dsink = call.dsink_N.to(ctx.sink_dtype) if call.dsink_N is not None else None
        call.dq_TNH = call.dk_TKH = call.dv_TKH = call.dsink_N = None
        return None, dq, dk.to(ctx.kv_dtype), dv.to(ctx.kv_dtype), dsink


class _AttendLocal(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> Tensor:
        core, q = call.core_attention, call.q_TNH
        ctx.call = call
        assert q is not None
        if call.answer is not None:
            return token.new_zeros(1)
        call.out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        call.lse_TN = torch.empty(q.shape[:2], dtype=accumulator_dtype(q.dtype), device=q.device)
        out, lse = [call.out_TNH, call.out_TNH[:0]], [call.lse_TN, call.lse_TN[:0]]
        with core.kernel("local tasks", call):
            core.backend.forward(core.tables.local_tasks, *_local_store(call), out, lse)
            call.add_sink(core.tables.local_tasks, out, lse)
        return token.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtoken: Tensor) -> tuple[None, Tensor]:
        call: Call = ctx.call
        core = call.core_attention
        out, lse, dout = call.out_TNH, call.lse_TN, call.dout_TNH
        dq, dk, dv = call.dq_TNH, call.dk_TKH, call.dv_TKH
        assert out is not None and lse is not None and dout is not None
        assert dq is not None and dk is not None and dv is not None
        results = [dout, dout[:0]], [out, out[:0]], [lse, lse[:0]]
        with core.kernel("local tasks, backward", call):
            core.backend.backward(
                core.tables.local_tasks, results[0], *_local_store(call), *results[1:],
                [dq, dq[:0]], [dk, dk[:0]], [dv, dv[:0]],
            )  # fmt: skip
            call.add_to_sink_gradient(core.tables.local_tasks, *results)
        call.q_TNH = call.k_TKH = call.v_TKH = call.out_TNH = call.lse_TN = call.dout_TNH = call.sink_N = None
        return None, dtoken.new_zeros(1)


class _AttendReceived(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> Tensor:
        core = call.core_attention
        ctx.call = call
        if core.tables.exchanges and call.answer is None:
            arena = core.arena
            call.q_QNH, call.kv_S2KH = call.wait()
            assert call.out_TNH is not None and call.lse_TN is not None
            call.out_QNH = arena.acquire(tuple(call.q_QNH.shape), call.q_QNH.dtype)
            call.lse_QN = arena.acquire(tuple(call.q_QNH.shape[:2]), call.lse_TN.dtype)
            out, lse = [call.out_TNH, call.out_QNH], [call.lse_TN, call.lse_QN]
            with core.kernel("received tasks", call):
                core.backend.forward(core.tables.received_tasks, *_both_stores(call), out, lse)
                call.add_sink(core.tables.received_tasks, out, lse)
            returning = [call.out_QNH]
            if call.needs_backward and core.memory == "resend":
                returning.append(call.lse_QN)
            call.start("return", [_return_transfer(core, rows) for rows in returning])
        return token.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtoken: Tensor) -> tuple[None, Tensor]:
        call: Call = ctx.call
        core, q, k, out, lse, dout = (
            call.core_attention, call.q_TNH, call.k_TKH, call.out_TNH, call.lse_TN, call.dout_TNH
        )  # fmt: skip
        assert q is not None and k is not None and out is not None and lse is not None and dout is not None
        sum_dtype = accumulator_dtype(k.dtype)
        call.dq_TNH = torch.empty_like(q, memory_format=torch.contiguous_format)
        call.dk_TKH = torch.zeros(k.shape, dtype=sum_dtype, device=k.device)
        call.dv_TKH = torch.zeros(k.shape, dtype=sum_dtype, device=k.device)
        if core.tables.exchanges:
            arena, dq, dk, dv = core.arena, call.dq_TNH, call.dk_TKH, call.dv_TKH
            dout_QNH, *again = call.wait()
            if again:
                call.q_QNH, call.kv_S2KH, call.out_QNH, call.lse_QN = again
            assert call.q_QNH is not None and call.kv_S2KH is not None
            assert call.out_QNH is not None and call.lse_QN is not None
            dq_QNH = arena.acquire(tuple(call.q_QNH.shape), q.dtype)
            dkv_S2KH = arena.acquire(tuple(call.kv_S2KH.shape), sum_dtype).zero_()
            results = [dout, dout_QNH], [out, call.out_QNH], [lse, call.lse_QN]
            with core.kernel("received tasks, backward", call):
                core.backend.backward(
                    core.tables.received_tasks, results[0], *_both_stores(call), *results[1:],
                    [dq, dq_QNH], [dk, dkv_S2KH[:, 0]], [dv, dkv_S2KH[:, 1]],
                )  # fmt: skip
                call.add_to_sink_gradient(core.tables.received_tasks, *results)
            arena.release(dout_QNH, *(again or call.loans))
            call.loans = ()
            call.q_QNH = call.kv_S2KH = call.out_QNH = call.lse_QN = None
            dkv_send = dkv_S2KH
            if sum_dtype != k.dtype:
                dkv_send = arena.acquire(tuple(dkv_S2KH.shape), k.dtype).copy_(dkv_S2KH)
                arena.release(dkv_S2KH)
            dkv_back = arena.acquire((core.tables.kv_sent, 2, *k.shape[1:]), k.dtype)
            keys_home = (dkv_send, dkv_back, core.kv_receive_counts, core.kv_send_counts)
            call.start("gradient return", [_return_transfer(core, dq_QNH), keys_home])
        return None, dtoken.new_zeros(1)


def _leave_for_backward(ctx: Any, call: Call, received: tuple[Tensor | None, ...]) -> Tensor:
    """Hand over from the forward pass of `_Finish` to its backward pass; the output."""
    out, lse = call.out_TNH, call.lse_TN
    assert out is not None and lse is not None
    if call.keep:
        # Detached: `out` itself will be part of the graph that holds this call, and would keep itself alive.
        call.kept = Kept(out.detach(), lse, received, out._version)
    if call.needs_backward:
        # Through save_for_backward: torch then checks in-place changes and honours saved-tensor hooks. Such hooks may
        # keep another tensor over the same memory, so the call itself holds what is lent until backward has used it.
        call.loans = received
        ctx.save_for_backward(call.q_TNH, call.k_TKH, call.v_TKH, call.sink_N, out, lse, *received)
    elif call.answer is None:
        call.core_attention.arena.release(*received)
    call.answer = None
    call.q_TNH = call.k_TKH = call.v_TKH = call.sink_N = call.out_TNH = call.lse_TN = None
    call.q_QNH = call.kv_S2KH = call.out_QNH = call.lse_QN = None
    return out


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> Tensor:
        core = call.core_attention
        ctx.call = call
        received: tuple[Tensor | None, ...] = (None, None, None, None)
        if call.answer is not None:
            # Another tensor over the same rows: what is returned here becomes part of a graph.
            call.out_TNH, call.lse_TN = call.answer.out_TNH.detach(), call.answer.lse_TN
            return _leave_for_backward(ctx, call, call.answer.received)
        out = call.out_TNH
        assert out is not None and call.q_TNH is not None
        if core.tables.exchanges:
            # What was sent home is this server's own output, which backward may read: `wait` must not give it back.
            call.sent.clear()
            out_back, *lse_back = call.wait()
            core.q_runs.put_back(out, out_back)
            core.arena.release(out_back)
            received = (call.q_QNH, call.kv_S2KH, call.out_QNH, call.lse_QN)
            if lse_back:
                assert call.lse_TN is not None
                core.q_runs.put_back(call.lse_TN, lse_back[0])
                core.arena.release(*lse_back, *received)
                received = (None, None, None, None)
        return _leave_for_backward(ctx, call, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TNH: Tensor) -> tuple[None, Tensor]:
        call: Call = ctx.call
        core = call.core_attention
        if call.backward_started:
            raise UsageError(
                "core attention: backward ran twice through the same forward (retain_graph=True?); its exchange "
                "buffers are given back after the first time, so run forward again"
            )
        (
            call.q_TNH, call.k_TKH, call.v_TKH, call.sink_N, call.out_TNH, call.lse_TN,
            call.q_QNH, call.kv_S2KH, call.out_QNH, call.lse_QN,
        ) = ctx.saved_tensors  # fmt: skip
        # Not before: reading the saved tensors may run the checkpointed layer once more, which is answered from `kept`.
        call.backward_started, call.kept = True, None
        call.dout_TNH = dout_TNH if dout_TNH.stride(-1) == 1 else dout_TNH.contiguous()
        if core.tables.exchanges:
            transfers = [_query_transfer(core, call.dout_TNH)]
            if call.q_QNH is None:
                assert call.out_TNH is not None and call.lse_TN is not None
                transfers += _query_key_value_transfers(call)
                transfers += [_query_transfer(core, call.out_TNH), _query_transfer(core, call.lse_TN)]
            call.start("gradient dispatch", transfers)
        return None, dout_TNH.new_zeros(1)
