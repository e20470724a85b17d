"""How do stacks read in a terminal?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.app.reports.drafts import drafting, named
from membound.app.reports.tables import BOUNDS, gain_of, interval, moves, table_of


def stacks(document: dict[str, Any]) -> RenderableType:
    """At each point: techniques alone, on top of each other, and the whole against the product."""
    about = {technique["name"]: technique for technique in document["techniques"]}
    parts: list[RenderableType] = []
    for stack in document["stacks"]:
        parts += [*_stack(stack, about), ""]
    return Group(*parts[:-1])


def _stack(stack: dict[str, Any], about: dict[str, Any]) -> Iterator[RenderableType]:
    metric = "TPOT" if stack["metric"] == "tpot_s" else "tokens/s"
    yield f"gains in {metric} against {stack['baseline']}"
    yield f"{stack['conditions']}"
    yield from stack["notes"]
    if stack["reason"] is not None:
        yield f"refused: {stack['reason']}"
        return
    plain = stack["plain"]
    yield (
        f"the plain engine: {text.milliseconds(plain['tpot_s'])} a token, "
        f"{text.rate(plain['output_tokens_per_s'])}, bound by {BOUNDS.get(plain['bottleneck'], plain['bottleneck'])} "
        f"({text.percent(plain['shares'][plain['bottleneck']])} of the time){_prompts(plain['prompt_share'])}"
    )
    yield from _whole(stack)
    columns = ("technique", "against", "gain", "interval", "lossless", "bottleneck")
    alone = table_of("each alone", *columns, right=("gain",))
    for row in stack["alone"]:
        name = named(row["technique"], row["parameters"], row["drafting"])
        lossless = "yes" if row["lossless"] else "no"
        if row["reason"] is None:
            moved = moves(row["bottleneck_before"], row["bottleneck_after"])
            alone.add_row(name, row["baseline"], text.gain(row["gain"]), interval(row), lossless, moved)
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
    if stack["shapley_ln_gain"]:
        shares = sorted(stack["shapley_ln_gain"].items(), key=lambda item: -item[1])
        each = ", ".join(f"{name} {text.gain(math.exp(share))}" for name, share in shares)
        yield f"the share of each (Shapley; they multiply to the real gain): {each}"
    yield from _pairs(stack["pairs"])


def _whole(stack: dict[str, Any]) -> Iterator[str]:
    """What several come to together, and which of them come to more."""
    if len(stack["alone"]) == 1 or stack["together"] is None:
        return
    if stack["ratio"] is not None:
        yield (
            f"all together {text.gain(stack['together'])}; the product of the single gains would be "
            f"{text.gain(stack['product'])}: the real gain is {text.percent(stack['ratio'])} of it"
        )
    best = stack["best_subset"]
    if best["gain"] > 1.005 * stack["together"]:
        chosen = ", ".join(best["techniques"]) or "the plain engine"
        yield f"better than all together: {chosen} ({text.gain(best['gain'])})"


def _prompts(share: float | None) -> str:
    return "" if share is None else f"; prompts take {text.percent(share)} of the time"


def _order(stack: dict[str, Any], key: str, title: str) -> Table:
    table = table_of(title, "technique", "adds", "together", "sequences", "bottleneck", right=("adds", "together"))
    for row in stack[key]:
        if row["reason"] is None:
            moved = moves(row["bottleneck_before"], row["bottleneck_after"])
            name = named(row["technique"], row["parameters"], row["drafting"])
            table.add_row(f"+ {name}", gain_of(row["gain"]), gain_of(row["together"]), f"{row['batch']:.0f}", moved)
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
