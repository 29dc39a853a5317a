"""`steelyard validate`: the simulator's predictions against published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from steelyard.cli.flags import Switch, check_picture, parse_flags
from steelyard.cli.output import command_output
from steelyard.simulate.validate import SourceReport, load_tables, validate

DESCRIPTION = """\
Compare predictions with published measurements: step times, memory, kernels and collectives, source by source. Rows on
which constants were fitted are reported apart from those held out; rows left out are counted with the reason."""


@dataclass(frozen=True)
class ValidateFlags:
    data: Path | None = None
    """A folder of further tables of the form `validation-table/1`; unset: those shipped with Steelyard."""
    plot: Path | None = None
    """Draw predicted against measured into this file (.png, .svg or .pdf)."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(ValidateFlags, argv, prog="steelyard validate", description=DESCRIPTION)
    check_picture(flags.plot)
    with command_output(as_json=flags.json) as output:
        reports = validate(load_tables(flags.data))
        print_reports(output.console, reports)
        output.result({"sources": [r.as_json() for r in reports]})
        if flags.plot is not None:
            from steelyard.plots.simulation import predicted_against_measured  # matplotlib

            predicted_against_measured(flags.plot, [c for r in reports for c in r.comparisons])
            output.console.print(f"wrote {flags.plot}", markup=False, soft_wrap=True)
    return 0


def print_reports(console: Console, reports: Sequence[SourceReport]) -> None:
    """A table of errors, then what was left out."""
    heads = ("points", "mean |e|", "bias", "worst", "memory", "mean |e|", "τ")
    console.print(f"{'source':<32}{'role':<10}" + "".join(f"{h:>10}" for h in heads), soft_wrap=True, style="bold")

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} %"

    for report in reports:
        v = report.as_json()
        tau = v.get("kendall_tau")
        cells = (
            str(v["points"]), text(v["mean_abs_pct_error"]), text(v["bias_pct_error"]), text(v["worst_pct_error"]),
            str(v["memory_points"] or ""), text(v["memory_mean_abs_pct_error"]), "" if tau is None else f"{tau:.2f}",
        )  # fmt: skip
        line = f"{v['name']:<32}{v['role'].replace('_', ' '):<10}" + "".join(f"{c:>10}" for c in cells)
        console.print(line, markup=False, soft_wrap=True)
    for report in reports:
        for reason, count in sorted(report.excluded.items()):
            console.print(f"left out of {report.name}: {count} × {reason}", markup=False, soft_wrap=True)
        for verdict, count in sorted(report.out_of_memory.items()):
            line = f"{report.name}: {count} published out-of-memory runs are called {verdict!r}"
            console.print(line, markup=False, soft_wrap=True)
