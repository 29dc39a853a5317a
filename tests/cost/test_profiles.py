from __future__ import annotations

import re
from pathlib import Path

import pytest

from steelyard.cost.profiles import BUILT_IN, load_profile, profile_toml
from steelyard.errors import UsageError


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profiles_are_complete_and_name_their_sources(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.kernels and profile.node_size >= 1
    assert all(len(source) > 3 for source in profile.sources.values())
    path = tmp_path / "own.toml"
    path.write_text(profile_toml(profile))
    assert load_profile(path) == profile


def test_names_in_any_case_and_aliases() -> None:
    assert load_profile("H200") == load_profile("h200")
    assert load_profile("A800") == load_profile("a100")


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'H101'; did you mean 'h100'\?"):
        load_profile("H101")
    with pytest.raises(UsageError, match="there is no such file"):
        load_profile("nowhere.toml")


def test_missing_and_unknown_entries_are_named(tmp_path: Path) -> None:
    text = profile_toml(load_profile("h100"))
    path = tmp_path / "own.toml"
    start = text.index("[constants.gemm_half_size]")
    path.write_text(text[:start] + text[text.index("[constants.token_wise_transfers]") :])
    with pytest.raises(UsageError, match="constants lacks gemm_half_size; add each with value and source"):
        load_profile(path)
    path.write_text(text.replace("constants.gemm_half_size", "constants.gemm_half_sise"))
    with pytest.raises(UsageError, match=r"unknown entry constants.gemm_half_sise; did you mean gemm_half_size\?"):
        load_profile(path)
    path.write_text(text.replace("value = 100.0", "value = -1"))
    with pytest.raises(UsageError, match="gemm_half_size=-1, expected a number, 0 or more"):
        load_profile(path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gemm_efficiency", 0.0, "a number, more than 0"),
        ("gemm_efficiency", 60.0, "at most 1"),
        ("time_error", 50.0, "at most 1"),
        ("layer_host_s", 1e300, "at most 3600"),
        ("node_size", 1e300, "at most "),
        ("token_wise_transfers", 1e300, "at most 1e+18"),
    ],
)
def test_constants_out_of_range_are_refused(name: str, value: float, expected: str, tmp_path: Path) -> None:
    profile, path = load_profile("h100"), tmp_path / "own.toml"
    path.write_text(profile_toml(profile.replace(**{name: value})))
    with pytest.raises(UsageError, match=re.escape(f"constants.{name}={value!r}, expected {expected}")):
        load_profile(path)


def test_what_a_device_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="has no fp8 matrix units; choose one of bf16"):
        load_profile("a100").peak_flops("fp8")
    with pytest.raises(UsageError, match="has no attention kernel 'fa3'; expected fa2, triton, unfused"):
        load_profile("a100").kernel("fa3")
