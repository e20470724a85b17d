"""How do two kept runs differ: in their numbers, their scenarios, and what they ran on?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from membound.app.records import Run
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
MOST_SHOWN = 120  # characters of a part of a scenario that only one of the runs has
BASELINE = "baseline"
_KERNELS = re.compile(r"kernels (?P<kernels>.+), (?P<threads>\d+) threads")


# Where two documents differ, and what the first and the second have there.
Difference = tuple[str, str | None, str | None]


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
    users = _users(_scenario(run))
    if document.get("metrics"):
        return dict(_at_a_server(document["metrics"], users))
    if document.get("comparisons"):
        return dict(_compared(document["comparisons"], users))
    return dict(_summarised(document.get("summary") or run.summary, users, run.kind != "simulate"))


def _summarised(summary: Mapping[str, Any], users: str | None, measured: bool) -> Iterator[tuple[Key, Value]]:
    for metric, statistic, unit in SUMMARY:
        value = summary.get(metric)
        number = value.get(statistic) if isinstance(value, Mapping) else value
        if number is not None:
            yield Key(metric, statistic, BASELINE, _point({}, users)), Value(number, unit, None, measured)


def _compared(rows: list[Mapping[str, Any]], users: str | None) -> Iterator[tuple[Key, Value]]:
    for row in rows:
        is_time = row["technique"] == BASELINE
        key = Key(row["metric"], "mean" if is_time else None, row["technique"], _point(row["point"], users))
        number = row["predicted"] if row["measured"] is None else row["measured"]
        yield key, Value(number, row["unit"], row["spread"], row["measured"] is not None)


def _at_a_server(rows: list[Mapping[str, Any]], users: str | None) -> Iterator[tuple[Key, Value]]:
    for row in rows:
        key = Key(row["metric"], row["statistic"], BASELINE, _point(row["point"], users))
        yield key, Value(row["measured"], row["unit"], row["spread"], True)


def _users(scenario: Any) -> str | None:
    """The users of a closed loop; None of other arrivals."""
    for name in USERS.split("."):
        scenario = scenario.get(name) if isinstance(scenario, Mapping) else None
    return None if scenario is None else str(scenario)


def _point(point: Mapping[str, Any], users: str | None) -> tuple[tuple[str, str], ...]:
    """A point as all runs name it, so that one of a sweep is found in a run of that point alone.

    Of a closed loop these are its users: how many requests they send changes only how well the numbers are known.
    """
    users = point.get(USERS, users)
    if users is None:
        return tuple(sorted((path, str(value)) for path, value in point.items()))
    others = {path: str(value) for path, value in point.items() if path not in (USERS, "workload.requests")}
    return (USERS, str(users)), *sorted(others.items())


def scenario_differences(a: Run, b: Run) -> list[Difference]:
    """Each field in which the scenarios differ, with what both have there."""
    return document_differences(_scenario(a), _scenario(b))


def _scenario(run: Run) -> Any:
    return parse_yaml(run.scenario_yaml(), f"scenario of run {run.id}")


def document_differences(a: Any, b: Any, path: str = "") -> list[Difference]:
    """The smallest parts of two documents in which they differ, by their paths; None where one has no such part."""
    if a == b and type(a) is type(b):
        return []
    of_a, of_b = _children(a), _children(b)
    if of_a is None or of_b is None:
        return [(path, _shortly(a), _shortly(b))]
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    found = [document_differences(of_a.get(name), of_b.get(name), f"{path}{name}") for name in names]
    return [(where.removeprefix("."), in_a, in_b) for parts in found for where, in_a, in_b in parts]


def _children(node: Any) -> dict[str, Any] | None:
    """The parts of a node by what they add to its path; an item of a list by its name, where all have one."""
    if isinstance(node, Mapping):
        return {f".{key}": inner for key, inner in node.items()}
    if isinstance(node, list) and node and all(isinstance(item, Mapping) for item in node):
        names = [str(item.get("name", at)) for at, item in enumerate(node)]
        if len(set(names)) == len(names):
            return {f"[{name}]": item for name, item in zip(names, node, strict=True)}
    return None


def _shortly(node: Any) -> str | None:
    """A part of a document in one line."""
    if node is None or isinstance(node, str):
        return node
    words = json.dumps(node, ensure_ascii=False)
    return words if len(words) <= MOST_SHOWN else f"{words[: MOST_SHOWN - 1]}…"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """What two mappings do not share, with what both have there."""
    names = [*a, *(name for name in b if name not in a)]
    told = [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]
    return [(name, None if x is None else str(x), None if y is None else str(y)) for name, x, y in told]


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
