"""How do stacks, advice, plans and sweeps read in a terminal?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text

_BOUNDS = {"memory_weights": "weights", "memory_kv": "KV cache", "output_tokens_per_s": "tokens/s"}
_MOST_FRONT = 12


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Numbers, which are on the right, are never broken; words that are too long go on in the next line."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def _fold(table: Table, name: str) -> None:
    """A name that is too long goes on in the next line; nothing else is broken or cut."""
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header != name


def _moves(before: str, after: str | None) -> str:
    """`weights -> compute`, or the bound that stays."""
    first = _BOUNDS.get(before, before)
    if after is None or after == before:
        return first
    return f"{first} → {_BOUNDS.get(after, after)}"


def _interval(row: dict[str, Any]) -> str:
    return f"{row['low']:.2f}–{row['high']:.2f}" if row["low"] is not None else ""


def _named(technique: str, parameters: dict[str, Any], drafts: dict[str, Any] | None) -> str:
    """A technique with the parameters that it has been costed with: `eagle (depth 3, tree 3)`."""
    if drafts is None:
        named = [_said(name, value) for name, value in parameters.items() if value is not None]
        return f"{technique} ({', '.join(named)})" if named else technique
    if drafts["off"]:
        return f"{technique} (off)"
    size = f"depth {drafts['depth']}" if "tree_size" in drafts else f"gamma {drafts['depth']}"
    tree = f", tree {drafts['tree_size']}" if "tree_size" in drafts else ""
    return f"{technique} ({size}{tree})"


def _said(name: str, value: Any) -> str:
    """`int4`, `8 redundant experts`: a format by itself, anything else with its name."""
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"no {name.replace('_', ' ')}"
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value:g}"


def drafting(found: dict[str, Any]) -> str:
    """What a speculator was costed with, and where its acceptance is from, in one sentence."""
    name = found["technique"]
    if found["off"]:
        return f"{name}: off, since no draft is worth its cost here"
    size = f"gamma {found['depth']}"
    if "tree_size" in found:
        size = f"depth {found['depth']}, tree_size {found['tree_size']}"
    chosen = " (the best here; name it to fix it)" if found["chosen"] else " (as given)"
    draft = f", draft model {found['draft']}" if "draft" in found else ""
    decay = f", decay {found['decay']:.2f}" if found["decay"] not in (None, 1.0) else ""
    hits = f", hit_rate {found['hit_rate']:.2f}" if found["hit_rate"] < 1.0 else ""
    return (
        f"{name}: {size}{chosen}{draft}; alpha {found['alpha']:.2f}{decay}{hits} ({found['alpha_from']}) give "
        f"{found['tokens_per_step']:.2f} tokens a step"
    )


def _gain(value: float | None) -> str:
    return "" if value is None else text.gain(value)


# --- stack ---


def stacks(document: dict[str, Any]) -> RenderableType:
    """At each point: techniques alone, on top of each other, and the whole against the product."""
    about = {technique["name"]: technique for technique in document["techniques"]}
    parts: list[RenderableType] = []
    for stack in document["stacks"]:
        parts += [*_stack(stack, about), ""]
    return Group(*parts[:-1])


def _stack(stack: dict[str, Any], about: dict[str, Any]) -> Iterator[RenderableType]:
    metric = "time per output token" if stack["metric"] == "tpot_s" else "output tokens a second"
    yield f"{stack['conditions']}"
    yield from stack["notes"]
    if stack["reason"] is not None:
        yield f"refused: {stack['reason']}"
        return
    plain = stack["plain"]
    yield (
        f"gains in {metric} over {stack['baseline']}: {text.milliseconds(plain['tpot_s'])} a token, "
        f"{text.rate(plain['output_tokens_per_s'])}, bound by {_BOUNDS.get(plain['bottleneck'], plain['bottleneck'])} "
        f"({text.percent(plain['shares'][plain['bottleneck']])} of the time){_prompts(plain['prompt_share'])}"
    )
    alone = _table("each alone", "technique", "against", "gain", "interval", "lossless", "bottleneck", right=("gain",))
    for row in stack["alone"]:
        name = _named(row["technique"], row["parameters"], row["drafting"])
        lossless = "yes" if row["lossless"] else "no"
        if row["reason"] is None:
            moved = _moves(row["bottleneck_before"], row["bottleneck_after"])
            alone.add_row(name, row["baseline"], text.gain(row["gain"]), _interval(row), lossless, moved)
        else:
            alone.add_row(name, f"refused: {row['reason']}", "", "", lossless, "")
    yield alone
    yield from (drafting(row["drafting"]) for row in stack["alone"] if row["drafting"])
    if len(stack["alone"]) == 1:  # there is nothing to add up
        return
    yield _order(stack, "given_order", "one on top of the other, in the given order")
    if stack["best_order"] is not None:
        yield _order(stack, "best_order", "in the best order: whatever is stopped at, the most is gained")
    else:
        yield _order(stack, "greedy_order", "in the greedy order: each time what gains most")
    if stack["together"] is not None and stack["ratio"] is not None:
        yield (
            f"all together {text.gain(stack['together'])}; the product of the single gains would be "
            f"{text.gain(stack['product'])}: the real gain is {text.percent(stack['ratio'])} of it"
        )
    if stack["shapley_ln_gain"]:
        shares = sorted(stack["shapley_ln_gain"].items(), key=lambda item: -item[1])
        each = ", ".join(f"{name} {text.gain(math.exp(share))}" for name, share in shares)
        yield f"the share of each (Shapley; they multiply to the real gain): {each}"
    best = stack["best_subset"]
    if stack["together"] is not None and best["gain"] > 1.005 * stack["together"]:
        chosen = ", ".join(best["techniques"]) or "the plain engine"
        yield f"better than all together: {chosen} ({text.gain(best['gain'])})"
    yield from _pairs(stack["pairs"])


def _prompts(share: float | None) -> str:
    return "" if share is None else f"; prompts take {text.percent(share)} of the time"


def _order(stack: dict[str, Any], key: str, title: str) -> Table:
    table = _table(title, "technique", "adds", "together", "sequences", "bottleneck", right=("adds", "together"))
    for row in stack[key]:
        if row["reason"] is None:
            moved = _moves(row["bottleneck_before"], row["bottleneck_after"])
            name = _named(row["technique"], row["parameters"], row["drafting"])
            table.add_row(f"+ {name}", _gain(row["gain"]), _gain(row["together"]), f"{row['batch']:.0f}", moved)
        else:
            table.add_row(f"+ {row['technique']}", "refused", "", "", row["reason"])
    return table


def _pairs(pairs: list[dict[str, Any]]) -> Iterator[str]:
    known = [pair for pair in pairs if pair["ratio"] is not None]
    for pair in sorted(known, key=lambda pair: pair["ratio"])[:3]:
        if pair["ratio"] < 0.98:
            yield (
                f"{' and '.join(pair['techniques'])}: {text.gain(pair['real'])} together, "
                f"{text.gain(pair['product'])} by multiplying"
            )


# --- advise ---


def advice(document: dict[str, Any]) -> RenderableType:
    """The bottleneck, the moves by gain with their price, the rules that hold, and what not to add up."""
    now, metric = document["now"], document["metric"]
    other = "tpot_s" if metric == "output_tokens_per_s" else "output_tokens_per_s"
    names = {"tpot_s": "TPOT", "output_tokens_per_s": "tokens/s"}
    parts: list[RenderableType] = [f"{document['conditions']}; by {document['by']}"]
    if now is not None:
        prompts = document["situation"]["prompt_share"]
        parts.append(
            f"now {text.milliseconds(now['tpot_s'])} a token, {text.rate(now['output_tokens_per_s'])}, "
            f"{now['batch']:.0f} sequences at once; prompts take {text.percent(prompts)} of the time"
        )
    seconds = document["roof_seconds"]
    parts.append(
        "a decode step asks of the bare roofs: "
        + ", ".join(f"{_BOUNDS.get(bound, bound)} {text.seconds(value)}" for bound, value in seconds.items() if value)
    )
    bound = document["bottleneck"]
    share = "" if now is None else f", {text.percent(now['shares'][bound])} of the time, prompts among it"
    parts.append(f"the bottleneck is {_BOUNDS.get(bound, bound)}{share}")
    waits = document["situation"]["overload_rps"]
    if waits:
        parts.append(
            f"{text.digits(waits)} requests a second arrive beyond what it serves: the queue grows without end"
        )
    parts.append(f"gains below are of {names[metric]}: {document['metric_reason']}")
    columns = ("move", names[metric], "interval", names[other], "then bound by", "price")
    table = _table("moves by gain", *columns, right=(names[metric], names[other]))
    for move in document["moves"]:
        instead = f" instead of {', '.join(move['instead_of'])}" if move["instead_of"] else ""
        state = " (has it)" if move["state"] == "on" else instead
        after, size = move["bottleneck_after"], move["parameters"]
        if not move["possible"] and ("depth" in size or "gamma" in size):  # nothing was drafted
            size = {}
        table.add_row(
            _named(move["title"], size, move["drafting"]) + state,
            _gain(move["gain"]) or ("fits" if move["possible"] else "refused"),
            _interval(move),
            _gain(move["other_gain"]),
            _BOUNDS.get(after, after) if after else "",
            _price(move),
        )
    parts.append(table)
    parts += [drafting(move["drafting"]) for move in document["moves"] if move["drafting"]]
    parts += [_why(move) for move in document["moves"]]
    parts += [_rule(rule) for rule in document["rules"]]
    for conflict in document["do_not_combine"]:
        numbers = ""
        if conflict["real"] is not None:
            numbers = f" ({text.gain(conflict['real'])}, not {text.gain(conflict['product'])})"
        parts.append(f"not both: {' and '.join(conflict['moves'])}: {conflict['reason']}{numbers}")
    return Group(*parts)


def _price(move: dict[str, Any]) -> str:
    """More devices with what each of them then does, or quality."""
    each = "" if move["gain_per_device"] is None else f": {text.gain(move['gain_per_device'])} a device"
    return f"{move['price']}{each}" if move["price"] else "lossless" if move["lossless"] else "quality"


def _why(move: dict[str, Any]) -> str:
    quality = "" if move["lossless"] else f"; its price: {move['quality']['note']}"
    return f"{move['title']}: {move['reason']}{quality}"


def _rule(rule: dict[str, Any]) -> str:
    agreed = {True: " (the gains above agree)", False: " (the gains above say otherwise)", None: ""}[rule["agrees"]]
    return f"rule {rule['id']}, {rule['condition']}: {rule['advice']}{agreed}; here {rule['why']}"


# --- plan ---


def plan(document: dict[str, Any]) -> RenderableType:
    """The answer with its numbers, what comes next to it, the front, and what the answer depends on."""
    demand, best = document["demand"], document["best"]
    load = f"{demand['rate_rps']:g} requests/s" if demand["rate_rps"] else f"{demand['concurrency']:g} clients"
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
    for name, option in list(document["options"].items())[1:]:
        if option is not None:
            kinds = ", ".join(t["name"] for t in option["deployment"]["techniques"])
            parts.append(f"{name} is {kinds}: not the same model in quality; measure it with `membound compare`")
    parts += [] if best is None else _at_upper_end(best)
    parts += _sensitivity(document["sensitivity"])
    parts.append(_front(document))
    return Group(*parts, *document["notes"])


def _divided(deployment: dict[str, Any]) -> str:
    degrees = ((name, deployment["parallel"][name]) for name in ("tp", "pp", "dp", "ep"))
    return ", ".join(f"{name} {value}" for name, value in degrees if value > 1) or "whole"


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
    table = _table(title, "", "devices", *right, right=right)
    _fold(table, "devices")
    for name, one in rows:
        summary, estimate = one["summary"], one["estimate"]
        ttft = summary["ttft_s"]["p99"] if summary else estimate["ttft_p99_s"]
        tpot = summary["tpot_s"]["p99"] if summary else estimate["tpot_p99_s"]
        energy = one["energy_j_per_token_at_board_power"]
        table.add_row(
            name,
            f"{one['gpus']} x {one['device']}",
            "no price" if one["usd_per_h"] is None else f"{one['usd_per_h']:.2f}",
            "" if one["usd_per_h"] is None else f"{one['cost_usd_per_million_tokens']:.2f}",
            "" if ttft is None else text.seconds(ttft),
            "" if tpot is None else text.milliseconds(tpot),
            "" if energy is None else f"{energy:.2f}",
        )
    return table


def _at_upper_end(best: dict[str, Any]) -> Iterator[str]:
    """How many of the answer's devices it takes where its times are as long as their interval allows."""
    end = best["upper_end"]
    if end is None or end["meets_slo"]:
        return
    enough, at = (
        end["gpus_that_meet_it"],
        f"at the upper end of the interval, times {text.percent(end['relative_error'])} longer",
    )
    said = (
        f"it takes {enough} x {best['device']}"
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
        size = f"{each} device{'s' if each > 1 else ''} each ({_divided(deployment)})"
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
    table = _table(
        f"front of precision '{first}' ({len(points)} of {len(document['front'])} points, {len(shown)} shown)",
        *("device", "each", "batch", "user tok/s", "GPU tok/s", "$/M out", "TTFT", "SLO"),
        right=("batch", "user tok/s", "GPU tok/s", "$/M out", "TTFT"),
    )
    _fold(table, "device")
    for point in shown:
        usd = point["cost_usd_per_million_tokens"]
        table.add_row(
            f"{point['gpus']} x {point['device']}",
            _divided(point["deployment"]),
            f"{point['batch']:.0f}",
            text.digits(point["tokens_per_s_per_user"]),
            text.digits(point["tokens_per_s_per_gpu"]),
            "no price" if usd is None else f"{usd:.2f}",
            text.seconds(point["ttft_s"]),
            "yes" if point["meets_slo"] else "no",
        )
    return table


def max_rate(document: dict[str, Any]) -> RenderableType:
    """The largest rate within the objective."""
    summary = document["summary"]
    return (
        f"{document['scenario']} serves {text.digits(document['max_rate_rps'])} requests/s within its objective: "
        f"p99 TTFT {text.seconds(summary['ttft_s']['p99'])}, p99 TPOT {text.milliseconds(summary['tpot_s']['p99'])}"
    )


# --- sweep ---

_SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft_s", "tpot_s", "goodput_rps", "acceptance_rate")


def sweep(document: dict[str, Any]) -> RenderableType:
    """A row a point: its values and the metrics that matter most; the document has all."""
    points = document["points"]
    paths = list(points[0]["values"])
    summaries = [point["summary"] for point in points if point["summary"] is not None]
    metrics = [name for name in _SHOWN if any(summary.get(name) is not None for summary in summaries)]
    names = [path.rsplit(".", 1)[-1] for path in paths]
    title = f"{document['scenario']['name']}, by {document['by']}; p50 (p99) where there are percentiles"
    table = _table(title, *names, *metrics, "bottleneck", right=tuple(metrics))
    for point in points:
        values = [str(point["values"][path]) for path in paths]
        if point["summary"] is None:
            table.add_row(*values, *[""] * len(metrics), "refused")
            continue
        shares = point["summary"]["bottleneck_share"]
        most = max(shares, key=shares.__getitem__)
        cells = [_cell(name, point["summary"].get(name)) for name in metrics]
        table.add_row(*values, *cells, f"{_BOUNDS.get(most, most)} {text.percent(shares[most])}")
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
