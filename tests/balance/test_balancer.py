"""`Balancer.attention` in one process; several ranks are in tests/multiprocess/test_balancer.py."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from steelyard.attention import core_attention_reference
from steelyard.attention.sink import QueryRuns, query_runs
from steelyard.balance import Balancer, Kernel, NanoBatchPlan
from steelyard.domain.layout import Layout
from steelyard.domain.plan import KernelTasks
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.runtime import dispatch

LENGTHS = [7, 1, 13, 4]


def qkv(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), n, 8, generator=draw, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]


def test_no_shape_is_needed_and_a_step_is_planned_once() -> None:
    balancer = Balancer()
    q, k, v = qkv()
    lengths = list(LENGTHS)
    for _ in range(3):
        out = balancer.attention(q, k, v, doc_lens=lengths)
    assert torch.allclose(out, core_attention_reference(q, k, v, LENGTHS), atol=1e-12)
    assert balancer._planned_steps == 1 and balancer.shape == AttentionShape(4, 2, 8, element_bytes=8)
    balancer.attention(q, k, v, doc_lens=list(LENGTHS))
    lengths[0], lengths[1] = 1, 7  # changed in place: another step
    assert torch.allclose(
        balancer.attention(q, k, v, doc_lens=lengths), core_attention_reference(q, k, v, lengths), atol=1e-12
    )
    assert balancer._planned_steps == 3


@pytest.mark.parametrize("given", [{"window": 3}, {"softcap": 2.0}, {"scale": 0.3}, {"window": 4, "softcap": 1.5}])
def test_other_functions_of_q_k_and_v(given: dict) -> None:
    q, k, v = qkv()
    balancer = Balancer()
    out = balancer.attention(q, k, v, doc_lens=LENGTHS, **given)
    expected = core_attention_reference(q, k, v, LENGTHS, **given)
    assert torch.allclose(out, expected, atol=1e-12)
    grads, wanted = (torch.autograd.grad((o * o).sum(), (q, k, v)) for o in (out, expected))
    for one, other in zip(grads, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-11)
    # The same balancer still computes plain attention, and a window that no document outgrows is none.
    plain = core_attention_reference(q, k, v, LENGTHS)
    assert torch.allclose(balancer.attention(q, k, v, doc_lens=LENGTHS), plain, atol=1e-12)
    assert torch.allclose(balancer.attention(q, k, v, doc_lens=LENGTHS, window=13), plain, atol=1e-12)


@pytest.mark.parametrize("given", [{}, {"window": 4, "softcap": 1.5, "scale": 0.3}])
def test_sinks_and_their_gradient(given: dict) -> None:
    q, k, v = qkv()
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    out = Balancer().attention(q, k, v, doc_lens=LENGTHS, sink=sink, **given)
    expected = core_attention_reference(q, k, v, LENGTHS, sink=sink, **given)
    assert torch.allclose(out, expected, atol=1e-12)
    grads, wanted = (torch.autograd.grad((o * o).sum(), (q, k, v, sink)) for o in (out, expected))
    for one, other in zip(grads, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_the_rows_of_a_sink_are_found_once_and_no_gradient_is_made_for_one_that_asks_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    def count(tasks: KernelTasks) -> QueryRuns:
        found.append(len(tasks))
        return query_runs(tasks)

    monkeypatch.setattr(dispatch, "query_runs", count)
    monkeypatch.setattr(dispatch, "sink_gradient_of", None)
    q, k, v = qkv()
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    balancer, lengths = Balancer(), list(LENGTHS)
    outs = [balancer.attention(q, k, v, doc_lens=lengths, sink=sink) for _ in range(3)]
    expected = core_attention_reference(q, k, v, LENGTHS, sink=sink)
    grads, wanted = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (sum(outs), 3 * expected))
    assert all(torch.allclose(one, other, atol=1e-11) for one, other in zip(grads, wanted, strict=True))
    assert found == [len(LENGTHS)]


def test_a_window_of_the_balancer_holds_for_attention_begun_by_hand() -> None:
    q, k, v = qkv()
    balancer = Balancer(shape=AttentionShape(4, 2, 8), window=3, dtype=torch.float64)
    nano = balancer.begin(plan=balancer.plan([LENGTHS]).nano_batches[0])
    assert torch.allclose(nano(q, k, v), core_attention_reference(q, k, v, LENGTHS, window=3), atol=1e-12)


def test_a_window_is_planned_for_and_dropped_where_no_document_outgrows_it() -> None:
    q, k, _ = qkv()
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    plan = balancer.plan([LENGTHS]).nano_batches[0]
    pairs = {w: balancer.core_attention_of(plan, Kernel(window=w), q, k).tables.local_pairs for w in (3, 13, None)}
    assert pairs[None] == sum(n * (n + 1) // 2 for n in LENGTHS) == pairs[13]
    assert pairs[3] == sum(min(i + 1, 3) for n in LENGTHS for i in range(n))


def test_shards_whatever_their_numbers() -> None:
    q, k, v = qkv()
    shards = [(40, 0, 7), (41, 0, 1), (7, 0, 13), (99, 0, 4)]
    expected = core_attention_reference(q, k, v, LENGTHS)
    assert torch.allclose(Balancer().attention(q, k, v, shards=shards), expected, atol=1e-12)
    with_ranks = [(*shard, 0) for shard in shards]
    assert torch.allclose(Balancer().attention(q, k, v, shards=with_ranks), expected, atol=1e-12)


def test_lengths_handed_over_early() -> None:
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    ahead = [balancer.prefetch([[5]]), balancer.prefetch([LENGTHS], note="mine")]
    step = balancer.plan([[3]])
    assert [f.result().step for f in ahead] == [0, 1] and step.step == 2
    assert ahead[1].result().notes == ("mine",)
    balancer.close()


def test_alternate_runs_two_forward_passes_in_turn() -> None:
    q, k, v = qkv()
    balancer = Balancer()
    balancer.attention(q, k, v, doc_lens=LENGTHS)
    plans = balancer.plan([LENGTHS, LENGTHS[::-1]]).nano_batches
    outs = balancer.alternate([lambda attention: attention(q, k, v), lambda _: balancer.attention(q, k, v)], plans)
    assert torch.allclose(outs[0], core_attention_reference(q, k, v, LENGTHS), atol=1e-12)
    assert torch.allclose(outs[1], core_attention_reference(q, k, v, LENGTHS[::-1]), atol=1e-12)


def test_whatever_is_planned_comes_after_what_was_handed_over_early() -> None:
    """Shards too: on a thread of their own they might come before it on one rank and after it on another."""

    class Watched(Balancer):
        def plan_layout(self, layout: Layout, index: int = 0, **options: Any) -> NanoBatchPlan:
            threads.append(threading.current_thread().name)
            return super().plan_layout(layout, index, **options)

    threads: list[str] = []
    balancer = Watched(shape=AttentionShape(4, 2, 8))
    balancer.plan_shards([(0, 0, 5)])
    ahead = balancer.prefetch([LENGTHS])
    assert balancer.plan_shards([(0, 0, 5)]).step == 2 and ahead.result(10).step == 1
    assert threads == [threading.current_thread().name, "steelyard-plan", "steelyard-plan"]
    balancer.close()


def test_what_begin_was_told_is_not_taken_for_documents_given_before() -> None:
    q, k, v = qkv()
    balancer = Balancer()
    balancer.attention(q, k, v, doc_lens=LENGTHS)
    balancer.begin(doc_lens=[sum(LENGTHS)])
    out = balancer.attention(q, k, v, doc_lens=LENGTHS)
    assert torch.allclose(out, core_attention_reference(q, k, v, LENGTHS), atol=1e-12)


def test_a_window_is_planned_once_for_a_plan() -> None:
    class Counting(Balancer):
        planned = 0

        def plan_layout(self, layout: Layout, index: int = 0, **options: Any) -> NanoBatchPlan:
            self.planned += 1
            return super().plan_layout(layout, index, **options)

    q, k, v = qkv()
    balancer = Counting(shape=AttentionShape(4, 2, 8))
    plan = balancer.plan([LENGTHS]).nano_batches[0]
    for softcap in (None, 2.0):
        for window in (3, 5, 3):
            out = balancer.begin(plan=plan)(q, k, v, kernel=Kernel(window=window, softcap=softcap))
            expected = core_attention_reference(q, k, v, LENGTHS, window=window, softcap=softcap)
            assert torch.allclose(out, expected, atol=1e-12)
    assert balancer.planned == 3, "the step, and two windows of it"
    del plan
    balancer.begin(doc_lens=LENGTHS)
    assert not balancer._windowed, "and forgotten with it"


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_the_query_s_own_key_is_refused(window: int) -> None:
    q, k, v = qkv()
    with pytest.raises(UsageError, match=f"window={window}: expected at least 1"):
        Balancer(window=window)
    balancer = Balancer(window=3)
    with pytest.raises(UsageError, match=f"window={window}: expected at least 1"):
        balancer.attention(q, k, v, doc_lens=LENGTHS, window=window)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("layer", [0, None])
def test_a_layer_run_again_that_may_be_one_of_two_passes_is_refused(use_reentrant: bool, layer: int | None) -> None:
    q, k, v = qkv()
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    plans = [balancer.plan([lengths]).nano_batches[0] for lengths in (LENGTHS, LENGTHS[::-1])]

    def run(attention: Any) -> torch.Tensor:
        return checkpoint(lambda x: attention(x.sin(), k, v, layer=layer).cos(), q, use_reentrant=use_reentrant)

    def both(named: bool) -> list[torch.Tensor]:
        outs = []
        for plan in plans:
            begun = balancer.begin(plan=plan)
            outs.append(run(begun if named else balancer.attention))
        return outs

    for first in (0, 1):  # also the one begun last: nothing says that it is the one
        outs = both(named=False)
        with pytest.raises(UsageError, match=r"begun last 1 more wait for backward.*object that begin returned"):
            outs[first].sum().backward()
        balancer = Balancer(shape=AttentionShape(4, 2, 8))
    q.grad = None
    out, other = both(named=True)
    (out.sum() + 2 * other.sum()).backward()
    expected = core_attention_reference(q.sin(), k, v, LENGTHS).cos().sum()
    expected = expected + 2 * core_attention_reference(q.sin(), k, v, LENGTHS[::-1]).cos().sum()
    assert q.grad is not None
    assert torch.allclose(q.grad, torch.autograd.grad(expected, q)[0], atol=1e-11)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_passes_that_end_one_by_one_are_told_apart(use_reentrant: bool, frozen: bool) -> None:
    """With `frozen`, no graph holds a call of attention: q, k and v need no gradient, only what comes after does."""
    q, k, v = qkv()
    weight = torch.ones(8, dtype=q.dtype, requires_grad=True)
    if frozen:
        q, k, v = q.detach(), k.detach(), v.detach()
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    for lengths in (LENGTHS, LENGTHS[::-1], LENGTHS):
        plan = balancer.plan([lengths]).nano_batches[0]
        with torch.no_grad():  # an evaluation in between does not count
            balancer.begin(plan=plan)
            balancer.attention(q, k, v, layer=0)
        balancer.begin(plan=plan)
        weight.grad = q.grad = None
        out = checkpoint(
            lambda x, w: (balancer.attention(x.sin(), k, v, layer=0) * w).sin(), q, weight, use_reentrant=use_reentrant
        )
        out.sum().backward()
        expected = (core_attention_reference(q.sin(), k, v, lengths) * weight).sin().sum()
        wanted = torch.autograd.grad(expected, [weight] if frozen else [weight, q])
        for one, other in zip([weight.grad, q.grad], wanted, strict=False):
            assert one is not None and torch.allclose(one, other, atol=1e-11)
    balancer.begin(plan=plan)
    assert len(balancer._in_flight) == 1, "what has ended is forgotten"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_two_passes_that_leave_no_trace_in_the_graph_are_refused_as_well(use_reentrant: bool) -> None:
    q, k, v = (tensor.detach() for tensor in qkv())
    weight = torch.ones(8, dtype=q.dtype, requires_grad=True)
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    outs = []
    for lengths in (LENGTHS, LENGTHS[::-1]):
        balancer.begin(doc_lens=lengths)
        outs.append(
            checkpoint(lambda w: (balancer.attention(q, k, v, layer=0) * w).sin(), weight, use_reentrant=use_reentrant)
        )
    with pytest.raises(UsageError, match="1 more wait for backward"):
        outs[0].sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("older_pass", [True, False])
@pytest.mark.parametrize("halves", [1, 2])
def test_alternated_passes_under_checkpointing_go_by_their_own_object(
    use_reentrant: bool, older_pass: bool, halves: int
) -> None:
    q, k, v = qkv()
    all_lengths = [LENGTHS[::-1], LENGTHS][:halves]
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    plans = balancer.plan(all_lengths).nano_batches
    if older_pass:
        balancer.attention(q, k, v, doc_lens=LENGTHS)

    def run(attention: Any) -> torch.Tensor:
        return checkpoint(lambda x: attention(x.sin(), k, v, layer=0).cos(), q, use_reentrant=use_reentrant)

    outs = balancer.alternate([lambda _: run(balancer.attention)] * halves, plans)
    with pytest.raises(UsageError, match="that alternate handed to forward"):
        sum(out.sum() for out in outs).backward()
    q.grad = None
    sum(out.sum() for out in balancer.alternate([run] * halves, plans)).backward()
    expected = sum(core_attention_reference(q.sin(), k, v, lengths).cos().sum() for lengths in all_lengths)
    assert torch.allclose(q.grad, torch.autograd.grad(expected, q)[0], atol=1e-11)


def test_documents_given_in_the_layer_itself_are_those_of_the_pass() -> None:
    """Two steps before backward, each told its documents where it is run: nothing is guessed."""
    q, k, v = qkv()
    balancer = Balancer()
    both = (list(LENGTHS), LENGTHS[::-1])
    outs = [
        checkpoint(
            lambda x, n=lengths: balancer.attention(x.sin(), k, v, doc_lens=n, layer=0).cos(), q, use_reentrant=False
        )
        for lengths in both
    ]
    (grad,) = torch.autograd.grad(outs[0].sum() + 2 * outs[1].sum(), q)
    expected = [core_attention_reference(q.sin(), k, v, lengths).cos().sum() for lengths in both]
    assert torch.allclose(grad, torch.autograd.grad(expected[0] + 2 * expected[1], q)[0], atol=1e-11)


def test_attention_at_the_end_of_a_checkpoint_is_answered_too() -> None:
    """Its own backward is then what asks for the layer once more."""
    q, k, v = qkv()
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    nano = balancer.begin(doc_lens=LENGTHS)
    out = checkpoint(lambda x: nano(x.sin(), k, v, layer=0), q, use_reentrant=False)
    (grad,) = torch.autograd.grad((out * out).sum(), q, retain_graph=True)
    expected = core_attention_reference(q.sin(), k, v, LENGTHS)
    assert torch.allclose(grad, torch.autograd.grad((expected * expected).sum(), q)[0], atol=1e-11)
    assert (nano.entries, nano.answers) == (1, 1)
    with pytest.raises(UsageError, match="backward ran twice"):
        torch.autograd.grad((out * out).sum(), q)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_layer_is_answered_from_what_was_kept(use_reentrant: bool) -> None:
    q, k, v = qkv()
    balancer = Balancer()
    balancer.attention(q, k, v, doc_lens=LENGTHS)
    nano = balancer.begin(plan=balancer.plan([LENGTHS]).nano_batches[0])
    x = q
    for layer in range(3):
        x = torch.utils.checkpoint.checkpoint(
            lambda x, n=layer: nano(x.sin(), k.cos(), v.sin(), layer=n).cos() + x, x, use_reentrant=use_reentrant
        )
    grads = torch.autograd.grad(x.sum(), (q, k, v)) if not use_reentrant else None
    if grads is None:
        x.sum().backward()
        grads = (q.grad, k.grad, v.grad)
    assert nano.entries == 3 and nano.answers == 3
    y = q
    for _ in range(3):
        y = core_attention_reference(y.sin(), k.cos(), v.sin(), LENGTHS).cos() + y
    wanted = torch.autograd.grad(y.sum(), (q, k, v))
    assert torch.allclose(grads[0], wanted[0], atol=1e-11)
    if not use_reentrant:  # reentrant checkpointing sees no gradients of what its function closes over
        assert torch.allclose(grads[1], wanted[1], atol=1e-11) and torch.allclose(grads[2], wanted[2], atol=1e-11)


def test_two_forward_passes_through_one_attention_are_never_mixed_up() -> None:
    """Without a new `begin` a checkpointed layer cannot say which pass it repeats: it computes anew, and right."""
    q, k, v = qkv()
    balancer = Balancer()
    balancer.attention(q, k, v, doc_lens=LENGTHS)
    nano = balancer.begin(plan=balancer.plan([LENGTHS]).nano_batches[0])

    def layer(x: torch.Tensor) -> torch.Tensor:
        return nano(x.sin(), k, v, layer=0).cos()

    total = sum(torch.utils.checkpoint.checkpoint(layer, q * f, use_reentrant=False).sum() for f in (1.0, 3.0))
    (grad,) = torch.autograd.grad(total, q)
    expected = sum(core_attention_reference((q * f).sin(), k, v, LENGTHS).cos().sum() for f in (1.0, 3.0))
    (wanted,) = torch.autograd.grad(expected, q)
    assert torch.allclose(grad, wanted, atol=1e-11) and nano.answers == 0


def test_an_output_changed_in_place_is_never_answered_from() -> None:
    """Such a model cannot be trained with any attention that keeps its output; torch says so instead of being wrong."""
    q, k, v = qkv()
    balancer = Balancer()
    balancer.attention(q, k, v, doc_lens=LENGTHS)
    nano = balancer.begin(plan=balancer.plan([LENGTHS]).nano_batches[0])
    out = torch.utils.checkpoint.checkpoint(lambda x: nano(x.sin(), k, v, layer=0).mul_(2).sin(), q, use_reentrant=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert nano.answers == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q[None], k, v), "leave the batch dimension out"),
        (lambda q, k, v: (q, k[:, :, :4], v[:, :, :4]), "one head size"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of the"),
        (lambda q, k, v: (q, k.float(), v), "expected one dtype"),
        (lambda q, k, v: (q[:-1], k[:-1], v[:-1]), "25 tokens"),
    ],
)
def test_tensors_that_do_not_fit(change, says: str) -> None:
    balancer = Balancer(shape=AttentionShape(4, 2, 8))
    with pytest.raises(UsageError, match=says):
        balancer.attention(*change(*qkv()), doc_lens=LENGTHS)


def test_what_must_be_given() -> None:
    balancer = Balancer()
    with pytest.raises(UsageError, match="no documents yet"):
        balancer.attention(*qkv())
    with pytest.raises(UsageError, match="exactly one of"):
        balancer.begin()
    with pytest.raises(UsageError, match="give shape="):
        Balancer().plan([LENGTHS])
    with pytest.raises(UsageError, match="2 forward passes and 1 plans"):
        balancer.alternate([lambda a: None] * 2, [None])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="expected \\(doc, start, length\\)"):
        balancer.attention(*qkv(), shards=[(0, 0)])
    with pytest.raises(UsageError, match="back end 'flash' on device 'cpu'"):
        Balancer(backend="flash").check(Kernel(window=3), AttentionShape(4, 2, 8))


def test_a_closed_one_is_refused_by_name_and_what_it_began_still_ends() -> None:
    x = torch.randn(6, 2, 8, requires_grad=True)
    balancer = Balancer(shape=AttentionShape(2, 2, 8))
    plan = balancer.plan([[6]]).nano_batches[0]
    out = balancer.attention(x, x, x, doc_lens=[6])
    balancer.close()
    balancer.close()
    for name, call in {
        "attention": lambda: balancer.attention(x, x, x, doc_lens=[6]),
        "plan": lambda: balancer.plan([[6]]),
        "prefetch": lambda: balancer.prefetch([[6]]),
        "plan_shards": lambda: balancer.plan_shards([(0, 0, 6)]),
        "begin": lambda: balancer.begin(plan=plan),
    }.items():
        with pytest.raises(UsageError, match=f"^{name}: this Balancer was closed; make a new one"):
            call()
    out.sum().backward()
    assert x.grad is not None


def test_one_that_was_made_before_the_ranks_were_joined_is_not_taken_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing says beforehand that there will be several: processes that were not started by torchrun."""
    balancer = Balancer(dist.group.WORLD, shape=AttentionShape(4, 2, 8))
    balancer.plan([LENGTHS])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(UsageError, match=r"made before torch.distributed was initialised.*after init_process_group"):
        balancer.plan([LENGTHS])
    Balancer(shape=AttentionShape(4, 2, 8)).plan([LENGTHS])  # meant for this process alone


def test_a_copy_of_a_model_shares_its_balancer() -> None:
    model = torch.nn.Linear(2, 2)
    model.balancer = Balancer()  # type: ignore[assignment]
    assert copy.deepcopy(model).balancer is model.balancer
