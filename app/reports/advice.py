"""How does advice read in a terminal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType

from membound.app import text
from membound.app.reports.drafts import drafting, named
from membound.app.reports.tables import BOUNDS, gain_of, interval, table_of


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
    parts += _first(document, names[metric])
    seconds = document["roof_seconds"]
    parts.append(
        "a decode step asks of the bare roofs: "
        + ", ".join(f"{BOUNDS.get(bound, bound)} {text.seconds(value)}" for bound, value in seconds.items() if value)
    )
    bound = document["bottleneck"]
    share = "" if now is None else f", {text.percent(now['shares'][bound])} of the time, prompts among it"
    parts.append(f"the bottleneck is {BOUNDS.get(bound, bound)}{share}")
    waits = document["situation"]["overload_rps"]
    if waits:
        parts.append(
            f"{text.digits(waits)} requests a second arrive beyond what it serves: the queue grows without end"
        )
    parts.append(f"gains below are of {names[metric]}: {document['metric_reason']}")
    columns = ("move", names[metric], "interval", names[other], "then bound by", "price")
    table = table_of(
        "moves by gain, those with a heavy price in quality (!) after what gains without",
        *columns,
        right=(names[metric], names[other]),
    )
    for move in document["moves"]:
        instead = f" instead of {', '.join(move['instead_of'])}" if move["instead_of"] else ""
        state = " (has it)" if move["state"] == "on" else instead
        after, size = move["bottleneck_after"], move["parameters"]
        if not move["possible"] and ("depth" in size or "gamma" in size):  # nothing was drafted
            size = {}
        table.add_row(
            named(move["title"], size, move["drafting"]) + state,
            gain_of(move["gain"]) or ("makes it fit" if move["possible"] else "refused"),
            interval(move),
            gain_of(move["other_gain"]),
            BOUNDS.get(after, after) if after else "",
            _price(move),
        )
    parts.append(table)
    parts += [drafting(move["drafting"]) for move in document["moves"] if move["drafting"]]
    parts += [_why(move) for move in document["moves"]]
    parts += [_rule(rule) for rule in document["rules"]]
    return Group(*parts, *_together(document["do_not_combine"]))


def _together(conflicts: list[dict[str, Any]]) -> Iterator[str]:
    """Of which moves only one is worth it, and what two come to whose gains do not multiply."""
    overlapping = []
    for one in conflicts:
        moves = one["moves"]
        if one["real"] is None:
            yield f"not both: {' and '.join(moves)}: {one['reason']}"
        elif one["slower"]:
            yield f"not both: {' and '.join(moves)}: {one['reason']} ({text.gain(one['real'])})"
        else:
            overlapping.append(f"{' + '.join(moves)} {text.gain(one['real'])}, not {text.gain(one['product'])}")
    if overlapping:
        yield f"together more than either alone, but less than the product: {'; '.join(overlapping)}"


def _first(document: dict[str, Any], metric: str) -> Iterator[str]:
    """What to change first: the move that gains most, or the one that makes the model fit."""
    possible = [one for one in document["moves"] if one["possible"] and one["state"] != "on"]
    if not possible:
        return
    # More devices are no answer to what should change on these, unless each of them then does more.
    best = next((one for one in possible if (one["gain_per_device"] or 1.0) >= 1.0), possible[0])
    if best["gain"] is None:
        yield f"first: {best['title']}, which makes it fit; {_price(best)}"
    elif best["gain"] <= 1.0:
        yield "first: nothing, as no single change gains here"
    else:
        unsure = ", so that it may gain nothing" if best["low"] is not None and best["low"] < 1.0 else ""
        gain = f"{text.gain(best['gain'])} in {metric} ({interval(best)})"
        yield f"first: {best['title']}, {gain}{unsure}; {_price(best)}"


def _price(move: dict[str, Any]) -> str:
    """More devices with what each of them then does, or the figure of what it costs in quality."""
    each = "" if move["gain_per_device"] is None else f": {text.gain(move['gain_per_device'])} a device"
    quality = move["quality"]
    return f"{move['price']}{each}" if move["price"] else f"{quality['brief']}{' (!)' if quality['heavy'] else ''}"


def _why(move: dict[str, Any]) -> str:
    quality = "" if move["lossless"] else f"; its price: {move['quality']['note']}"
    return f"{move['title']}: {move['reason']}{quality}"


def _rule(rule: dict[str, Any]) -> str:
    agreed = {True: " (the gains above agree)", False: " (the gains above say otherwise)", None: ""}[rule["agrees"]]
    return f"rule {rule['id']}, {rule['condition']}: {rule['advice']}{agreed}; here {rule['why']}"
