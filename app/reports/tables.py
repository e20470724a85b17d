"""How does a table read in a terminal: what is never broken, and what bounds and gains are called?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from membound.app import text

BOUNDS = {
    "memory_weights": "weights",
    "memory_activations": "activations",
    "memory_kv": "KV cache",
    "output_tokens_per_s": "tokens/s",
}


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Numbers, which are on the right, are never broken; words that are too long go on in the next line."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def fold(table: Table, name: str) -> None:
    """A name that is too long goes on in the next line; nothing else is broken or cut."""
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header != name


def moves(before: str, after: str | None) -> str:
    """`weights -> compute`, or the bound that stays."""
    first = BOUNDS.get(before, before)
    if after is None or after == before:
        return first
    return f"{first} → {BOUNDS.get(after, after)}"


def interval(row: dict[str, Any]) -> str:
    return f"{row['low']:.2f}–{row['high']:.2f}" if row["low"] is not None else ""


def gain_of(value: float | None) -> str:
    return "" if value is None else text.gain(value)


def counts_of(title: str, counts: dict[str, int]) -> Iterator[str]:
    if counts:
        yield f"{title}:"
    for reason, count in counts.items():
        yield f"  {count:,}: {reason}"
