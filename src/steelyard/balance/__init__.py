"""The one place that joins the planner and the runtime."""

from steelyard.balance.balancer import Balancer, NanoBatchPlan, StepPlan

__all__ = ["Balancer", "NanoBatchPlan", "StepPlan"]
