"""The lengths of a data set's documents, and the imbalance that they cause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from steelyard.data.lengths import DataStatistics
from steelyard.domain.units import format_count
from steelyard.plots.style import ATTENTION, IDLE, INK, MUTED, TOKEN_WISE, WAIT, horizontal_grid, picture


def length_distribution(path: str | Path, statistics: DataStatistics, *, title: str | None = None) -> None:
    """Draw the shares of documents and of tokens by length, and the work of the busiest rank by number of ranks.

    The second panel is left out if the statistics hold no imbalance.
    """
    note = (
        f"{format_count(statistics.documents)} documents, {format_count(statistics.tokens)} tokens "
        f"({statistics.tokenizer}); median {statistics.percentile(50):,}, longest {statistics.max:,} tokens"
    )
    with picture(path, height_in=4.4, title=title or _finding(statistics), note=note) as figure:
        if statistics.imbalance:
            left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
            _draw_imbalance(right, statistics)
        else:
            left = figure.subplots(1, 1)
        _draw_lengths(left, statistics)


def _finding(statistics: DataStatistics) -> str:
    if not statistics.imbalance:
        return f"Document lengths: median {statistics.percentile(50):,}, longest {statistics.max:,} tokens"
    worst = max(statistics.imbalance, key=lambda i: i.ranks)
    waiting = 1 - 1 / worst.max_over_mean
    return f"Packed on {worst.ranks} ranks, {waiting:.0%} of the attention time would be spent waiting"


def _draw_lengths(axes: Axes, statistics: DataStatistics) -> None:
    bins = statistics.bins
    x = np.arange(len(bins))
    documents = np.array([b.documents for b in bins]) / statistics.documents
    tokens = np.array([b.tokens for b in bins]) / statistics.tokens
    axes.bar(x - 0.21, documents, 0.4, color=TOKEN_WISE, linewidth=0, label="documents")
    axes.bar(x + 0.21, tokens, 0.4, color=ATTENTION, linewidth=0, label="tokens")
    if bins[0].low <= statistics.chunk_tokens < bins[-1].high:
        chunk = float(np.log2(statistics.chunk_tokens / bins[0].low)) - 0.5
        label = f"chunk, {statistics.chunk_tokens:,} tokens"
        axes.axvline(chunk, color=WAIT, linewidth=1.3, linestyle=(0, (4, 3)), label=label)
    axes.set_ylim(0, max(documents.max(), tokens.max()) * 1.22)  # room for the legend above the bars
    every = 1 if len(bins) <= 9 else 2
    axes.xaxis.set_major_locator(FixedLocator([float(v) - 0.5 for v in x[::every]]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(bins[0].low, value + 0.5)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("length of the document, tokens")
    axes.set_ylabel("share")
    axes.set_title(f"{_half_holders(statistics)} of the documents hold half of the tokens", loc="left", pad=8)
    horizontal_grid(axes)
    axes.legend(
        loc="upper left", ncols=3, labelcolor=MUTED, handlelength=1.3, columnspacing=1.4, handletextpad=0.5,
        borderaxespad=0.1, facecolor="white", frameon=True, framealpha=1.0, edgecolor="white",
    )  # fmt: skip


def _half_holders(statistics: DataStatistics) -> str:
    """The share of the documents, longest first, that together hold half of the tokens."""
    longest_first = np.sort(statistics.lengths)[::-1]
    count = int(np.searchsorted(np.cumsum(longest_first), statistics.tokens / 2)) + 1
    share = count / statistics.documents
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}" if share >= 0.001 else "Under 0.1%"


def _draw_imbalance(axes: Axes, statistics: DataStatistics) -> None:
    ranks = [i.ranks for i in statistics.imbalance]
    mean = [i.max_over_mean for i in statistics.imbalance]
    high = [i.max_over_mean_p95 for i in statistics.imbalance]
    axes.fill_between(ranks, 1.0, mean, color=IDLE, linewidth=0)
    axes.plot(ranks, high, color=MUTED, linewidth=1.2, linestyle=(0, (1.5, 1.5)), label="packed, 95th percentile")
    axes.plot(ranks, mean, color=WAIT, linewidth=2.0, marker="o", markersize=5, label="packed, mean of the steps")
    axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label="balanced")
    for n, ratio in zip(ranks, mean, strict=True):
        axes.annotate(
            f"{ratio:.2f}", (n, ratio), xytext=(0, 6), textcoords="offset points", ha="center", va="bottom", color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    axes.set_ylim(0, max(*high, 1.0) * 1.1)
    axes.set_xlabel("ranks, one packed chunk each")
    axes.set_title("Attention work, busiest rank over mean", loc="left", pad=8)
    horizontal_grid(axes)
    axes.legend(loc="lower left", labelcolor=MUTED, facecolor="white", frameon=True, framealpha=1.0, edgecolor="white")


def _power(low: int, bins_up: float) -> str:
    """64, 128, … 1K, 2K: lengths as people write powers of two."""
    length = low * 2**bins_up
    for unit, scale in (("M", 2**20), ("K", 2**10)):
        if length >= scale:
            return f"{length / scale:g}{unit}"
    return f"{length:g}"
