"""1F1B (PipeDream-Flush, arXiv 2006.09503) and its interleaved form (Megatron-LM, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from steelyard.errors import UsageError
from steelyard.planner.schedules.schedule import Schedule, StageOp, check_size


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Each stage runs stages − 1 − s forward passes, then one forward and one backward in turn, then what is left.

    Stage s holds min(micro_batches, stages − s) micro-batches at once.
    """
    check_size("1F1B", stages, micro_batches)
    ops = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - 1 - stage)
        order = [StageOp("forward", m) for m in range(warm_up)]
        for m in range(micro_batches - warm_up):
            order += [StageOp("forward", warm_up + m), StageOp("backward", m)]
        order += [StageOp("backward", m) for m in range(micro_batches - warm_up, micro_batches)]
        ops.append(tuple(order))
    return Schedule("1F1B", stages, micro_batches, 1, tuple(ops))


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` model chunks per stage: the bubble shrinks by that factor, transfers grow by it.

    Micro-batches go round in groups of `stages`: chunk 0 for the whole group, then chunk 1, and so on.

    Raises:
        UsageError: `micro_batches` is not a multiple of `stages`, which the rotation needs.
    """
    check_size("interleaved", stages, micro_batches, chunks)
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    if micro_batches % stages:
        above = -(-micro_batches // stages) * stages
        raise UsageError(
            f"interleaved schedule: micro_batches={micro_batches} is not a multiple of stages={stages}; "
            f"nearest: {above}"
        )
    turns = []  # (micro-batch, chunk) in the order of forward passes; backward is the same with chunks reversed
    for group in range(0, micro_batches, stages):
        turns += [(m, c) for c in range(chunks) for m in range(group, group + stages)]
    total = len(turns)
    ops = []
    for stage in range(stages):
        warm_up = min(total, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
        forward = [StageOp("forward", m, c) for m, c in turns]
        backward = [StageOp("backward", m, chunks - 1 - c) for m, c in turns]
        order = forward[:warm_up]
        for f, b in zip(forward[warm_up:], backward, strict=False):
            order += [f, b]
        order += backward[total - warm_up :]
        ops.append(tuple(order))
    return Schedule("interleaved", stages, micro_batches, chunks, tuple(ops))
