"""How much of the roofs do published kernels reach? Fits `data/efficiency/published.json` from tables of operators.

    python -m membound.roofline.validation.published TABLE.csv data/efficiency/amd.csv > data/efficiency/published.json

What the tables hold and what the fits mean is in `data/efficiency/README.md`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from membound.roofline.errors import MemboundError
from membound.roofline.times.fitting import fit_all
from membound.roofline.times.kernel_fits import KernelFit
from membound.roofline.validation.kernel_batches import batches
from membound.roofline.validation.kernel_cases import KernelCase, case_of
from membound.roofline.validation.tables import read_table


def fits_of(*paths: Path) -> list[KernelFit]:
    """The fits of all scopes that tables of operators give together; rows without an operator in membound are left out.

    Raises MemboundError for a file that is not such a table.
    """
    cases: list[KernelCase] = []
    for path in paths:
        table = read_table(path)
        if table.schema != "operators":
            raise MemboundError(
                f"table '{path}' holds end-to-end measurements; the kernels' fits need single operators"
            )
        for row in table.rows:
            try:
                cases.append(case_of(row))
            except MemboundError as error:
                print(f"{path}, line {row.line}: {error}", file=sys.stderr)
    return fit_all(batches(cases))


def main(arguments: list[str]) -> None:
    """Prints the fits of the tables that the arguments name."""
    if not arguments:
        sys.exit("give one file or more: python -m membound.roofline.validation.published TABLE.csv...")
    try:
        fits = fits_of(*map(Path, arguments))
    except MemboundError as error:
        sys.exit(str(error))
    print(json.dumps({"fits": [asdict(fit) for fit in fits]}))


if __name__ == "__main__":
    main(sys.argv[1:])
