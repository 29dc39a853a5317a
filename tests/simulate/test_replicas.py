from __future__ import annotations

import numpy as np
import pytest

from steelyard.cost.collectives import WideLink
from steelyard.domain.sync_mode import SyncMode
from steelyard.errors import UsageError
from steelyard.simulate.replicas import ReplicaEstimate, Site, simulate_replicas

FAST = WideLink(0.0, 1e12)
SLOW = WideLink(0.1, 1e7)


def run(mode: SyncMode, *, slow: float = 1.0, link: WideLink = FAST, parameters: float = 1e8) -> ReplicaEstimate:
    sites = [Site("a", np.array([1.0]), 1000, link), Site("b", np.array([slow]), 1000, link)]
    return simulate_replicas(sites, mode, parameters)


def test_one_site_is_alone() -> None:
    found = simulate_replicas([Site("a", np.array([2.0]), 100, SLOW)], SyncMode(), 1e9)
    assert (found.tokens_per_s, found.step_time_s, found.exposed_share) == (50, 2.0, 0.0)
    with pytest.raises(UsageError, match="no site"):
        simulate_replicas([], SyncMode(), 1.0)


def test_every_step_waits_for_the_slowest() -> None:
    found = run(SyncMode(), slow=4.0)
    assert found.tokens_per_s == pytest.approx(2000 / 4.0, rel=0.01)
    assert found.busy == pytest.approx((0.25, 1.0), rel=0.01)


@pytest.mark.parametrize(("sites", "spreads"), [(2, 0.5642), (8, 1.4236), (50, 2.2491)])
def test_the_slowest_of_more_replicas_is_slower(sites: int, spreads: float) -> None:
    """Means of the largest of n standard normal numbers, from tables."""
    steps = np.array([0.9, 1.1])
    alike = [Site(str(i), steps, 1000, FAST) for i in range(sites)]
    one = simulate_replicas(alike, SyncMode(), 1.0).step_time_s
    assert one == pytest.approx(1 + 0.1 * spreads, abs=1e-4)
    rare = simulate_replicas(alike, SyncMode("local_sgd", period=100), 1.0).step_time_s
    assert rare == pytest.approx(1 + 0.01 * spreads, abs=1e-4)


def test_spread_costs_nothing_beside_a_much_slower_replica() -> None:
    steps = np.array([0.9, 1.1])
    sites = [Site("a", steps, 1000, FAST), Site("b", 4 * np.ones(2), 1000, FAST)]
    assert simulate_replicas(sites, SyncMode(), 1.0).step_time_s == pytest.approx(4.0, abs=1e-4)


def test_a_slow_link_is_paid_once_a_period_and_less_with_compression_and_overlap() -> None:
    each = run(SyncMode(), link=SLOW)
    rare = run(SyncMode("diloco", period=50), link=SLOW)
    small = run(SyncMode("diloco", period=50, compression="int4"), link=SLOW)
    hidden = run(SyncMode("diloco", period=50, compression="int4", fragments=5, overlap=5), link=SLOW)
    times = [e.step_time_s for e in (each, rare, small, hidden)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 30
    assert hidden.exposed_share < 0.05
    assert rare.bytes_per_step == pytest.approx(each.bytes_per_step / 50)


def test_bounded_staleness_keeps_its_bound_and_the_fast_replica_waits() -> None:
    tight = run(SyncMode("bounded_staleness", lead=1), slow=10.0)
    loose = run(SyncMode("parameter_server"), slow=10.0)
    assert tight.busy[0] == pytest.approx(0.1, abs=0.02)
    assert loose.busy[0] > 0.95
    assert loose.tokens_per_s > 5 * tight.tokens_per_s


def test_a_server_link_is_shared() -> None:
    link = WideLink(0.0, 1e9)
    alone = run(SyncMode("parameter_server"), link=link, parameters=1e7)
    many = simulate_replicas([Site(str(i), np.array([1.0]), 1000, link) for i in range(20)],
                             SyncMode("parameter_server"), 1e7)  # fmt: skip
    assert many.busy[0] < alone.busy[0]


def test_a_slow_link_holds_up_its_own_replica_and_no_other_at_a_server() -> None:
    """The events of years of fast replicas beside one that hardly moves are not played through, either."""
    crawl = WideLink(0.0, 1e4)
    sites = [Site("a", np.array([1.0]), 1000, FAST), Site("b", np.array([1.0]), 1000, crawl)]
    found = simulate_replicas(sites, SyncMode("parameter_server"), 1e8)
    assert found.busy[0] == pytest.approx(1.0, abs=0.01)
    assert found.busy[1] < 0.01
    assert found.tokens_per_s == pytest.approx(1000, rel=0.01)


def test_gossip_is_as_fast_as_the_slower_of_two_links() -> None:
    """Of three sites one has a slow link: it delays its own exchanges, and every second of the others'."""
    slow = WideLink(0.0, 1e8)
    sites = [Site(name, np.array([1.0]), 1000, link) for name, link in (("a", FAST), ("b", FAST), ("c", slow))]
    found = simulate_replicas(sites, SyncMode("gossip"), 1e8)
    assert found.busy == pytest.approx((1 / 3, 1 / 3, 1 / 5), rel=0.01)


def test_gossip_never_waits_for_others() -> None:
    found = run(SyncMode("gossip", fraction=0.1, overlap=1), slow=10.0)
    assert found.waiting_share == 0
    assert found.busy == pytest.approx((1.0, 1.0), rel=0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"period": 5}, "set period=1 or mode='local_sgd' or 'diloco'"),
        ({"mode": "diloco", "period": 4, "overlap": 9}, "nearest: 4"),
        ({"mode": "diloco", "period": 0}, "expected at least 1"),
        ({"compression": "topk", "topk_share": 0.0}, "more than 0"),
    ],
)
def test_contradictory_modes_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SyncMode(**values)  # type: ignore[arg-type]


def test_bytes_per_parameter() -> None:
    assert SyncMode().bytes_per_parameter == 4
    assert SyncMode(compression="bf16").bytes_per_parameter == 2
    assert SyncMode(compression="topk", topk_share=0.01).bytes_per_parameter == pytest.approx(0.08)
