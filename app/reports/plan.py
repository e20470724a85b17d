"""How do plans, and the largest rate within an objective, read in a terminal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.app.reports.tables import fold, table_of

_MOST_FRONT = 12


def plan(document: dict[str, Any]) -> RenderableType:
    """The answer with its numbers, what comes next to it, the front, and what the answer depends on."""
    demand, best = document["demand"], document["best"]
    load = f"{demand['rate_rps']:g} requests/s" if demand["rate_rps"] else f"{demand['concurrency']:g} clients"
    load += f" who think for {text.seconds(demand['think_s'])}" if demand["concurrency"] and demand["think_s"] else ""
    bounds = ", ".join(
        f"p99 {name.removesuffix('_s').upper()} {text.seconds(v)}" for name, v in demand["slo"].items() if v
    )
    parts: list[RenderableType] = [
        f"{demand['model']}, {load}, {demand['prompt_tokens']:.0f} tokens in and {demand['output_tokens']:.0f} out, "
        f"{bounds}, engine profile '{demand['profile']}'; {document['screened']:,} replicas screened, "
        f"{document['simulated']} deployments simulated"
    ]
    if best is None:
        parts.append(f"no answer: {document['reason']}")
    rows = [("best", best)] if best else []
    rows += [("next", one) for one in document["confirmed"][1:]]
    rows += [(name, one) for name, one in list(document["options"].items())[1:] if one is not None]
    if rows:
        parts += [_deployments(rows, document["objective"]), *_made_up(rows), *_devices(rows)]
    for name, option in document["options"].items():
        if option is not None and (lossy := option["deployment"]["lossy"]):
            prices = "; ".join(f"{technique}: {price}" for technique, price in lossy.items())
            parts.append(f"{name} is not the same model in quality; {prices}")
            parts += [] if best is None or option == best else _dearer(name, option, best)
    parts += _compared(document["compared"])
    parts += _own(document["compared"])
    parts += [] if best is None else _at_upper_end(best, document["safest"])
    parts += _sensitivity(document["sensitivity"])
    parts.append(_front(document))
    missing = [f"this is a part of the answer: {document['missing']}"] if document["missing"] else []
    return Group(*parts, *document["notes"], *missing)


def _dearer(name: str, option: dict[str, Any], best: dict[str, Any]) -> list[str]:
    """That a smaller format is no cheaper: where computing binds, it only has to be converted."""
    asked, given = option["usd_per_h"], best["usd_per_h"]
    if asked is None or given is None or asked < given:
        return []
    return [f"{name} is no cheaper here than the best as given: {asked:.2f} $/h against {given:.2f}"]


def _divided(deployment: dict[str, Any]) -> str:
    degrees = ((name, deployment["parallel"][name]) for name in ("tp", "pp", "dp", "ep"))
    return ", ".join(f"{name} {value}" for name, value in degrees if value > 1)


def _replicas(deployment: dict[str, Any]) -> str:
    """`4 replicas`, or how many engines compute prompts (prefill) and how many outputs (decode)."""
    pools = deployment["disaggregation"]
    if pools:
        prompts, outputs = pools["prefill_engines"], pools["decode_engines"]
        return f"{prompts + outputs} engines: {prompts} for prompts (prefill) + {outputs} for outputs (decode)"
    replicas = deployment["replicas"]
    return f"{replicas} replica{'s' if replicas > 1 else ''}"


def _deployments(rows: list[tuple[str, dict[str, Any]]], objective: str) -> Table:
    """What each costs and reaches; how it is made up is said below."""
    right = ("$/h", "$/M out", "p99 TTFT", "p99 TPOT", "J/out")
    title = f"deployments that meet the objective, by {objective} ($ and J for tokens of output)"
    table = table_of(title, "", "devices", *right, right=right)
    fold(table, "devices")
    for name, one in rows:
        energy = one["energy_j_per_token_at_board_power"]
        table.add_row(
            name,
            f"{one['gpus']} x {one['device']}",
            _usd(one["usd_per_h"]),
            "" if one["usd_per_h"] is None else f"{one['cost_usd_per_million_tokens']:.2f}",
            *_p99(one),
            "" if energy is None else f"{energy:.2f}",
        )
    return table


def _compared(compared: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """The best of each device and way to serve, with what of it meets the objective where its times are longest."""
    if not any(one["best"] for one in compared):
        return
    held = any(one["best"]["upper_end"] for one in compared if one["best"])
    right = ("$/h", "p99\nTTFT", "p99\nTPOT", "times", *(["at upper\nend", "its\n$/h"] if held else []))
    columns = ("prompts,\noutputs", "devices", "made of", *right)
    table = table_of("the best of each device, by where prompts and outputs are computed", *columns, right=right)
    for one in compared:
        best, way = one["best"], "apart" if one["disaggregated"] else "together"
        if best is None:
            table.add_row(way, one["device"] or "any device", "none")
            continue
        table.add_row(
            way,
            f"{best['gpus']} x {best['device']}",
            _made_of(best["deployment"]),
            _usd(best["usd_per_h"]),
            *_p99(best),
            _sure(best["origin"]),
            *(_longest(one["at_upper_end"]) if held else ()),
        )
    yield table
    yield "* no kernel was measured on this device"
    if held:
        yield (
            "at the upper end all times of a device are as long as their interval allows; so many devices were seen to "
            "meet the objective there"
        )
    for one in compared:
        if one["best"] is None:
            way = "prompts and outputs apart" if one["disaggregated"] else "prompts and outputs together"
            yield f"{one['device'] or 'any device'}, {way}: {one['reason']}"


def _own(compared: list[dict[str, Any]]) -> Iterator[str]:
    """Where all devices were asked for: how to ask of the scenario's alone, which has rows, too."""
    named = {one["device"] for one in compared}
    if None in named and (own := next((name for name in named if name), None)):
        yield f"all devices of the catalog were looked at; --devices {own} asks of the scenario's alone"


