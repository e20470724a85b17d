"""How does the error of predictions read in a terminal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.app.reports.tables import counts_of

# Rows of a table of groups in a terminal; the document has them all.
_MOST_GROUPS = 20


def validation(document: dict[str, Any]) -> RenderableType:
    """Errors against a table of measurements by group, the worst rows, and why rows were left out."""
    by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for group in document["groups"] + document["left_out"]:
        by_names.setdefault(tuple(group["by"]), []).append(group)
    return Group(
        f"{document['table']}: {document['rows']:,} rows, {document['predicted']:,} predicted, "
        f"{document['refused']:,} refused, {document['judged']:,} judged",
        *_in_sample(document["fitted_to_it"]),
        *_of_one(by_names, document["judged"]),
        *(
            _groups(names, groups)
            for names, groups in by_names.items()
            if not _is_all(names, groups, document["judged"])
        ),
        *_worst(document["worst"]),
        *counts_of("refused", document["refusals"]),
        *counts_of("predicted, but not judged", document["set_aside"]),
    )


def _in_sample(devices: list[str]) -> Iterator[str]:
    if devices:
        yield (
            f"in-sample: kernels of {', '.join(devices)} were fitted to this table on this machine, so its errors say "
            "how well they fit, not how well they predict; give rows that they were not fitted to"
        )


def _is_all(names: tuple[str, ...], groups: list[dict[str, Any]], judged: int) -> bool:
    """Whether the one group has all rows, so that its table would be that of all."""
    return bool(names) and len(groups) == 1 and groups[0]["n"] == judged


def _of_one(by_names: dict[tuple[str, ...], list[dict[str, Any]]], judged: int) -> Iterator[str]:
    alike = {
        name: value
        for names, groups in by_names.items()
        if _is_all(names, groups, judged)
        for name, value in groups[0]["by"].items()
    }
    if alike:
        yield "all judged rows are of " + ", ".join(f"{name} {value}" for name, value in alike.items())


def _groups(names: tuple[str, ...], groups: list[dict[str, Any]]) -> Table:
    hidden = len(groups) - _MOST_GROUPS
    table = Table(
        title=f"by {' and '.join(names)}" if names else "all rows",
        caption=f"and {hidden} more; --json has all" if hidden > 0 else None,
        box=None,
        pad_edge=False,
    )
    for name in names:
        table.add_column(name)
    for column in ("rows", "median", "mean", "90 %", "bias", "in interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups[:_MOST_GROUPS]:
        table.add_row(
            *(group["by"][name] for name in names),
            f"{group['n']:,}",
            f"{group['median_ape']:.1%}",
            f"{group['mean_ape']:.1%}",
            f"{group['p90_ape']:.1%}",
            f"{group['bias']:+.1%}",
            f"{group['within_interval']:.0%}",
        )
    return table


def _worst(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield "the worst rows:"
    for row in rows:
        named = ", ".join(part for part in (row["source"], row["device"], row["model"]) if part)
        low, high = text.digits(row["low"]), text.digits(row["high"])
        reason = f" ({row['reason']})" if row["reason"] else ""
        yield f"  line {row['line']}: {named}: {row['what']}"
        unit = f" {row['unit']}" if row["unit"] else ""
        yield (
            f"    measured {text.digits(row['measured'])}{unit}, predicted {text.digits(row['predicted'])}{unit} "
            f"[{low}, {high}]{reason}"
        )
