"""How do prediction and measurement read side by side in a terminal?"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text


def comparison(document: dict[str, Any]) -> RenderableType:
    """Predicted beside measured, one row a technique and point."""
    table = Table(title="predicted and measured")
    columns = ["point", "technique", "baseline", "predicted", "interval"]
    columns += ["measured", "spread", "error", "verdict", "bottleneck", "price"]
    for column in columns:
        table.add_column(column)
    for row in document["comparisons"]:
        scale, unit = (1e3, " ms") if row["technique"] == "baseline" else (1.0, "x")
        measured = "" if row["measured"] is None else f"{text.digits(row['measured'] * scale)}{unit}"
        before, after = row["bottleneck_before"], row["bottleneck_after"]
        table.add_row(
            ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in row["point"].items()),
            row["technique"],
            row["baseline"],
            f"{text.digits(row['predicted'] * scale)}{unit}",
            f"{text.digits(row['low'] * scale)}-{text.digits(row['high'] * scale)}",
            measured,
            "" if row["spread"] is None else f"±{row['spread'] * scale:.2g}",
            "" if row["error"] is None else f"{row['error']:+.1%}",
            row["verdict"] if row["technique"] != "baseline" else "",
            before if before == after else f"{before} -> {after}",
            "" if row["technique"] == "baseline" else _price(row),
        )
    notes = {row["conditions"] for row in document["comparisons"]}
    guesses = [_accepted(row) for row in document["comparisons"] if row.get("acceptance_by_position")]
    return Group(table, *guesses, *sorted(notes), *document.get("notes", []))


def _price(row: dict[str, Any]) -> str:
    """What a technique costs in quality, or that it costs nothing and how many outputs were checked to be equal."""
    quality, same = row["quality"], row.get("same_outputs")
    if row["lossless"]:
        return "lossless" if same is None else f"lossless, {same:.0%} of outputs equal"
    if quality is None:
        return "lossy, not measured"
    context, budget = quality.get("context"), quality.get("budget")
    if context and budget and context <= budget:
        return f"lossy, not exceeded: judged after {context} tokens, and {budget} are kept"
    before, after = quality.get("perplexity_before"), quality.get("perplexity")
    read = f", perplexity {text.digits(before)} -> {text.digits(after)}" if before and after else ""
    return f"KL {quality['kl_nats']:.2g} nats, top-1 {quality['top1_agreement']:.1%}{read}"


def _accepted(row: dict[str, Any]) -> str:
    """The share of guesses that were right at each position, in one line."""
    point = ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in row["point"].items())
    shares = ", ".join(f"{share:.0%}" for share in row["acceptance_by_position"])
    return f"{row['technique']} ({point}): drafts right up to position 1, 2 ..: {shares}"
