"""`Balancer.attention` in one process; several ranks are in tests/multiprocess/test_balancer.py."""

from __future__ import annotations

import pytest
import torch

from steelyard.attention import core_attention_reference
from steelyard.balance import Balancer, Kernel
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

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
        (lambda q, k, v: (q[None], k, v), "packed without a batch dimension"),
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
    with pytest.raises(UsageError, match="cannot honour window"):
        Balancer(backend="cpu").check(Kernel(window=3), AttentionShape(4, 2, 8))