def _p99(one: dict[str, Any]) -> tuple[str, str]:
    """99th percentiles of the first token and of the time per token, as simulated or else by closed forms."""
    summary, estimate = one["summary"], one["estimate"]
    ttft = summary["ttft_s"]["p99"] if summary else estimate["ttft_p99_s"]
    tpot = summary["tpot_s"]["p99"] if summary else estimate["tpot_p99_s"]
    return "" if ttft is None else text.seconds(ttft), "" if tpot is None else text.milliseconds(tpot)


def _usd(usd_per_h: float | None) -> str:
    return "no price" if usd_per_h is None else f"{usd_per_h:.2f}"


def _sure(origin: dict[str, Any]) -> str:
    """The interval of a device's times, with a star where no kernel was measured on it."""
    return f"±{text.percent(origin['relative_error'])}{'*' if origin['kind'] == 'inherited' else ''}"


def _made_of(deployment: dict[str, Any]) -> str:
    """`4 x tp 2, ep 2`, or `3 + 2 x tp 2` of engines for prompts and for outputs."""
    pools = deployment["disaggregation"]
    count = f"{pools['prefill_engines']} + {pools['decode_engines']}" if pools else str(deployment["replicas"])
    return f"{count} x {_divided(deployment) or 'tp 1'}"


def _longest(enough: dict[str, Any] | None) -> tuple[str, str]:
    return ("none", "") if enough is None else (str(enough["gpus"]), _usd(enough["usd_per_h"]))


def _at_upper_end(best: dict[str, Any], safest: dict[str, Any] | None) -> Iterator[str]:
    """What it takes where the answer's times are as long as their interval allows."""
    end = best["upper_end"]
    if end is None or end["meets_slo"]:
        return
    longer = f"times {text.percent(end['relative_error'])} longer"
    if best["origin"]["kind"] == "inherited":
        yield f"the best rests on a guess: no kernel was measured on {best['device']}"
    if safest is not None:
        costs = "" if safest["usd_per_h"] is None else f" at {safest['usd_per_h']:.2f} $/h"
        sure = f"{safest['gpus']} x {safest['device']}{costs}"
        yield f"it misses the objective with {longer}; of those compared {sure} ranks first that meets it up to the end"
        return
    enough, at = end["gpus_that_meet_it"], f"at the upper end of the interval, {longer}"
    said = (
        f"it takes {enough} x {end['device_that_meets_it']}"
        if enough
        else f"no number of {best['device']} tried meets the objective"
    )
    yield f"{at}, {said}"


