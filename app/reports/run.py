"""How does a run read in a terminal: its metrics, what each replica did, and what the numbers rest on?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.app.reports.tables import BOUNDS

# What a terminal calls the metrics of `roofline/METRICS.md`.
_NAMES = {
    "duration_s": "duration",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "requests_per_s": "req/s",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "E2E latency",
    "goodput_rps": "goodput, req/s",
    "slo_attainment": "SLO attainment",
    "kv_utilization": "KV cache used",
    "kv_waste": "KV cache wasted",
    "prefix_hit_rate": "prefix hits",
    "tokens_per_step": "tokens per step",
    "acceptance_rate": "guesses accepted",
    "bottleneck_share": "time bound by",
    "cost_usd_per_million_tokens": "USD per million output tokens",
    "energy_j_per_token": "J per output token, drawn",
    "energy_j_per_token_at_board_power": "J per output token, at board power",
}


_OF_THE_OBJECTIVE = ("goodput_rps", "slo_attainment")
# What is read of a note before any number is.
_WARNINGS = ("overloaded", "turned away", "waited for a seat", "batches are static")


_SHARES = ("slo_attainment", "kv_utilization", "kv_waste", "prefix_hit_rate", "acceptance_rate")


def with_energy(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a simulated run with the energy of an output token where all its devices draw their board power.

    That is the most that they draw, as in `membound plan`; left out where a data sheet has no power.
    """
    from membound.roofline.hardware import get_hardware
    from membound.roofline.scenario import parse_scenario

    summary, cluster = document["summary"], document.get("cluster")
    tokens = summary["output_tokens_per_s"] * summary["duration_s"]
    if cluster is not None:
        held = [(one["hardware"], one["device_hours"] * 3600) for one in cluster["replicas"]]
    else:
        scenario = parse_scenario(document["scenario"])
        pools, parallel = scenario.engine.disaggregation, scenario.setup.parallel
        devices = parallel.devices if pools is None else pools.devices(parallel)
        held = [(scenario.hardware, devices * summary["duration_s"])]
    powers = {name: get_hardware(name).power_w for name, _ in held}
    if not tokens or None in powers.values():
        return document
    joules = sum((powers[name] or 0.0) * device_s for name, device_s in held)
    return document | {"energy_j_per_token_at_board_power": joules / tokens}


def run(document: dict[str, Any]) -> RenderableType:
    """A run's summary."""
    summary, provenance = document["summary"], document["provenance"]
    if not summary["completed"]:
        why = sorted(provenance["notes"], key=lambda note: "turned away" not in note)
        return Group(f"{document['scenario']['name']}: no request was served", *why)
    table = Table(title=f"{document['scenario']['name']} ({provenance['producer']}, {provenance['hardware']})")
    table.add_column("metric")
    for column in ("value", "p50", "p90", "p99"):
        table.add_column(column, justify="right", no_wrap=column != "value")
    extra = {name: document[name] for name in _NAMES if name in document}
    aimless = not _objective(document)
    for name, value in (summary | extra).items():
        named = _NAMES.get(name, name)
        if value in (None, {}) or (aimless and name in _OF_THE_OBJECTIVE):
            continue  # what nobody saw or asked for is no row; --json has all
        if isinstance(value, dict) and "mean" in value:
            if value["mean"] is not None:
                table.add_row(f"{named}, mean", *(_number(name, value[key]) for key in ("mean", "p50", "p90", "p99")))
        elif isinstance(value, dict):
            shares = (f"{BOUNDS.get(bound, bound)} {share:.0%}" for bound, share in value.items() if share >= 0.005)
            table.add_row(named, ", ".join(shares))
        else:
            table.add_row(named, _number(name, value))
    warnings = [note for note in provenance["notes"] if any(word in note for word in _WARNINGS)]
    others = [note for note in provenance["notes"] if note not in warnings]
    classes = _classes(document.get("classes", []))
    return Group(_verdict(document), *warnings, table, *classes, *_cluster(document.get("cluster")), *others)


