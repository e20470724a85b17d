"""Can the shipped fits be made again from a table, and would what is made be read?"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.times.kernel_fits import find_fit, index_fits
from membound.roofline.validation.published import fits_of, main
from membound.roofline.validation.tables import END_TO_END_COLUMNS, OPERATOR_COLUMNS


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """GEMMs at 70 % of an H200's bandwidth (4.8 TB/s) behind a launch of 5 microseconds, and an unknown operator."""
    path = tmp_path / "ops.csv"
    common = {"source": "lab", "gpu": "H200-SXM", "op": "gemm", "m": 1, "dtype": "bf16"}
    sizes = [(4096 * scale, 4096) for scale in range(1, 12)]
    rows = [common | {"n": n, "k": k, "latency_us": 5.0 + 2.0 * n * k / 3.36e6} for n, k in sizes]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, OPERATOR_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows([*rows, common | {"op": "dance", "latency_us": 1.0}])
    return path


def test_a_device_gives_fits_of_every_scope_that_it_belongs_to(table: Path) -> None:
    fits = fits_of(table)
    assert [fit.scope for fit in fits] == ["any", "HBM", "Hopper HBM", "H200-SXM"]
    assert all(fit.rows == 11 and fit.sources == ("lab",) for fit in fits)
    assert fits[-1].median_error < 0.05
    assert fits[-1].parameters["bandwidth_share"] == pytest.approx(0.7, rel=0.1)


def test_devices_of_another_maker_share_a_scope_of_their_own(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "amd.csv"
    other.write_text(table.read_text().replace("H200-SXM", "MI300X"))
    fits = {fit.scope: fit for fit in fits_of(table, other)}
    assert list(fits) == ["any", "HBM", "AMD HBM", "CDNA3 HBM", "Hopper HBM", "H200-SXM", "MI300X"]
    assert fits["HBM"].rows == 22 and fits["AMD HBM"].rows == 11
    found = index_fits([asdict(fit) for fit in fits.values()])
    assert find_fit(found, get_hardware("MI250X"), "gemm", "bf16").scope == "AMD HBM"
    assert find_fit(found, get_hardware("A100-SXM4-80GB"), "gemm", "bf16").scope == "HBM"


def test_what_is_printed_is_what_is_read(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(table)])
    printed = capsys.readouterr()
    assert list(index_fits(json.loads(printed.out)["fits"]).values()) == fits_of(table)
    assert "line 13: op 'dance' is unknown" in printed.err


def test_other_tables_and_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e2e.csv"
    path.write_text(",".join(END_TO_END_COLUMNS) + "\n" + ",".join("1" for _ in END_TO_END_COLUMNS) + "\n")
    with pytest.raises(MemboundError, match="need single operators"):
        fits_of(path)
    with pytest.raises(SystemExit, match="give one file or more"):
        main([])