def _made_up(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """How each deployment is made up, who says that it holds, and whether it does where all times are longer."""
    for name, one in rows:
        deployment = one["deployment"]
        pools, devices = deployment["disaggregation"], deployment["gpus_per_replica"]
        each = devices // (pools["prefill_engines"] + pools["decode_engines"]) if pools else devices
        divided = _divided(deployment)
        size = f"{each} device{'s' if each > 1 else ''} each{f' ({divided})' if divided else ''}"
        by, end = "simulation" if one["summary"] else "closed form", one["upper_end"]
        if end is not None:
            holds = "still meets" if end["meets_slo"] else "misses"
            by = f"{by}; {holds} the objective with all times {text.percent(end['relative_error'])} longer"
        yield f"{name}: {_replicas(deployment)}, {size}, up to {deployment['max_num_seqs']} sequences; by {by}"


def _devices(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Of each device what its times rest on, their interval, and where its price is from."""
    for one in {one["device"]: one for _, one in reversed(rows)}.values():
        origin, price = one["origin"], one["price"]
        scopes = origin["inherited_from"]
        relatives = ", ".join("its other kernels" if scope == one["device"] else scope for scope in scopes)
        times = {
            "calibrated": "calibrated on this machine",
            "measured": "kernels measured on it",
            "partly": f"kernels measured on it for {text.percent(origin['measured_share'])} of a decode step, "
            f"the rest inherited from {relatives}",
            "inherited": f"no kernel measured on it, all inherited from {relatives}",
        }[origin["kind"]]
        cost = "no price known"
        if price is not None:
            cost = f"{price['usd_per_h']:.2f} $/h each ({price['source']}, {price['date']})"
        yield f"{one['device']}: {times}, times ±{text.percent(origin['relative_error'])}; {cost}"


def _sensitivity(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    binds = found["binds"] or "nothing that hardware has more of"
    moved = ", ".join(f"{name} {value:+.1f} %" for name, value in _tenths(found["elasticity"]))
    yield f"what binds: {binds}; with a tenth more of a resource it would serve, by closed forms, so much more: {moved}"
    changes = "; ".join(f"with {name}: {answer}" for name, answer in found["answer_changes"].items())
    yield changes or "a tenth more or less of an input changes nothing in the answer"
    yield f"closed forms alone would take {found['screened_answer']}"


def _tenths(elasticity: dict[str, float]) -> list[tuple[str, float]]:
    """What a tenth more of each resource changes, in percent, the most first."""
    return sorted(((name, 10.0 * value) for name, value in elasticity.items()), key=lambda item: -item[1])


def _front(document: dict[str, Any]) -> Table:
    first = next(iter(document["options"]))
    points = [point for point in document["front"] if point["deployment"]["precision"] == first]
    shown = points[:: max(1, -(-len(points) // _MOST_FRONT))]
    right = ("user\ntok/s", "GPU\ntok/s", "$/M\nout", "TTFT")
    table = table_of(
        f"front of precision '{first}' ({len(points)} of {len(document['front'])} points, {len(shown)} shown)",
        *("device", "each", "batch", *right, "SLO", "times"),
        right=("batch", *right, "times"),
    )
    for point in shown:
        usd = point["cost_usd_per_million_tokens"]
        table.add_row(
            f"{point['gpus']} x {point['device']}",
            _divided(point["deployment"]) or "tp 1",
            f"{point['batch']:.0f}",
            text.digits(point["tokens_per_s_per_user"]),
            text.digits(point["tokens_per_s_per_gpu"]),
            _usd(usd),
            text.seconds(point["ttft_s"]),
            "yes" if point["meets_slo"] else "no",
            _sure(point["origin"]),
        )
    return table


def max_rate(document: dict[str, Any]) -> RenderableType:
    """The largest rate within the objective."""
    summary = document["summary"]
    return (
        f"{document['scenario']} serves {text.digits(document['max_rate_rps'])} requests/s within its objective: "
        f"p99 TTFT {text.seconds(summary['ttft_s']['p99'])}, p99 TPOT {text.milliseconds(summary['tpot_s']['p99'])}"
    )