def _classes(classes: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """How each service class was served."""
    if not classes:
        return
    table = Table(title="by service class", box=None, pad_edge=False)
    for column in ("class", "served", "TTFT p50", "p99", "TPOT p50", "p99", "preempted", "in time"):
        table.add_column(column, justify="left" if column == "class" else "right", no_wrap=column != "class")
    for one in classes:
        times_s = [one[name][share] for name in ("ttft_s", "tpot_s") for share in ("p50", "p99")]
        table.add_row(
            one["name"],
            f"{one['completed']:,} of {one['requests']:,}",
            *("" if time_s is None else text.seconds(time_s) for time_s in times_s),
            f"{one['preemptions']:,}",
            f"{one['slo_attainment']:.1%}",
        )
    yield table


def _objective(document: dict[str, Any]) -> str:
    """The bounds of the scenario's objective in words; empty where it has none."""
    bounds = document["scenario"].get("slo", {}).items()
    return " and ".join(f"{name.removesuffix('_s').upper()} {text.seconds(bound)}" for name, bound in bounds if bound)


def _verdict(document: dict[str, Any]) -> str:
    """What a run comes to, in one sentence: how many were served how fast, by which objective, and what binds."""
    summary = document["summary"]
    parts = [f"{summary['completed']:,} of {summary['requests']:,} requests served: {_rates(summary)}"]
    if objective := _objective(document):
        parts.append(f"{summary['slo_attainment']:.1%} within {objective}")
    if shares := summary["bottleneck_share"]:
        bound = max(shares, key=shares.__getitem__)
        parts.append(f"bound by {BOUNDS.get(bound, bound)} ({shares[bound]:.0%} of the time)")
    return "; ".join(parts)


def _rates(summary: dict[str, Any]) -> str:
    latencies = (
        f"{named} {text.seconds(summary[name]['mean'])}"
        for name, named in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
        if summary[name]["mean"] is not None
    )
    return ", ".join((f"{text.digits(summary['output_tokens_per_s'], 4)} output tok/s", *latencies))


def _number(name: str, value: float | int | None) -> str:
    """A metric in the unit that its name ends with; seconds in whatever unit keeps their digits."""
    if value is None:
        return ""
    if name in _SHARES:
        return f"{value:.1%}"
    if name.endswith("_s") and not name.endswith("per_s"):
        return text.seconds(value)
    return f"{value:,}" if isinstance(value, int) else text.digits(value, 4)


# Replicas and events of a cluster in a terminal; the document has all replicas and more events.
_MOST_REPLICAS = 20


def _cluster(cluster: dict[str, Any] | None) -> Iterator[RenderableType]:
    """What each replica did, and what happened to the cluster."""
    if cluster is None:
        return
    replicas, events = cluster["replicas"], cluster["events"]
    hidden = len(replicas) - _MOST_REPLICAS
    table = Table(
        title=f"replicas behind a {cluster['router'].replace('_', ' ')} router",
        caption=f"and {hidden} more; --json has all" if hidden > 0 else None,
        box=None,
        pad_edge=False,
    )
    for column in ("", "device", "requests", "busy", "KV used", "hits", "failures", "hours", "USD"):
        table.add_column(column, justify="left" if column == "device" else "right")
    for replica in replicas[:_MOST_REPLICAS]:
        several = f" x {replica['devices']}" if replica["devices"] > 1 else ""
        table.add_row(
            str(replica["replica"]),
            replica["hardware"] + several,
            f"{replica['requests']:,}",
            f"{replica['utilization']:.0%}",
            f"{replica['kv_utilization']:.0%}",
            "" if replica["prefix_hit_rate"] is None else f"{replica['prefix_hit_rate']:.0%}",
            str(replica["failures"]),
            text.digits(replica["device_hours"]),
            "no price" if replica["cost_usd"] is None else text.digits(replica["cost_usd"], 4),
        )
    yield table
    dates = sorted({replica["price_date"] for replica in replicas if replica["price_date"]})
    yield (
        f"{text.digits(cluster['mean_replicas'])} replicas on average, {cluster['most_replicas']} at most: "
        f"{text.digits(cluster['device_hours'])} device-hours, "
        + ("no price" if cluster["cost_usd"] is None else f"{text.digits(cluster['cost_usd'], 4)} USD")
        + (f" at prices of {' and '.join(dates)}" if dates else "")
    )
    if cluster["failures"]:
        yield (
            f"failures: {cluster['failures']}, requests sent again: {cluster['retries']}, tokens lost: "
            f"{cluster['lost_tokens']:,} of KV, {cluster['lost_output_tokens']:,} emitted ones"
        )
    told = [
        f"{text.digits(event['time_s'], 4)} s: {event['replica']} {event['kind']}"
        for event in events
        if event["time_s"] > 0
    ]
    if told:
        more = cluster["event_count"] - (len(events) - len(told)) - _MOST_REPLICAS
        yield ", ".join(told[:_MOST_REPLICAS]) + (f", and {more} more events" if more > 0 else "")
