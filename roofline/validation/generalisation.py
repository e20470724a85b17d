"""How well are kernels predicted on devices, and from sources, that were not among the fitted ones?

Every device (or source) of an operator table is left out once: the others are fitted, and its rows are predicted as
those of a device that nobody measured, from its data sheet and its relatives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.times.fitting import fit_all
from membound.roofline.times.kernel_fits import find_fit
from membound.roofline.times.kernels import Fits
from membound.roofline.validation.kernel_batches import KernelBatch, batches
from membound.roofline.validation.kernel_cases import KernelCase, case_of
from membound.roofline.validation.report import Group, RowResult, kernel_results
from membound.roofline.validation.tables import read_table

Part = Literal["device", "source"]


def parts_of(path: Path, part: Part) -> dict[str, list[KernelCase]]:
    """The kernels of every device or source of a table, each of which can be left out.

    Raises MemboundError for a table that is not of operators, or that has fewer than two parts to leave out.
    """
    table = read_table(path)
    if table.schema != "operators":
        raise MemboundError(f"table '{path}' is of end-to-end runs; leaving out needs a table of operators")
    parts: dict[str, list[KernelCase]] = defaultdict(list)
    for row in table.rows:
        try:
            case = case_of(row)
        except MemboundError:
            continue
        parts[case.hardware.name if part == "device" else row.text("source")].append(case)
    if len(parts) < 2:
        raise MemboundError(f"table '{path}' has one {part} at most; leaving out needs two")
    return parts


def leave_out(parts: Mapping[str, list[KernelCase]], part: Part) -> list[Group]:
    """Errors by phase of every device or source when it was left out, and over all of them."""
    results: dict[str, list[RowResult]] = {}
    for name, members in parts.items():
        others = batches([case for other, cases in parts.items() if other != name for case in cases])
        results[name] = _predict(batches(members), others)
    everything = [result for found in results.values() for result in found]
    return [*_by_phase({"left out": f"each {part}"}, everything)] + [
        group for name, found in results.items() for group in _by_phase({"left out": name}, found)
    ]


def _predict(left_out: list[KernelBatch], others: list[KernelBatch]) -> list[RowResult]:
    fits: Fits = {(f.family, f.kernel, f.scope, f.library): f for f in fit_all(others)}
    results = []
    for batch in left_out:
        try:
            fit = find_fit(fits, batch.hardware, batch.family, batch.kernel, batch.library)
        except KeyError:
            continue  # a family of kernels that no other part has
        results += [result for result in kernel_results(batch, fit) if result.judged]
    return results


def _by_phase(by: dict[str, str], results: list[RowResult]) -> list[Group]:
    phases: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        phases[result.phase].append(result)
    groups = [Group.of({**by, "phase": phase}, members) for phase, members in sorted(phases.items())]
    overall = np.array([r.error for r in results])
    return [Group.of(by, results), *groups] if len(overall) else []
