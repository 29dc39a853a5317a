"""The one place that joins the planner and the runtime."""

from steelyard.balance.balancer import Balancer
from steelyard.balance.nano_batch import Kernel, NanoBatchAttention
from steelyard.balance.plans import NanoBatchPlan, StepPlan

__all__ = ["Balancer", "Kernel", "NanoBatchAttention", "NanoBatchPlan", "StepPlan"]
