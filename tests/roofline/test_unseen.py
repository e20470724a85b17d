"""Published measurements that no fit and no profile has seen: predictions hold there as they say they do.

Whoever fits to these rows takes the test away. Each file names its source in each row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from membound.roofline.validation.report import ValidationReport, validate_table

TABLES = sorted((Path(__file__).parent / "unseen").glob("*.csv"))


@pytest.fixture(scope="module", params=TABLES, ids=lambda path: path.stem)
def unseen(request: pytest.FixtureRequest) -> ValidationReport:
    return validate_table(request.param)


def test_the_tables_are_there():
    assert TABLES


def test_few_rows_are_refused(unseen: ValidationReport):
    assert unseen.refused <= 0.05 * unseen.rows


def test_the_median_error_is_as_promised_for_serving(unseen: ValidationReport):
    assert np.median([abs(result.error) for result in unseen.judged]) <= 0.2


def test_intervals_hold_what_they_are_meant_to(unseen: ValidationReport):
    assert np.mean([result.within for result in unseen.judged]) >= 0.8
