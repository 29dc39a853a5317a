"""Pipeline schedules as pure data: what each stage does, in which order. The simulator runs them; so will a runtime."""

from steelyard.planner.schedules.lockstep import LockstepSchedule, Tick, lockstep
from steelyard.planner.schedules.one_f_one_b import interleaved, one_f_one_b
from steelyard.planner.schedules.schedule import Schedule, StageOp

__all__ = ["LockstepSchedule", "Schedule", "StageOp", "Tick", "interleaved", "lockstep", "one_f_one_b"]
