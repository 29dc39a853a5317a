"""`steelyard calibrate`: measure this machine and write a profile that `simulate` reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.flags import Switch, check_writable, parse_flags
from steelyard.cli.output import command_output
from steelyard.domain.units import format_time
from steelyard.errors import UsageError

DESCRIPTION = """\
Measure matrix products, attention, memory and transfers on this machine's CPU cores and write a device profile for
`steelyard simulate`. Takes well under five minutes; other work on the machine makes its figures worse."""

RESTLESS = 0.3
"""Error of the fits above which it is said that the machine was not quiet."""


@dataclass(frozen=True)
class CalibrateFlags:
    out: Path = Path("device-profile.toml")
    """The profile to write."""
    nproc: int = 1
    """Processes that measure at once, as they will train at once; with more than one, transfers too."""
    rounds: int = 3
    """Windows in which each piece of work is timed; their median counts."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(CalibrateFlags, argv, prog="steelyard calibrate", description=DESCRIPTION)
    if flags.nproc < 1 or flags.rounds < 1:
        raise UsageError(f"--nproc {flags.nproc} --rounds {flags.rounds}: expected at least 1 each")
    if flags.out.suffix != ".toml" or not flags.out.absolute().parent.is_dir():
        raise UsageError(f"--out {flags.out}: expected a file that ends in .toml in a folder that exists")
    if flags.out.is_dir():
        raise UsageError(f"--out {flags.out}: this is a folder; expected a file")
    check_writable(flags.out.absolute(), "--out")
    from steelyard.cost.profiles import load_profile, profile_toml
    from steelyard.simulate.calibrate import fit_profile
    from steelyard.train.measure_device import measure  # torch: not for --help or a wrong flag

    with command_output(as_json=flags.json) as output:
        begin_s = time.perf_counter()

        def progress(what: str) -> None:
            output.console.print(f"{time.perf_counter() - begin_s:5.1f} s  {what}", markup=False)

        samples = measure(flags.nproc, rounds=flags.rounds, progress=progress)
        profile = fit_profile(samples, load_profile("cpu-local"), name=flags.out.stem)
        # Written beside and moved: a profile is whole or not there.
        partial = flags.out.with_name(f".{flags.out.name}.partial")
        try:
            partial.write_text(profile_toml(profile), encoding="utf-8")
            partial.replace(flags.out)
        finally:
            partial.unlink(missing_ok=True)
        took_s = time.perf_counter() - begin_s
        output.console.print(
            f"{flags.out}: {profile.peak_fp32_flops / 1e9:.0f} GFLOP/s, "
            f"copies {profile.memory_bytes_per_s / 1e9:.1f} GB/s, "
            + (f"transfers {profile.node_bytes_per_s / 1e9:.2f} GB/s, " if flags.nproc > 1 else "")
            + f"in {format_time(took_s)}; use it: steelyard simulate CONFIG.toml --cluster.device {flags.out}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        if profile.time_error > RESTLESS:
            output.console.print(
                f"[yellow]warning[/yellow]: the fits are {profile.time_error:.0%} off what was measured: the machine "
                "was busy, or its cores changed their speed; measure again when it is quiet", soft_wrap=True,
            )  # fmt: skip
        output.result(
            {
                "profile": str(flags.out),
                "peak_flops": profile.peak_fp32_flops,
                "memory_bytes_per_s": profile.memory_bytes_per_s,
                "node_bytes_per_s": profile.node_bytes_per_s,
                "time_error": profile.time_error,
                "sources": dict(profile.sources),
                "took_s": took_s,
            }
        )
    return 0
