"""The page of a simulation's report: the answer first, then its reasons, then what it is made of.

Everything is in the page itself: styles, pictures (as data) and no script. It reads on a phone as well as on paper.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from steelyard.domain.units import format_bytes, format_time
from steelyard.simulate.answer import CAUSES, model_text
from steelyard.simulate.step import USEFUL, StepEstimate

_STYLE = """
:root{color-scheme:light;--ink:#22272E;--muted:#5B6570;--rule:#D5DAE0;--pale:#F3F5F7;--blue:#0072B2}
*{box-sizing:border-box} html{-webkit-text-size-adjust:100%}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:var(--ink);background:#fff;
margin:0 auto;max-width:62rem;padding:1.5rem 1rem 4rem;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.1rem 0 .3rem} h2{font-size:1.2rem;margin:2.4rem 0 .6rem}
p{margin:.3rem 0} .muted,figcaption,dt,th{color:var(--muted)} .kicker{color:var(--muted);font-size:.9rem}
.answer{border-left:.5rem solid var(--tone);background:var(--pale);padding:1rem 1.2rem;margin:1.2rem 0;
border-radius:.3rem}
.fits{--tone:#009E73;--dark:#006B4E}.tight{--tone:#E69F00;--dark:#7A5400}.unfit{--tone:#D55E00;--dark:#A34700}
.verdict{font-size:1.35rem;font-weight:700;color:var(--dark)} .sentence{font-size:1.1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1rem 0}
.card{border:1px solid var(--rule);border-radius:.3rem;padding:.8rem 1rem;min-width:0}
.card b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums} .card p{font-size:.9rem;color:var(--muted)}
.next b{font-size:1.05rem} .bar{position:relative;height:.5rem;background:var(--rule);
border-radius:.25rem;margin:.5rem 0}
.bar i{position:absolute;top:0;bottom:0;border-radius:.25rem;background:var(--blue)}
.bar u{position:absolute;top:-.2rem;bottom:-.2rem;width:2px;background:var(--ink)}
figure{margin:1rem 0} .scroll{overflow-x:auto} figure img{display:block;width:100%;height:auto}
@media (max-width:46rem){figure img{max-width:36rem}}
table{border-collapse:collapse;font-size:.95rem} td,th{padding:.3rem 1.2rem .3rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--rule);overflow-wrap:normal} th{font-weight:400}
thead th,thead~tbody th,thead~tbody td:not([colspan]){white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap} tr.chosen td,tr.chosen th{font-weight:700}
details{margin:1rem 0} summary{cursor:pointer;font-weight:700} ul{padding-left:1.2rem;margin:.4rem 0}
@media print{body{max-width:none}figure{break-inside:avoid}}
"""
_TONE = {"fits": "fits", "tight": "tight", "does not fit": "unfit"}
_VERDICT = {
    "fits": "It fits",
    "tight": "Tight: whether it fits depends on fragmentation",
    "does not fit": "It does not fit in memory",
}


@dataclass(frozen=True)
class Picture:
    """A picture of the report, with what it is called and what it shows.

    Attributes:
        path: of the PNG file for wide pages.
        narrow: the same drawn for a phone, a PNG.
    """

    heading: str
    caption: str
    path: Path
    narrow: bytes


def page(
    estimate: StepEstimate,
    values: Mapping[str, Any],
    compared: Mapping[str, StepEstimate | str],
    pictures: Sequence[Picture],
) -> str:
    """The whole page. Arguments as for `simulation_report.write_report`."""
    scenario = estimate.scenario
    title = f"{model_text(scenario.model)} on {scenario.degrees.devices} × {scenario.profile.name}"
    parts = [
        f'<p class="kicker">{escape(_kicker(values))}</p><h1>{escape(title)}</h1>',
        f'<p class="muted">{escape(_configuration(estimate, values))}</p>',
        _answer(estimate, values),
        _next(values["next"]),
        _replicas(values.get("replicas")),
        _policies(estimate, compared),
        *(_figure(p) for p in pictures),
        _section("Not modelled", _bullets(values["not_modelled"])),
        _constants(estimate),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join(p for p in parts if p)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _kicker(values: Mapping[str, Any]) -> str:
    """With sites the page is about one replica, at the site to look at first."""
    if "replicas" not in values:
        return "Steelyard: a simulated training step"
    return (
        f"Steelyard: a simulated training step of one of {len(values['replicas']['sites'])} replicas, {values['site']}"
    )


def _configuration(estimate: StepEstimate, values: Mapping[str, Any]) -> str:
    s = estimate.scenario
    ping_pong = " × 2 (ping-pong)" if s.ping_pong else ""
    return (
        f"Policy {s.policy}; {s.degrees}; {s.micro_batches}{ping_pong} × {s.chunk_tokens:,} tokens a rank, "
        f"{estimate.tokens:,.0f} a step; {s.precision}, sharding {s.sharding}, recompute {s.recompute}. "
        f"Documents: {values['sampler']}; {values['batches']} {'batch' if values['batches'] == 1 else 'batches'}."
    )


def _answer(estimate: StepEstimate, values: Mapping[str, Any]) -> str:
    memory, (low, high) = estimate.memory, estimate.band_s
    verdict = values["verdict"]
    cause = values["dominant"]
    lost = {k: v for k, v in estimate.shares.items() if k not in (*USEFUL, "optimizer")}
    worst = max(lost, key=lambda name: lost[name])
    sentence = (
        f"A step takes <b>{_time(estimate.step_time_s)}</b>, {_time(low)} … {_time(high)} with its band. "
        f"Most of it goes to {escape(CAUSES[cause])} ({estimate.shares[cause]:.0%})"
    )
    if lost[worst] >= 0.005:
        sentence += f"; most is lost to {escape(CAUSES[worst])} ({lost[worst]:.0%})"
    most = 1.08 * max(memory.capacity, memory.high)
    cards = [
        _card(_time(estimate.step_time_s), "a step", _bar(low, high, 1.15 * high, mark=estimate.step_time_s)),
        _card(f"{estimate.tokens_per_s_per_device:,.0f}", "tokens a second and device", ""),
        _card(f"{estimate.mfu_causal:.1%}", f"MFU of causal pairs; {estimate.mfu:.1%} with attention in full", ""),
        _card(f"{escape(format_bytes(memory.expected))}",
              f"on the fullest device, of {escape(format_bytes(memory.capacity))} (line)",
              _bar(0, memory.high, most, mark=memory.capacity)),
    ]  # fmt: skip
    return (
        f'<section id="answer" class="answer {_TONE[verdict]}"><p class="verdict">{_VERDICT[verdict]}</p>'
        f'<p class="sentence">{sentence}.</p></section><div class="cards">{"".join(cards)}</div>'
    )


def _time(seconds: float) -> str:
    return escape(format_time(seconds))


def _card(value: str, what: str, below: str) -> str:
    return f'<div class="card"><b>{value}</b><p>{what}</p>{below}</div>'


def _bar(low: float, high: float, most: float, *, mark: float) -> str:
    """A bar from low to high on a scale that ends at `most`, with a mark."""
    left, width, at = (100 * x / most for x in (low, high - low, mark))
    return f'<div class="bar"><i style="left:{left:.1f}%;width:{width:.1f}%"></i><u style="left:{at:.1f}%"></u></div>'


def _section(heading: str, content: str, name: str = "") -> str:
    anchor = name or heading.lower().replace(",", "").replace(" ", "-")
    return f'<section id="{escape(anchor)}"><h2>{escape(heading)}</h2>{content}</section>'


def _bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in lines) + "</ul>"


def _next(suggestions: Sequence[Mapping[str, Any]]) -> str:
    if not suggestions:
        return _section("Try next", "<p>Nothing one change away is known to be worth a try.</p>", "next")
    cards = "".join(
        f'<div class="card"><b>{escape(s["change"])}</b><p>{escape(s["reason"])}</p>'
        f"<p>{_time(s['step_time_s'])} a step, {s['tokens_per_s_per_device']:,.0f} tokens/s per device</p></div>"
        for s in suggestions
    )
    return _section("Try next", f'<div class="cards next">{cards}</div>', "next")


def _policies(estimate: StepEstimate, compared: Mapping[str, StepEstimate | str]) -> str:
    if len(compared) < 2:
        return ""
    heads = (
        "policy", "step", "tokens/s per device", "waiting for work", "exposed transfers", "bubble", "pairs kept",
        "memory",
    )  # fmt: skip
    rows = []
    for name, e in compared.items():
        chosen = ' class="chosen"' if name == estimate.scenario.policy else ""
        if isinstance(e, str):
            rows.append(f'<tr{chosen}><th>{escape(name)}</th><td colspan="7">refused: {escape(e)}</td></tr>')
            continue
        numbers = (
            format_time(e.step_time_s), f"{e.tokens_per_s_per_device:,.0f}", f"{e.shares['imbalance']:.1%}",
            f"{e.exposed_comm_share:.1%}", f"{e.bubble_share:.1%}", f"{e.pairs_kept:.0%}",
        )  # fmt: skip
        cells = "".join(f'<td class="n">{escape(n)}</td>' for n in numbers)
        rows.append(f"<tr{chosen}><th>{escape(name)}</th>{cells}<td>{escape(e.memory.verdict)}</td></tr>")
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    least = min(e.pairs_kept for e in compared.values() if isinstance(e, StepEstimate))
    note = (
        '<p class="muted">Where less than 100% of the attention pairs are kept, documents are cut: that run is shorter '
        "because it computes another function.</p>"
    )
    return _section("Policies on the same documents", table + (note if least < 0.995 else ""), "policies")


def _replicas(replicas: Mapping[str, Any] | None) -> str:
    if replicas is None:
        return ""
    sites = "".join(
        f'<tr><th>{escape(s["name"])}</th><td class="n">{_time(s["step_time_s"])}</td>'
        f'<td class="n">{s["busy_share"]:.0%}</td><td>{escape(s["device"])}</td>'
        f'<td>{escape(s["verdict"])}</td><td class="n">{s["memory_gib_by_rank_max"]:.0f} of '
        f"{s['memory_capacity_gib']:.0f} GiB</td></tr>"
        for s in replicas["sites"]
    )
    text = (
        f"<p>{len(replicas['sites'])} sites under {escape(replicas['mode'])}: {replicas['tokens_per_s']:,.0f} tokens a "
        f"second together, a step in {_time(replicas['step_time_s'])}, "
        f"{replicas['exposed_share']:.1%} of the time in exposed transfers, "
        f"{replicas['waiting_share']:.1%} waiting for others.</p>"
    )
    names = ("site", "step alone", "at work", "device", "memory", "")
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
    return _section("Sites", f'{text}<div class="scroll"><table>{head}<tbody>{sites}</tbody></table></div>', "sites")


def _figure(picture: Picture) -> str:
    wide, narrow = (base64.b64encode(png).decode() for png in (picture.path.read_bytes(), picture.narrow))
    alt = escape(f"{picture.heading}: {picture.caption}")
    image = f'<img alt="{alt}" src="data:image/png;base64,{wide}">'
    source = f'<source media="(max-width:46rem)" srcset="data:image/png;base64,{narrow}">'
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    figure = f"<figure><picture>{source}{image}</picture>{caption}</figure>"
    return _section(picture.heading, figure, picture.path.stem)


def _constants(estimate: StepEstimate) -> str:
    """What the profile holds: each constant with its value and source."""
    profile = estimate.scenario.profile
    rows = []
    for name, source in profile.sources.items():
        section, _, rest = name.partition(".")
        owner: Any = profile if section == "constants" else profile.kernels[rest.partition(".")[0]]
        value = getattr(owner, name.rpartition(".")[2])
        rows.append(f'<tr><th>{escape(name)}</th><td class="n">{value:.4g}</td><td>{escape(source)}</td></tr>')
    table = f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>'
    summary = f"<summary>Constants of {escape(profile.name)} and their sources</summary>"
    return f'<details id="constants">{summary}{table}</details>'
