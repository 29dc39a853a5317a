"""Several sites: each is judged for itself, and what is said of all of them is true of the worst."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import SMALL, load

from steelyard.errors import UsageError
from steelyard.simulate.config import SimulateConfig
from steelyard.simulate.sites import SiteEstimate, decisive, estimate_sites, site_scenario, together
from steelyard.simulate.workloads import WorkloadCache

BASE = SMALL.replace("16384", "65536") + "[sampling]\nbatches = 2\n"


def sites(text: str, tmp_path: Path) -> tuple[SimulateConfig, list[SiteEstimate]]:
    config = load(text, tmp_path)
    documents = config.stream(site_scenario(config, "balanced", config.sites[0]))
    return config, estimate_sites(config, WorkloadCache(documents), "balanced")


def test_each_site_has_its_own_device_memory_and_speed(tmp_path: Path) -> None:
    text = BASE + '[[sites]]\nname = "north"\n[[sites]]\nname = "south"\ndevice = "A100"\n' \
                  '[[sites]]\nname = "west"\nspeed = 0.125\n'  # fmt: skip
    config, found = sites(text, tmp_path)
    north, south, west = found
    assert [s.estimate.memory.verdict for s in found] == ["fits", "does not fit", "fits"]
    assert south.estimate.step_time_s > 1.5 * north.estimate.step_time_s
    assert west.estimate.step_time_s == pytest.approx(8 * north.estimate.step_time_s)
    assert decisive(found) is south  # not the slowest: the one that cannot run
    assert decisive([north, west]) is west
    values = together(config, found)
    assert values["verdict"] == "does not fit"
    assert [s["verdict"] for s in values["sites"]] == ["fits", "does not fit", "fits"]
    assert [round(s["memory_capacity_gib"]) for s in values["sites"]] == [140, 79, 140]
    assert all(s["memory_band_gib"][0] < s["memory_gib_by_rank_max"] < s["memory_band_gib"][1] for s in values["sites"])
    assert [s["devices"] for s in values["sites"]] == [16, 16, 16]


def test_links_and_speeds_of_sites(tmp_path: Path) -> None:
    text = BASE + '[sync]\nmode = "diloco"\nperiod = 50\ncompression = "int8"\n'
    text += "".join(f'[[sites]]\nname = "{n}"\nspeed = {s}\nbytes_per_s = 1e10\n' for n, s in (("a", 1.0), ("b", 0.5)))
    config, found = sites(text, tmp_path)
    values = together(config, found)
    assert values["tokens_per_s"] < values["tokens_per_s_without_links"]
    assert values["sites"][0]["busy_share"] == pytest.approx(0.5, abs=0.05)
    assert values["slowest_link"] is None
    config, found = sites(text.replace("speed = 0.5", "streams = 1\nround_trip_s = 0.3"), tmp_path)
    assert together(config, found)["slowest_link"] == "b"


def test_a_site_s_own_device_is_no_mixed_cluster(tmp_path: Path) -> None:
    mixed = BASE.replace("nodes = 2", 'groups = [{device = "H200", nodes = 1}, {device = "A100", nodes = 1}]')
    _, [x, y] = sites(mixed + '[[sites]]\nname = "x"\n[[sites]]\nname = "y"\ndevice = "H200"\n', tmp_path)
    assert len(set(x.estimate.scenario.speeds)) == 2
    assert y.estimate.scenario.speeds == ()
    assert y.estimate.memory.capacity > x.estimate.memory.capacity
    assert "H200" in x.estimate.scenario.profile.name
    assert "A100" in x.estimate.scenario.profile.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("chunk_tokens = 65536", 'chunk_tokens = 65536\nkernel = "fa3"'),
         "'south' with A100: A100 SXM 80 GB has no attention kernel 'fa3'; expected fa2"),
        (("chunk_tokens = 65536", 'chunk_tokens = 65536\nprecision = "fp8"'),
         "'south' with A100: .* no fp8 matrix units"),
        (('device = "A100"', 'device = "H300"'), "'south' with H300: unknown device 'H300'"),
        (('name = "south"', 'name = "north"'), "two are called 'north'; give each a name of its own"),
    ],
)  # fmt: skip
def test_a_refused_site_is_named(changes: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = BASE + '[[sites]]\nname = "north"\n[[sites]]\nname = "south"\ndevice = "A100"\n'
    with pytest.raises(UsageError, match=message):
        sites(text.replace(*changes), tmp_path)


def test_a_mistake_of_all_sites_is_no_site_s(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^degrees: tensor=3"):
        sites(BASE.replace("tensor = 4", "tensor = 3") + '[[sites]]\nname = "north"\n', tmp_path)
