"""How does a sweep read in a terminal?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType

from membound.app import text
from membound.app.reports.tables import BOUNDS, table_of

_SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft_s", "tpot_s", "goodput_rps", "acceptance_rate")


def sweep(document: dict[str, Any]) -> RenderableType:
    """A row a point: its values and the metrics that matter most; the document has all."""
    points = document["points"]
    paths = list(points[0]["values"])
    summaries = [point["summary"] for point in points if point["summary"] is not None]
    metrics = [name for name in _SHOWN if any(summary.get(name) is not None for summary in summaries)]
    names = [path.rsplit(".", 1)[-1] for path in paths]
    title = f"{document['scenario']['name']}, by {document['by']}; p50 (p99) where there are percentiles"
    table = table_of(title, *names, *metrics, "bottleneck", right=tuple(metrics))
    for point in points:
        values = [str(point["values"][path]) for path in paths]
        if point["summary"] is None:
            table.add_row(*values, *[""] * len(metrics), "refused")
            continue
        shares = point["summary"]["bottleneck_share"]
        most = max(shares, key=shares.__getitem__)
        cells = [_cell(name, point["summary"].get(name)) for name in metrics]
        table.add_row(*values, *cells, f"{BOUNDS.get(most, most)} {text.percent(shares[most])}")
    reasons = Counter(point["reason"] for point in points if point["summary"] is None)
    return Group(table, *(f"refused: {reason} ({count} of {len(points)} points)" for reason, count in reasons.items()))


def _cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        if value["p50"] is None:
            return ""
        return f"{text.seconds(value['p50'])} ({text.seconds(value['p99'])})"
    if value is None:
        return ""
    return text.seconds(value) if name.endswith("_s") and not name.endswith("per_s") else text.digits(value)
