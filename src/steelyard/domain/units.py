"""Figures as people read them. Inside, everything is seconds, bytes and tokens."""

from __future__ import annotations


def format_bytes(size_bytes: float) -> str:
    """1536 → '1.50 KiB'."""
    value, units = float(size_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    index = 0
    while abs(value) >= 1024 and index < len(units) - 1:
        value /= 1024
        index += 1
    return f"{value:.0f} B" if index == 0 else f"{value:.2f} {units[index]}"


def format_time(time_s: float) -> str:
    """0.00123 → '1.23 ms'."""
    if abs(time_s) >= 60:
        minutes, seconds = divmod(round(time_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.2f} {unit}"
    return f"{time_s * 1e9:.0f} ns"


def format_count(count: float) -> str:
    """12345 → '12.3K'."""
    value = float(count)
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(value) < 999.5:  # more would be shown as 1e+03
            return f"{value:.0f}" if unit == "" else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}E"
