"""How much of the roofs do published kernels reach? Fits `data/efficiency/published.json` from a table of operators.

    python -m membound.roofline.validation.published TABLE.csv > data/efficiency/published.json

What the table holds and what the fits mean is in `data/efficiency/README.md`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from membound.roofline.errors import MemboundError
from membound.roofline.times.efficiency import KernelFit
from membound.roofline.times.fitting import fit_all
from membound.roofline.validation.kernel_cases import KernelCase, batches, case_of
from membound.roofline.validation.tables import read_table


def fits_of(path: Path) -> list[KernelFit]:
    """The fits of all scopes that a table of operators gives; rows without an operator in membound are left out.

    Raises MemboundError for a file that is not such a table.
    """
    table = read_table(path)
    if table.schema != "operators":
        raise MemboundError(f"table '{path}' holds end-to-end measurements; the kernels' fits need single operators")
    cases: list[KernelCase] = []
    for row in table.rows:
        try:
            cases.append(case_of(row))
        except MemboundError as error:
            print(f"{path}, line {row.line}: {error}", file=sys.stderr)
    return fit_all(batches(cases))


def main(arguments: list[str]) -> None:
    """Prints the fits of the one table that the arguments name."""
    if len(arguments) != 1:
        sys.exit("give one file: python -m membound.roofline.validation.published TABLE.csv")
    try:
        fits = fits_of(Path(arguments[0]))
    except MemboundError as error:
        sys.exit(str(error))
    print(json.dumps({"fits": [asdict(fit) for fit in fits]}))


if __name__ == "__main__":
    main(sys.argv[1:])
