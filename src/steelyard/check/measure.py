"""What one process measures. Runs on workers that are joined by gloo, in one of two roles.

`measure_reference` runs on one process: the documents one by one, with the model's own attention, and every rank's
batch alone. `measure_rank` runs on each of several: their step together, and whether outputs move when documents of
others change. Only numbers leave the workers, but for the reference gradients, which go to a file.

Shapes: T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from steelyard.check.report import (
    SMALL_GRADIENT,
    TOLERANCES,
    AloneBatch,
    Difference,
    RankMeasure,
    ReferenceMeasure,
    worst,
)
from steelyard.check.request import (
    KEPT_SHARES,
    CheckRequest,
    deal,
    every_second_token_changed,
    later_tokens_changed,
    perturbation_patterns,
    perturbed,
    random_documents,
    tokens_kept,
)
from steelyard.check.subject import Subject, open_subject, tokens_held, wrong_label
from steelyard.data.batches import DocumentBatch
from steelyard.domain.arrays import IntArray, int_column
from steelyard.errors import UsageError

Measure = TypeVar("Measure")


@dataclass(frozen=True)
class Failed:
    """A process could not measure: the error's type, what it says, and where it came from."""

    type_name: str
    message: str
    text: str


def reference_on_worker(
    rank: int, ranks: int, group: dist.ProcessGroup, request: CheckRequest, path: str
) -> ReferenceMeasure | Failed:
    """`measure_reference` in a worker."""
    return _quietly(lambda: measure_reference(group, request, Path(path)), alone=True)


def rank_on_worker(
    rank: int, ranks: int, group: dist.ProcessGroup, request: CheckRequest, path: str
) -> RankMeasure | Failed:
    """`measure_rank` in a worker. A failure among several is raised, so that nobody waits for this rank."""
    return _quietly(lambda: measure_rank(rank, ranks, group, request, Path(path)), alone=ranks == 1)


