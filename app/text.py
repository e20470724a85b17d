"""How does a quantity read on screen? Bandwidth in GB/s, memory in GiB, times in the unit that keeps three digits."""

from __future__ import annotations

import math
import re

GIB = 2**30
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# What Markdown, and Streamlit's formulas, icons and colours, take for a sign: anywhere, at a word's end, before a line.
_SIGNS = re.compile(
    r"[\\`*\[\]<>$~|]|&(?=[#\w])|(?<!\w)_|_(?!\w)|:(?=[A-Za-z])|^[ \t]*[-+=#]|^[ \t]*\d+[.)](?=\s)", re.MULTILINE
)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def plain(words: str) -> str:
    """Words that somebody else wrote, so that a page shows them as they are, not as the Markdown that they may be."""
    return _SIGNS.sub(lambda sign: f"{sign.group()[:-1]}\\{sign.group()[-1]}", words)


def digits(value: float, significant: int = 3) -> str:
    """A number with `significant` digits and thousands separators, never in scientific notation."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def seconds(value: float) -> str:
    """`0.0123` as "12.3 ms"."""
    scale, unit = next(((scale, unit) for scale, unit in _TIMES if abs(value) >= scale), _TIMES[-1])
    return f"{digits(value / scale)} {unit}"


def known_seconds(value: float | None) -> str:
    """A time, and a dash where there is none."""
    return "–" if value is None else seconds(value)


def usd(value: float | None) -> str:
    """A price in US dollars, and a dash where none is known."""
    return "–" if value is None else f"${value:,.2f}"


def milliseconds(value: float) -> str:
    """Always in ms, where numbers are compared down a column."""
    return f"{digits(value * 1e3)} ms"


def bandwidth(bytes_per_s: float) -> str:
    """`2.1e10` as "21.0 GB/s"."""
    return f"{digits(bytes_per_s / 1e9)} GB/s"


def flop_rate(flop_per_s: float, significant: int = 3) -> str:
    """`1.3e12` as "1.30 TFLOP/s"."""
    return f"{_scaled(flop_per_s, significant)}FLOP/s"


def flops(value: float) -> str:
    """`2.7e8` as "270 MFLOP"."""
    return f"{_scaled(value)}FLOP"


def gib(value: float) -> str:
    """Memory that is held, such as "15.0 GiB"; below a tenth in MiB."""
    return f"{digits(value / GIB)} GiB" if value >= GIB / 10 else f"{digits(value / 2**20)} MiB"


def moved(value: float) -> str:
    """Bytes that are moved, in the decimal units of bandwidth: "269 MB"."""
    return f"{_scaled(value)}B"


def percent(fraction: float) -> str:
    """`0.873` as "87 %"."""
    return f"{fraction * 100:.0f} %"


def signed_percent(fraction: float) -> str:
    """`-0.031` as "−3.1 %"."""
    return f"{fraction * 100:+.1f} %".replace("-", "−")


def gain(ratio: float) -> str:
    """`1.8333` as "1.83×"."""
    return f"{ratio:.2f}×"


def rate(tokens_per_s: float) -> str:
    """`41.234` as "41.2 tok/s"."""
    return f"{digits(tokens_per_s)} tok/s"


def _scaled(value: float, significant: int = 3) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _SI if abs(value) >= scale), (1.0, ""))
    return f"{digits(value / scale, significant)} {prefix}"
