"""How does a sweep read in a terminal?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table

from membound.app import text
from membound.app.reports.tables import BOUNDS

_SHOWN = {
    "output_tokens_per_s": "tok/s",
    "requests_per_s": "req/s",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "goodput_rps": "goodput",
    "acceptance_rate": "acceptance",
    "cost_usd_per_million_tokens": "$/M out",
}
# Where the row is too long, a swept value goes on in the next line rather than take more columns than these.
_WIDEST_VALUE = 20
_BETWEEN_COLUMNS = 2


def sweep(document: dict[str, Any]) -> RenderableType:
    """A row a point: its values and the metrics that matter most; the document has all."""
    points = document["points"]
    summaries = [point["summary"] for point in points]
    swept = [_values(points, path) for path in points[0]["values"]]
    aimed = any(document["scenario"].get("slo", {}).values())
    names = [name for name in _SHOWN if aimed or name != "goodput_rps"]
    metrics = [_metric(summaries, name) for name in names if any(s and s.get(name) is not None for s in summaries)]
    fewer = [summary is not None and _waiting(summary) >= 0.5 for summary in summaries]
    if any(fewer):
        at_once = ("" if summary is None else f"{summary['batch']:.0f}" for summary in summaries)
        metrics.insert(0, _Column("at once", tuple(at_once), number=True))
    metrics.append(_Column("bottleneck", tuple(_bottleneck(summary) for summary in summaries)))
    reasons = Counter(point["reason"] for point in points if point["summary"] is None)
    return Group(
        _Points(f"{document['scenario']['name']}, by {document['by']}", tuple(swept), tuple(metrics)),
        *_waiting_said(fewer),
        *(f"refused: {reason} ({count} of {len(points)} points)" for reason, count in reasons.items()),
        *document["notes"],
    )


def _waiting(summary: dict[str, Any]) -> float:
    """Sequences under way that no engine decodes, as closed forms say; of a run nobody asks."""
    return summary["concurrency"] - summary["batch"] if "batch" in summary else 0.0


def _waiting_said(fewer: list[bool]) -> Iterator[str]:
    if any(fewer):
        yield (
            f"at {sum(fewer)} of {len(fewer)} points more sequences are under way than memory or seats hold: so many "
            "decode at once, and the others wait for their first token"
        )


@dataclass(frozen=True)
class _Column:
    header: str
    cells: tuple[str, ...]
    number: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(cell) for cell in (self.header, *self.cells))


@dataclass(frozen=True)
class _Points:
    """The points in as many tables as it takes for every metric to be shown whole, each with what was swept."""

    title: str
    swept: tuple[_Column, ...]
    metrics: tuple[_Column, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, metrics in enumerate(self._parts(options.max_width)):
            yield self._table(self.title if index == 0 else None, metrics)

    def _parts(self, width: int) -> Iterator[list[_Column]]:
        """The metrics in their order, as many at a time as fit beside what was swept."""
        taken = sum(min(column.width, _WIDEST_VALUE) for column in self.swept)
        left = width - taken - _BETWEEN_COLUMNS * (len(self.swept) - 1)
        part: list[_Column] = []
        for metric in self.metrics:
            if part and sum(one.width + _BETWEEN_COLUMNS for one in (*part, metric)) > left:
                yield part
                part = []
            part.append(metric)
        yield part

    def _table(self, title: str | None, metrics: list[_Column]) -> Table:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in self.swept:
            table.add_column(column.header, overflow="fold")
        for column in metrics:
            table.add_column(column.header, justify="right" if column.number else "left", no_wrap=True)
        for row in zip(*(column.cells for column in (*self.swept, *metrics)), strict=True):
            table.add_row(*row)
        return table


def _values(points: list[dict[str, Any]], path: str) -> _Column:
    """What was swept, by its field's own name where no other swept field has the same."""
    name = path.rsplit(".", 1)[-1]
    is_alone = sum(other.rsplit(".", 1)[-1] == name for other in points[0]["values"]) == 1
    return _Column(name if is_alone else path, tuple(_worded(point["values"][path]) for point in points))


def _worded(value: Any) -> str:
    """A value as people say it: `tp 1, dp 8` of a mapping, `eagle depth 3 + awq` of a list of them."""
    if isinstance(value, list):
        return " + ".join(map(_worded, value)) or "none"
    if isinstance(value, dict):
        told = {key: field for key, field in value.items() if field is not None}
        name = [str(told.pop("name"))] if "name" in told else []
        return " ".join([*name, ", ".join(f"{key} {_worded(field)}" for key, field in told.items())]).strip()
    return str(value)


def _metric(summaries: list[dict[str, Any] | None], name: str) -> _Column:
    values = [None if summary is None else summary.get(name) for summary in summaries]
    percentiles = " p50 (p99)" if any(isinstance(value, dict) for value in values) else ""
    return _Column(_SHOWN[name] + percentiles, tuple(_cell(name, value) for value in values), number=True)


def _bottleneck(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "refused"
    shares = summary["bottleneck_share"]
    most = max(shares, key=shares.__getitem__)
    return f"{BOUNDS.get(most, most)} {text.percent(shares[most])}"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        if value["p50"] is None:
            return ""
        return f"{text.seconds(value['p50'])} ({text.seconds(value['p99'])})"
    if value is None:
        return ""
    return text.seconds(value) if name.endswith("_s") and not name.endswith("per_s") else text.digits(value)