def _quietly(measure: Callable[[], Measure], *, alone: bool) -> Measure | Failed:
    """Run with what anybody prints on stderr: stdout is for the report."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return measure()
        except Exception as error:
            if not alone:
                raise
            return Failed(type(error).__name__, str(error), traceback.format_exc())


def measure_reference(group: dist.ProcessGroup, request: CheckRequest, path: Path) -> ReferenceMeasure:
    """The documents one by one, whose gradients go to `path`; and every rank's batch alone. `group`: this process.

    Raises:
        UsageError: the model or the documents cannot be checked.
    """
    subject = open_subject(request, group, reference=True)
    docs = _documents(request, subject)
    labels = sum(len(doc) - 1 for doc in docs)
    total = 0.0
    for doc in docs:
        if len(doc) > 1:
            loss = subject.loss(subject.collate([doc]), labels, 1)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    torch.save(_gradients(subject.model), path)
    fingerprint = _fingerprint(subject.model)
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    subject.close()

    subject = open_subject(request, group)
    batches: dict[int, list[AloneBatch]] = {}
    findings: list[str] = []
    for ranks in request.ranks:
        batches[ranks] = []
        for rank, block in enumerate(deal([len(doc) for doc in docs], ranks)):
            mine = [docs[doc] for doc in block]
            batches[ranks].append(_alone(subject, mine))
            wrong = wrong_label(subject.collate(mine), mine, shifted=not subject.shifts_labels)
            if wrong:
                findings.append(f"rank {rank} of {ranks}: {wrong}")
    subject.close()
    return ReferenceMeasure(
        total, fingerprint, batches, tuple(findings), len(docs), sum(len(doc) for doc in docs), parameters
    )


def measure_rank(
    rank: int, ranks: int, group: dist.ProcessGroup, request: CheckRequest, reference: Path
) -> RankMeasure:
    """This rank's part of a step over all ranks. Collective.

    Raises:
        UsageError: the model or the documents cannot be checked.
        PeerError: another rank did not take part.
    """
    subject = open_subject(request, group)
    docs = _documents(request, subject)
    blocks = deal([len(doc) for doc in docs], ranks)
    block = blocks[rank]
    labels = sum(len(doc) - 1 for doc in docs)
    base = _outputs(subject, docs, block)
    leak = _leak(subject, docs, block, base, request)
    lookahead = _lookahead(subject, docs, blocks, rank, base, request)
    blind = _blind(subject, docs, block, base, request)
    batch = subject.collate([docs[doc] for doc in block])
    before = subject.kernel_calls()
    loss = subject.loss(batch, labels, ranks)
    loss.backward()  # type: ignore[no-untyped-call]
    balanced = subject.kernel_calls() > before
    mean = ranks if subject.gradients == "mean" else 1
    gradients = {name: _joined(g, group, ranks) / mean for name, g in _gradients(subject.model).items()}
    joined_loss = float(_joined(loss.detach().double(), group, ranks)) / mean
    measure = RankMeasure(
        loss=joined_loss,
        gradient=_compare_gradients(gradients, reference, request) if rank == 0 else None,
        leak=leak,
        lookahead=lookahead,
        blind=blind,
        work=subject.work(rank, batch) if balanced else sum(len(docs[d]) * (len(docs[d]) + 1) // 2 for d in block),
        balanced=balanced,
        missing_tokens=sum(len(docs[d]) for d in block) - sum(len(rows) for rows in base.values()),
        fingerprint=_fingerprint(subject.model),
    )
    subject.close()
    return measure


def _documents(request: CheckRequest, subject: Subject) -> list[IntArray]:
    """The documents, if the model can take them."""
    if request.documents is None:
        docs = random_documents(subject.vocab_size, request.seed, subject.context)
    else:
        docs = [int_column(doc) for doc in request.documents]
    longest, highest = max(map(len, docs)), max(int(doc.max()) for doc in docs)
    if subject.context is not None and longest > subject.context:
        raise UsageError(
            f"a document of {longest} tokens is longer than the context of {subject.who}, {subject.context} tokens; "
            f"give --max-doc-tokens {subject.context}"
        )
    if highest >= subject.vocab_size:
        raise UsageError(
            f"the data hold token id {highest}, {subject.who} only knows ids below {subject.vocab_size}; give the "
            "model's own --tokenizer"
        )
    return docs


def _alone(subject: Subject, docs: Sequence[IntArray]) -> AloneBatch:
    """Loss and cross-entropy of one rank's batch."""
    batch = subject.collate(docs)
    labels = sum(len(doc) - 1 for doc in docs)
    loss = float(subject.loss(batch, labels, 1).detach())
    packed = DocumentBatch.from_documents(docs)
    logits_TV = subject.logits(batch)
    held = tokens_held(batch, packed.tokens, len(logits_TV))
    expected = torch.tensor(packed.labels[:held], device=logits_TV.device)
    total = F.cross_entropy(logits_TV[:held].double(), expected, reduction="sum")
    return AloneBatch(labels, loss, float(total) / labels)


def _outputs(subject: Subject, docs: Sequence[IntArray], block: Sequence[int]) -> dict[int, Tensor]:
    """Logits of each document of this rank, as far as its batch holds them."""
    mine = [docs[doc] for doc in block]
    batch = subject.collate(mine)
    logits_TV = subject.logits(batch)
    held = tokens_held(batch, np.concatenate(mine), len(logits_TV))
    ends = np.cumsum([len(doc) for doc in mine])
    return {
        doc: logits_TV[min(held, end - len(docs[doc])) : min(held, end)].double()
        for doc, end in zip(block, ends.tolist(), strict=True)
    }


