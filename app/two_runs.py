"""In what do two kept runs differ: in their numbers, in their scenarios, and in what they ran on?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from membound.app.store import Run
from membound.roofline.reading.plain_yaml import parse_yaml

USERS = "workload.arrivals.concurrency"
# What of a summary is compared: a key, a statistic of its distribution, and the unit.
SUMMARY = (
    *(("tpot_s", "mean", "s"), ("tpot_s", "p99", "s"), ("ttft_s", "mean", "s"), ("ttft_s", "p99", "s")),
    *(("itl_s", "p99", "s"), ("e2e_s", "mean", "s"), ("e2e_s", "p99", "s")),
    *(("output_tokens_per_s", None, "tokens/s"), ("goodput_rps", None, "requests/s")),
    *(("slo_attainment", None, "share"), ("kv_utilization", None, "share"), ("acceptance_rate", None, "share")),
)
# More of these is neither better nor worse.
NEUTRAL = ("kv_utilization",)
BASELINE = "baseline"
_KERNELS = re.compile(r"kernels (?P<kernels>.+), (?P<threads>\d+) threads")


@dataclass(frozen=True)
class Key:
    """What a number is of: a metric with its statistic, the gain of a technique, and the point of the sweep."""

    metric: str
    statistic: str | None
    technique: str
    point: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Value:
    """A number in its unit; `spread` is half the range of its repeats, where there were any."""

    number: float
    unit: str
    spread: float | None
    measured: bool


@dataclass(frozen=True)
class Pair:
    """The same number of two runs, None where a run has none."""

    key: Key
    a: Value | None
    b: Value | None

    @property
    def ratio(self) -> float | None:
        """How many times A's number B's is."""
        if self.a is None or self.b is None or not self.a.number:
            return None
        return self.b.number / self.a.number

    @property
    def spread(self) -> float:
        """What the ratio may be off by, as far as repeats show it."""
        ratio = self.ratio
        if ratio is None or self.a is None or self.b is None or not self.b.number:
            return 0.0
        relative = [(one.spread or 0.0) / abs(one.number) for one in (self.a, self.b)]
        return abs(ratio) * sum(relative)

    @property
    def verdict(self) -> str:
        """Whether B is `better`, `worse`, the `same` within the spread, or just `other`."""
        if (ratio := self.ratio) is None or self.key.metric in NEUTRAL:
            return "other"
        if abs(ratio - 1) <= self.spread or ratio == 1:
            return "same"
        assert self.a is not None
        return "better" if (ratio < 1) == (self.a.unit == "s") else "worse"


def pairs(a: Run, b: Run) -> list[Pair]:
    """The numbers of both runs, first those that both have."""
    of_a, of_b = values_of(a), values_of(b)
    keys = [*(key for key in of_a if key in of_b), *(key for key in of_a if key not in of_b)]
    keys += [key for key in of_b if key not in of_a]
    return [Pair(key, of_a.get(key), of_b.get(key)) for key in keys]


def values_of(run: Run) -> dict[Key, Value]:
    """The numbers of a run: of a comparison its gains and its baselines' times, else those of its summary."""
    document = run.comparison() or {}
    given = flattened(parse_yaml(run.scenario_yaml(), f"scenario of run {run.id}"))
    if document.get("metrics"):
        return dict(_at_a_server(document["metrics"], given))
    if document.get("comparisons"):
        return dict(_compared(document["comparisons"], given))
    return dict(_summarised(document.get("summary") or run.summary, given, run.kind != "simulate"))


def _summarised(summary: Mapping[str, Any], given: Mapping[str, str], measured: bool) -> Iterator[tuple[Key, Value]]:
    for metric, statistic, unit in SUMMARY:
        value = summary.get(metric)
        number = value.get(statistic) if isinstance(value, Mapping) else value
        if number is not None:
            yield Key(metric, statistic, BASELINE, _point({}, given)), Value(number, unit, None, measured)


def _compared(rows: list[Mapping[str, Any]], given: Mapping[str, str]) -> Iterator[tuple[Key, Value]]:
    for row in rows:
        is_time = row["technique"] == BASELINE
        key = Key(row["metric"], "mean" if is_time else None, row["technique"], _point(row["point"], given))
        number = row["predicted"] if row["measured"] is None else row["measured"]
        yield key, Value(number, row["unit"], row["spread"], row["measured"] is not None)


def _at_a_server(rows: list[Mapping[str, Any]], given: Mapping[str, str]) -> Iterator[tuple[Key, Value]]:
    for row in rows:
        key = Key(row["metric"], row["statistic"], BASELINE, _point(row["point"], given))
        yield key, Value(row["measured"], row["unit"], row["spread"], True)


def _point(point: Mapping[str, Any], given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A point as all runs name it, so that one of a sweep is found in a run of that point alone.

    Of a closed loop these are its users: how many requests they send changes only how well the numbers are known.
    """
    users = point.get(USERS, given.get(USERS))
    if users is None:
        return tuple(sorted((path, str(value)) for path, value in point.items()))
    others = {path: str(value) for path, value in point.items() if path not in (USERS, "workload.requests")}
    return (USERS, str(users)), *sorted(others.items())


def scenario_differences(a: Run, b: Run) -> list[tuple[str, str | None, str | None]]:
    """Each field in which the scenarios differ, with what both have there."""
    return differences(*(flattened(parse_yaml(run.scenario_yaml(), f"scenario of run {run.id}")) for run in (a, b)))


def flattened(node: Any, path: str = "") -> dict[str, str]:
    """The leaves of a document by their dotted paths."""
    if isinstance(node, Mapping):
        items = [(f"{path}.{key}" if path else str(key), inner) for key, inner in node.items()]
    elif isinstance(node, list) and any(isinstance(item, Mapping | list) for item in node):
        items = [(f"{path}[{_name(item, at)}]", inner) for at, item in enumerate(node) for inner in (_unnamed(item),)]
    else:
        return {path: node if isinstance(node, str) else json.dumps(node, ensure_ascii=False)}
    if not items:
        return {path: "{}"} if path else {}
    return {leaf: value for inner_path, inner in items for leaf, value in flattened(inner, inner_path).items()}


def _name(item: Any, at: int) -> str:
    """An item of a list by its name where it has one, so that one more does not move all that follow."""
    return str(item["name"]) if isinstance(item, Mapping) and "name" in item else str(at)


def _unnamed(item: Any) -> Any:
    if isinstance(item, Mapping) and "name" in item:
        return {key: value for key, value in item.items() if key != "name"}
    return item


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """What two mappings do not share, with what both have there; None where one has nothing."""
    names = [*a, *(name for name in b if name not in a)]
    told = [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]
    return [(name, *(None if value is None else str(value) for value in values)) for name, *values in told]


def conditions_of(run: Run) -> dict[str, Any]:
    """With which code and on what a run was made, as far as it or its notes say so."""
    document = run.comparison() or {}
    provenance = document.get("provenance") or {}
    server = provenance.get("endpoint") or {}
    conditions: dict[str, Any] = {
        **(provenance.get("versions") or {}),
        "server": server.get("url"),
        "tool": server.get("tool"),
        "stalls": provenance.get("stalls") if provenance.get("producer") == "runtime" else None,
        "conditions": next((row["conditions"] for row in document.get("comparisons", [])), None),
        **run.conditions(),
    }
    for note in [*document.get("notes", []), *provenance.get("notes", [])]:
        if found := _KERNELS.fullmatch(note):
            conditions |= found.groupdict()
    return {name: value for name, value in conditions.items() if value is not None}
