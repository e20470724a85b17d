"""What is the result of a comparison with a table of measurements, as one document?"""

from __future__ import annotations

import hashlib
from typing import Any

from membound.roofline.home import device_fits_path
from membound.roofline.times.device_fits import DeviceFits
from membound.roofline.validation.report import Group, RowResult, ValidationReport
from membound.roofline.validation.tables import Row

# What tells a row apart, where its columns hold it: names as they are, sizes behind the column's name.
_NAMES = ("op", "metric", "dtype", "weight_dtype", "technique")
_SIZES = ("tp", "m", "n", "k", "batch", "batch_or_concurrency", "q_len", "kv_len", "input_len", "output_len")


def document(report: ValidationReport, unseen: list[Group] | None = None) -> dict[str, Any]:
    """What `membound validate --json` prints: counts, errors by group, the worst rows, and why rows were left out.

    `unseen` are the errors of devices or sources that were left out of the fit.
    """
    return {
        "table": str(report.path),
        "schema": report.schema,
        "rows": report.rows,
        "predicted": report.predicted,
        "refused": report.refused,
        "judged": len(report.judged),
        "refusals": report.refusals,
        "set_aside": report.set_aside,
        "fitted_to_it": fitted_to(report),
        "groups": [_group(group) for group in report.groups],
        "left_out": [_group(group) for group in unseen or ()],
        "worst": [_row(result) for result in report.worst],
    }


def fitted_to(report: ValidationReport) -> list[str]:
    """The devices whose kernels were fitted to this very table on this machine: of those its errors judge nothing."""
    digest = hashlib.sha256(report.path.read_bytes()).hexdigest()
    found = []
    for device in sorted({result.device for result in report.results if result.predicted is not None}):
        path = device_fits_path(device)
        if path.exists() and digest in {table.sha256 for table in DeviceFits.load(path).tables}:
            found.append(device)
    return found


def _unit(row: Row) -> str:
    """Of what a row measures, after the number; nothing where it is a ratio."""
    metric = row.text("metric")
    if row.text("latency_us"):
        return " µs"
    if "tok_s" in metric:
        return " tok/s"
    if "ms" in metric.split("_"):
        return " ms"
    return {"req_s": " requests/s", "joules_per_token": " J/token"}.get(metric, "")


def rows_table(report: ValidationReport) -> Any:
    """Every row that has a prediction, as a pyarrow table: what was measured beside what was predicted."""
    import pyarrow

    rows = [result for result in report.results if result.predicted is not None]
    columns = {
        **{name: [str(getattr(result, name)) for result in rows] for name in ("device", "model", "phase")},
        **{name: [getattr(result, name) for result in rows] for name in ("predicted", "low", "high", "judged")},
        "metric": [result.row.text("metric") or "latency_us" for result in rows],
        "batch": pyarrow.array([result.batch for result in rows], pyarrow.float64()),
        "measured": [result.row.measured for result in rows],
        "line": [result.row.line for result in rows],
        "source": [result.row.text("source") for result in rows],
        "what": [_what(result) for result in rows],
        "reason": [result.reason or result.row.text("flags") for result in rows],
    }
    return pyarrow.table(columns)


def _group(group: Group) -> dict[str, Any]:
    return {
        "by": group.by,
        "n": group.n,
        "median_ape": group.median_ape,
        "p90_ape": group.p90_ape,
        "mean_ape": group.mean_ape,
        "bias": group.bias,
        "within_interval": group.within_interval,
    }


def _row(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {
        "line": row.line,
        "source": row.text("source"),
        "device": result.device,
        "model": result.model,
        "what": _what(result),
        "unit": _unit(row).strip(),
        "measured": row.measured,
        "predicted": result.predicted,
        "low": result.low,
        "high": result.high,
        "reason": result.reason or row.text("flags"),
    }


def _what(result: RowResult) -> str:
    """`gemm fp8, m 4096, n 8192, k 4096`: what the row measures."""
    row = result.row
    name = " ".join(row.text(column) for column in _NAMES if row.text(column))
    sizes = (f"{column.removesuffix('_or_concurrency')} {row.text(column)}" for column in _SIZES if row.text(column))
    return ", ".join([name, *sizes])