def _leak(
    subject: Subject, docs: Sequence[IntArray], block: Sequence[int], base: Mapping[int, Tensor], request: CheckRequest
) -> Difference:
    """How far this rank's outputs moved when other documents, on any rank, were changed. Collective."""
    allowed = TOLERANCES[request.dtype].logits * _largest(base.values())
    found = [Difference(0.0, allowed, "outputs of other documents")]
    for changed in perturbation_patterns(len(docs)):
        moved = _outputs(subject, perturbed(docs, changed, subject.vocab_size, request.seed), block)
        for doc in block:
            if doc not in changed and len(base[doc]):
                difference = float((moved[doc] - base[doc]).abs().max())
                found.append(Difference(difference, allowed, f"outputs of document {doc}"))
    return worst(found)


def _lookahead(
    subject: Subject,
    docs: Sequence[IntArray],
    blocks: Sequence[Sequence[int]],
    rank: int,
    base: Mapping[int, Tensor],
    request: CheckRequest,
) -> Difference:
    """How far outputs of this rank moved when later tokens of their own document were changed. Collective.

    Of each rank's documents only the longest is changed: a leak from documents before it does not show here.
    """
    allowed = TOLERANCES[request.dtype].logits * _largest(base.values())
    longest = [max(block, key=lambda doc: len(docs[doc])) for block in blocks]
    own = longest[rank]
    found = []
    for share in KEPT_SHARES:
        others = later_tokens_changed(docs, frozenset(longest), share, subject.vocab_size, request.seed)
        moved = _outputs(subject, others, blocks[rank])
        kept = tokens_kept(len(docs[own]), share)
        before = _largest([moved[own][:kept] - base[own][:kept]])
        found.append(Difference(before, allowed, f"outputs before token {kept} of document {own}"))
    return worst(found)


def _blind(
    subject: Subject, docs: Sequence[IntArray], block: Sequence[int], base: Mapping[int, Tensor], request: CheckRequest
) -> str:
    """In words, an output of this rank that depends on no earlier token of its document; "" if none is. Collective.

    All outputs but the first of each document are looked at: one that sees nothing would show no leak either.
    """
    allowed = TOLERANCES[request.dtype].logits * _largest(base.values())
    still: dict[int, list[int]] = {}
    for first in (0, 1):
        others = every_second_token_changed(docs, first, subject.vocab_size, request.seed)
        moved = _outputs(subject, others, block)
        for doc in block:
            # The output after each token that was changed, which is that of a token that was not.
            looked_at = np.arange(first + 1, len(base[doc]), 2)
            if len(looked_at):
                change_R = (moved[doc] - base[doc])[torch.from_numpy(looked_at)].abs().amax(-1)
                # Not a number: `_leak` says so.
                rows = looked_at[(change_R <= allowed).numpy(force=True)].tolist()
                still.setdefault(doc, []).extend(rows)
    blind = {doc: sorted(rows) for doc, rows in still.items() if rows}
    if not blind:
        return ""
    doc, rows = min(blind.items())
    return f"the output of token {rows[0]} of document {doc}, which has {len(docs[doc])} tokens"


def _compare_gradients(gradients: Mapping[str, Tensor], reference: Path, request: CheckRequest) -> Difference:
    """The gradient that differs most from the reference's, by what is allowed for it."""
    expected: dict[str, Tensor] = torch.load(reference, mmap=True, weights_only=True)
    if expected.keys() != gradients.keys():
        other = sorted(expected.keys() ^ gradients.keys())[0]
        raise UsageError(f"parameter {other} has a gradient in one process and not in another: build the model alike")
    tolerance = TOLERANCES[request.dtype].gradient
    floor = SMALL_GRADIENT * _largest(expected.values())
    return worst(
        Difference(float((gradients[n] - g).abs().max()), tolerance * max(floor, float(g.abs().max())), n)
        for n, g in expected.items()
    )


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter; zero where there was none."""
    return {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def _joined(tensor: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """The sum over the ranks."""
    if ranks > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
    return tensor


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _fingerprint(model: nn.Module) -> float:
    """A number that differs where weights do."""
    total = 0.0
    for number, parameter in enumerate(model.parameters(), start=1):
        total += float(parameter.detach().double().abs().sum()) / number
    return total
