"""How does a calibration read in a terminal, of this machine or of other devices from a table?"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app.reports.tables import counts_of


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


def foreign_calibration(document: dict[str, Any]) -> RenderableType:
    """What a table showed of each device: how far its kernels were off before and after."""
    parts: list[RenderableType] = []
    for device in document["devices"]:
        title = f"{device['device']}: median error before and after, with {device['rows']:,} rows of this table"
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("kernel", "rows", "before", "after", "80 % within", "table"):
            table.add_column(column, justify="left" if column in ("kernel", "table") else "right")
        for residual in device["residuals"]:
            table.add_row(
                f"{residual['family']} {residual['kernel']}",
                f"{residual['rows']:,}",
                f"{residual['median_error_before']:.1%}",
                f"{residual['median_error_after']:.1%}",
                f"{residual['spread']:.1%}",
                residual["table"],
            )
        parts += [table, f"kept in {device['file']}; predictions of {device['device']} use it from now on"]
    return Group(*parts, *counts_of("not fitted", document["left_out"]))
