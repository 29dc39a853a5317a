"""Fair shares and caps of work, in exact integers: the same on every rank and platform."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from steelyard.domain.limits import MAX_RANKS
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError


def speed_weights(topology: Topology) -> list[int]:
    """Speeds as whole numbers in the same proportion (a binary float is a fraction of whole numbers)."""
    if not topology.speeds:
        return [1] * topology.servers
    ratios = [float(speed).as_integer_ratio() for speed in topology.speeds]
    denominator = max(ratio[1] for ratio in ratios)  # powers of two: the largest is a multiple of all
    return [numerator * (denominator // own) for numerator, own in ratios]


def exact_tolerance(tolerance: float) -> Fraction:
    """The decimal number that was written, so that 0.02 means 1/50.

    Raises:
        UsageError: negative, not a number, or above the number of ranks there may be: (1 + tolerance) × a share is then
            all the work anyway.
    """
    if not 0 <= tolerance <= MAX_RANKS:
        raise UsageError(f"tolerance={tolerance}, expected a number from 0 to {MAX_RANKS:,} such as 0.05, which is 5 %")
    return Fraction(str(float(tolerance)))


@dataclass(frozen=True)
class WorkCaps:
    """Most work per server, never more than all there is.

    Attributes:
        target: (1 + tolerance) × share, rounded down, but never below the share rounded up: what a plan aims at. The
            second part matters only where the tolerance is less than one pair; without it the targets could hold
            less than all the work. Rows being indivisible, no plan may meet the targets.
        promise: the same where the tolerance is at least `longest_row`, else share + longest row: always
            reachable, because some server is below its share while another is above, and a row fits there.
    """

    target: list[int]
    promise: list[int]


def work_caps(total_pairs: int, topology: Topology, tolerance: float, longest_row: int) -> WorkCaps:
    """Caps of all servers for `total_pairs` of work."""
    weights, exact = speed_weights(topology), exact_tolerance(tolerance)
    whole, factor = sum(weights), 1 + exact
    caps: dict[int, tuple[int, int]] = {}
    for weight in set(weights):
        tight = total_pairs * weight * factor.numerator // (whole * factor.denominator)
        target = max(tight, -(-total_pairs * weight // whole))
        roomy = exact.numerator * total_pairs * weight >= longest_row * whole * exact.denominator
        promise = tight if roomy else max(target, total_pairs * weight // whole + longest_row)
        caps[weight] = min(target, total_pairs), min(promise, total_pairs)
    return WorkCaps([caps[w][0] for w in weights], [caps[w][1] for w in weights])
