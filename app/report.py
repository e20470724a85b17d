"""How does a result read in a terminal?"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


def operating_point(document: dict[str, Any]) -> RenderableType:
    """The operators of a step with their time and bound, and what memory holds."""
    step, point, memory = document["step"], document["point"], document["memory"]
    hardware = document["hardware"]
    kind = "calibrated" if hardware["calibrated"] else "data sheet, not calibrated"
    table = Table(
        title=f"{point['phase']}, batch {point['batch']}, context {point['context']} on {hardware['name']} ({kind})"
    )
    for column in ("operator", "calls", "GFLOP", "MB weights", "MB KV", "time ms", "share", "bound"):
        table.add_column(column, justify="left" if column in ("operator", "bound") else "right")
    for op in document["operators"]:
        table.add_row(
            op["name"],
            str(op["calls"]),
            f"{op['flops'] / 1e9:.3f}",
            f"{op['weight_bytes'] / 1e6:.1f}",
            f"{op['kv_bytes'] / 1e6:.2f}",
            f"{op['time_s'] * 1e3:.3f}",
            f"{op['share']:.1%}",
            op["bound"],
        )
    verdict = (
        f"step {step['time_s'] * 1e3:.2f} ms [{step['low_s'] * 1e3:.2f}, {step['high_s'] * 1e3:.2f}], "
        f"{step['arithmetic_intensity']:.1f} FLOP/B, bound by {step['bottleneck']} "
        f"({step['bottleneck_share'][step['bottleneck']]:.0%})"
    )
    held = (
        f"memory: weights {memory['weights_bytes'] / 2**30:.2f} GiB, KV {memory['kv_bytes'] / 2**30:.2f} GiB, "
        f"activations {memory['activation_bytes'] / 2**30:.2f} GiB of {memory['device_bytes'] / 2**30:.1f} GiB"
        f"{'' if memory['fits'] else ': DOES NOT FIT'}"
    )
    return Group(table, verdict, held)


def run(document: dict[str, Any]) -> RenderableType:
    """A run's summary."""
    summary, provenance = document["summary"], document["provenance"]
    table = Table(title=f"{document['scenario']['name']} ({provenance['producer']}, {provenance['hardware']})")
    table.add_column("metric")
    for column in ("value", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, value in summary.items():
        if isinstance(value, dict) and "mean" in value:
            table.add_row(f"{name} (mean)", *(_number(value[key]) for key in ("mean", "p50", "p90", "p99")))
        elif isinstance(value, dict):
            table.add_row(name, ", ".join(f"{bound} {share:.0%}" for bound, share in value.items() if share >= 0.005))
        else:
            table.add_row(name, _number(value))
    return Group(table, *provenance["notes"])


def comparison(document: dict[str, Any]) -> RenderableType:
    """Predicted beside measured, one row a technique and point."""
    table = Table(title="predicted and measured")
    columns = ["point", "technique", "baseline", "predicted", "interval"]
    columns += ["measured", "spread", "error", "verdict", "bottleneck"]
    for column in columns:
        table.add_column(column)
    for row in document["comparisons"]:
        scale, unit = (1e3, " ms") if row["technique"] == "baseline" else (1.0, "x")
        measured = "" if row["measured"] is None else f"{row['measured'] * scale:.3g}{unit}"
        before, after = row["bottleneck_before"], row["bottleneck_after"]
        table.add_row(
            ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in row["point"].items()),
            row["technique"],
            row["baseline"],
            f"{row['predicted'] * scale:.3g}{unit}",
            f"{row['low'] * scale:.3g}-{row['high'] * scale:.3g}",
            measured,
            "" if row["spread"] is None else f"±{row['spread'] * scale:.2g}",
            "" if row["error"] is None else f"{row['error']:+.1%}",
            row["verdict"] if row["technique"] != "baseline" else "",
            before if before == after else f"{before} -> {after}",
        )
    notes = {row["conditions"] for row in document["comparisons"]}
    return Group(table, *sorted(notes), *document.get("notes", []))


def calibration(document: dict[str, Any]) -> RenderableType:
    """A calibration's roofs."""
    table = Table(title=f"{document['machine']}, {document['threads']} threads, kernels {document['kernels']}")
    table.add_column("working set")
    table.add_column("GB/s", justify="right")
    for point in document["bandwidth"]:
        table.add_row(f"{point['working_set_bytes'] / 2**20:.2f} MiB", f"{point['bytes_per_s'] / 1e9:.1f}")
    formats = ", ".join(document["linear"])
    return Group(
        table,
        f"matrix tables for {formats}; two passes agree within {document['repeatability']:.1%}, "
        f"error on other shapes {document['residual']:.1%}",
        *document["notes"],
    )


def scenarios(document: dict[str, Any]) -> RenderableType:
    """The shipped scenarios."""
    table = Table(show_header=False, box=None)
    for item in document["scenarios"]:
        table.add_row(item["name"], item["description"])
    return table


def _number(value: float | int | None) -> str:
    if value is None:
        return "unknown"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
