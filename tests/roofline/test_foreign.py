"""Does a table of measurements teach the physics that made it, stay kept, and come before what is published?"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware, read_hardware
from membound.roofline.home import device_fits_path
from membound.roofline.models import get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.techniques import EngineSetup
from membound.roofline.times import efficiency
from membound.roofline.times.device_fits import DeviceFits, fits_for
from membound.roofline.times.foreign import calibrate_from
from membound.roofline.times.kernel_fits import find_fit, published_fits
from membound.roofline.validation.tables import END_TO_END_COLUMNS, OPERATOR_COLUMNS

Row = Mapping[str, object]
SHAPES = [(m, n, k) for m in (1, 4, 16, 64, 256, 1024, 4096) for n, k in ((4096, 4096), (28672, 8192), (8192, 28672))]
# A device that reaches less of both roofs than any that is published.
TRUE = {"launch_s": 9e-6, "bandwidth_share": 0.6, "matrix_share": 0.5, "wave_loss": 0.1, "cache_bytes_per_cycle": 12.0}
SHEET = """
name: {name}
vendor: test
kind: gpu
architecture: Hopper
memory_bytes: 100000000000
memory_kind: HBM
bandwidth_bytes_per_s: 3.0e12
compute_units: 100
matrix_flops: {{bf16: 8.0e14}}
source: made up for this test
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SHEET.format(name="GPU/9000"))
    return path


def gemms(device: HardwareSpec, slowness: float = 1.0, gpu: str = "") -> list[Row]:
    """Rows of GEMMs as a device with the parameters `TRUE` takes them."""
    rate = efficiency.matrix_rate(TRUE, device, "bf16")
    rows = []
    for m, n, k in SHAPES:
        moved = 2.0 * (n * k + m * (n + k))
        seconds = float(efficiency.gemm_s(TRUE, device, rate, m, n, k, moved)[0]) * slowness
        rows.append(gemm_row(gpu or device.name, m, n, k, seconds * 1e6))
    return rows


def gemm_row(gpu: str, m: int, n: int, k: int, us: float) -> Row:
    return {"source": "lab", "gpu": gpu, "op": "gemm", "m": m, "n": n, "k": k, "dtype": "bf16", "latency_us": us}


def attention_rows(gpu: str, gigabytes_per_s: float) -> list[Row]:
    """Decode attention of 32 sequences with 8 KV heads at a constant bandwidth."""
    lengths = (1024, 2048, 4096, 8192, 16384)
    heads = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "batch": 32, "q_len": 1}
    return [
        {"source": "lab", "gpu": gpu, "op": "decode_attention", "dtype": "bf16", "kv_len": length, **heads}
        | {"latency_us": 32 * 8 * length * 512 / gigabytes_per_s / 1e3}
        for length in lengths
    ]


def table(path: Path, rows: Sequence[Row], columns: Sequence[str] = OPERATOR_COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


IMPOSSIBLE: dict[str, object] = {
    "source": "lab",
    "gpu": "H200-SXM",
    "dtype": "bf16",
    "batch": 1,
    "m": 8,
    "n": 8,
    "k": 8,
    "n_heads": 8,
}
IMPOSSIBLE |= {"n_kv_heads": 8, "head_dim": 128, "latency_us": 100.0}


def decode_s(device: HardwareSpec, batch: int = 64) -> float:
    return OperatingPoint(get_model("Llama-3.1-8B"), device, EngineSetup(), "decode", batch, 1024).time_s


def test_a_fit_finds_the_parameters_that_made_the_table(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    (found,) = calibrate_from(table(tmp_path / "ops.csv", gemms(device))).devices
    (residual,) = found.residuals
    assert residual.median_error_after < 0.02 < 0.2 < residual.median_error_before
    fit = find_fit(fits_for(device), device, "gemm", "bf16")
    assert fit.scope == "H200-SXM" and fit.rows == len(SHAPES)
    for name in ("bandwidth_share", "matrix_share"):
        assert fit.parameters[name] == pytest.approx(TRUE[name], rel=0.05)


def test_predictions_of_the_device_take_the_fit_and_other_devices_do_not(tmp_path: Path) -> None:
    device, other = get_hardware("H200-SXM"), get_hardware("H100-SXM5")
    before, others_before = decode_s(device), decode_s(other)
    assert fits_for(device) is published_fits()
    calibrate_from(table(tmp_path / "ops.csv", gemms(device)))
    assert decode_s(device) > 1.1 * before
    assert decode_s(other) == others_before
    origin = OperatingPoint(get_model("Llama-3.1-8B"), device, EngineSetup(), "decode", 1, 128).origin
    assert {kernel.fit.family for kernel in origin.kernels if kernel.level == "device"} == {"gemm"}


def test_a_device_that_takes_longer_in_the_table_is_predicted_to_take_longer(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    times = []
    for slowness in (0.9, 1.0, 1.5):
        calibrate_from(table(tmp_path / "ops.csv", gemms(device, slowness)))
        times.append(decode_s(device))
    assert times == sorted(times) and times[-1] > 1.2 * times[0]


def test_what_is_kept_says_where_it_is_from(tmp_path: Path) -> None:
    path = table(tmp_path / "ops.csv", gemms(get_hardware("H200-SXM")))
    result = calibrate_from(path)
    kept = DeviceFits.load(result.paths[0])
    assert kept == result.devices[0]
    (source,) = kept.tables
    assert (source.name, source.sha256) == ("ops.csv", hashlib.sha256(path.read_bytes()).hexdigest())
    assert source.rows == len(SHAPES) and source.read.tzinfo is not None
    assert all("lab" in fit.sources and "ops.csv" in fit.sources for fit in kept.fits)


def test_a_second_table_adds_its_kernels_and_keeps_every_earlier_file(tmp_path: Path, home: Path) -> None:
    device = get_hardware("H200-SXM")
    first = calibrate_from(table(tmp_path / "gemm.csv", gemms(device)))
    earlier = first.paths[0].read_bytes()
    second = calibrate_from(table(tmp_path / "attention.csv", attention_rows("H200-SXM", 2000.0)))
    assert second.devices[0].kernels == {("gemm", "bf16"), ("decode_attention", "bf16")}
    assert [known.name for known in second.devices[0].tables] == ["gemm.csv", "attention.csv"]
    third = calibrate_from(table(tmp_path / "gemm.csv", gemms(device, 2.0)))
    assert {known.table for known in third.devices[0].residuals} == {"attention.csv", "gemm.csv"}
    kept = sorted(path.name for path in third.paths[0].parent.iterdir())
    assert kept == ["H200-SXM.json", "H200-SXM.json.previous", "H200-SXM.json.previous2"]
    assert third.paths[0].with_name("H200-SXM.json.previous").read_bytes() == earlier


def test_two_tables_teach_what_one_with_the_rows_of_both_does(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    rows = gemms(device)
    whole = calibrate_from(table(tmp_path / "all.csv", rows)).devices[0]
    for home_parts in (rows[:14], rows[14:]), (rows[14:], rows[:14]):
        device_fits_path(device.name).unlink()
        for index, part in enumerate(home_parts):
            both = calibrate_from(table(tmp_path / f"{index}.csv", part)).devices[0]
        assert both.residuals[0].rows == len(rows) and both.residuals[0].table == "0.csv, 1.csv"
        for fit, same in zip(both.fits, whole.fits, strict=True):
            assert fit.parameters == pytest.approx(same.parameters, rel=0.02)


def test_a_copy_of_a_table_under_another_name_teaches_nothing_more(tmp_path: Path) -> None:
    """Counted twice, the same measurements would narrow the interval."""
    device = get_hardware("H200-SXM")
    once = calibrate_from(table(tmp_path / "mine.csv", gemms(device)[:5])).devices[0].residuals[0]
    found = calibrate_from(table(tmp_path / "copy.csv", gemms(device)[:5]))
    (again,) = found.devices[0].residuals
    assert (again.rows, again.spread) == (once.rows, pytest.approx(once.spread)) and again.table == "copy.csv"
    assert any("5 rows of an earlier 'mine.csv'" in note for note in found.notes)


def test_a_row_of_another_table_does_not_undo_a_fit_of_many(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    calibrate_from(table(tmp_path / "mine.csv", gemms(device)))
    before = decode_s(device)
    calibrate_from(table(tmp_path / "one.csv", gemms(device, 2.0)[:1]))
    assert decode_s(device) == pytest.approx(before, rel=0.02)
    assert DeviceFits.load(device_fits_path(device.name)).residuals[0].rows == len(SHAPES) + 1


def test_a_newer_version_of_a_table_takes_the_place_of_its_kernels_rows_and_says_so(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    calibrate_from(table(tmp_path / "ops.csv", gemms(device)))
    calibrate_from(table(tmp_path / "ops.csv", attention_rows("H200-SXM", 2000.0)))
    found = calibrate_from(table(tmp_path / "ops.csv", gemms(device, 1.1)[:9]))
    assert any(f"{len(SHAPES)} rows of an earlier 'ops.csv'" in note for note in found.notes)
    rows = {known.family: known.rows for known in found.devices[0].residuals}
    assert rows == {"gemm": 9, "decode_attention": 5}


def test_fewer_rows_make_a_wider_interval_and_a_note(tmp_path: Path) -> None:
    device, spreads = get_hardware("H200-SXM"), []
    for rows in (1, 3, 9, 21):
        found = calibrate_from(table(tmp_path / "ops.csv", gemms(device)[:rows]))
        spreads.append(found.devices[0].residuals[0].spread)
        assert any("rests on" in note for note in found.notes) == (rows < 8)
    assert spreads == sorted(set(spreads), reverse=True) and spreads[0] > 0.3


def test_a_time_out_of_all_proportion_is_named_by_line_and_column_and_changes_nothing(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    clean = calibrate_from(table(tmp_path / "ops.csv", gemms(device))).devices[0].fits
    rows = [*gemms(device), gemm_row("H200-SXM", 16, 8192, 8192, 1e30), gemm_row("H200-SXM", 16, 8192, 8192, 1e-2)]
    found = calibrate_from(table(tmp_path / "ops.csv", rows))
    assert found.devices[0].fits == clean
    for line, said in ((len(SHAPES) + 2, "where such a device takes about"), (len(SHAPES) + 3, "faster than")):
        assert any(f"line {line}: latency_us is" in reason and said in reason for reason in found.left_out)


def test_a_better_fit_without_its_rows_is_not_replaced(tmp_path: Path) -> None:
    """Earlier versions kept the fits of a table and not its rows."""
    device = get_hardware("H200-SXM")
    kept = calibrate_from(table(tmp_path / "mine.csv", gemms(device))).paths[0]
    old = DeviceFits.load(kept)
    bare = old.model_copy(update={"tables": tuple(one.model_copy(update={"kept": ()}) for one in old.tables)})
    kept.write_text(bare.model_dump_json())
    with pytest.raises(MemboundError, match=r"gemm bf16 .* has 1 rows here, but 21 in 'mine.csv'"):
        calibrate_from(table(tmp_path / "one.csv", gemms(device)[:1]))
    assert DeviceFits.load(kept) == bare
    beside = calibrate_from(table(tmp_path / "attention.csv", attention_rows("H200-SXM", 2000.0)))
    assert beside.devices[0].kernels == {("gemm", "bf16"), ("decode_attention", "bf16")}


def test_a_data_sheet_makes_a_device_known_by_its_name(tmp_path: Path, sheet: Path) -> None:
    mine = read_hardware(sheet)
    rows = [*gemms(mine), *gemms(get_hardware("H200-SXM"))]
    result = calibrate_from(table(tmp_path / "ops.csv", rows), str(sheet))
    assert [found.device for found in result.devices] == ["GPU/9000"]
    sheet.unlink()
    assert get_hardware("gpu 9000") == mine
    assert find_fit(fits_for(mine), mine, "gemm", "bf16").scope == "GPU/9000"


def test_a_changed_data_sheet_is_read_again(sheet: Path) -> None:
    assert read_hardware(sheet).bandwidth_bytes_per_s == 3.0e12
    sheet.write_text(sheet.read_text().replace("3.0e12", "30.0e11").replace("8.0e14", "9.0e14"))
    assert read_hardware(sheet).matrix_flops == {"bf16": 9.0e14}


def test_one_device_of_several_is_chosen_by_any_of_its_names(tmp_path: Path) -> None:
    rows = [*gemms(get_hardware("H200-SXM")), *gemms(get_hardware("A100-SXM4-80GB"), gpu="A100-80GB-SXM")]
    path = table(tmp_path / "ops.csv", rows)
    assert [found.device for found in calibrate_from(path, "A100-SXM4-80GB").devices] == ["A100-SXM4-80GB"]
    assert len(calibrate_from(path).devices) == 2


def test_rows_that_cannot_be_fitted_are_counted_with_the_reason(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    too_fast, of_nothing = gemm_row("H200-SXM", 16, 8192, 8192, 1e-3), gemm_row("H200-SXM", 0, 8192, 8192, 9.0)
    unknown = gemm_row("no such device", 16, 8192, 8192, 100.0)
    result = calibrate_from(table(tmp_path / "ops.csv", [*gemms(device), too_fast, of_nothing, unknown]))
    assert result.devices[0].tables[0].rows == len(SHAPES)
    assert sorted(result.left_out.values()) == [1, 1, 1]
    reasons = " | ".join(result.left_out)
    assert "faster than the device's roofs" in reasons and "m is '0'" in reasons and "no such device" in reasons


def test_end_to_end_tables_are_refused_with_what_is_needed(tmp_path: Path) -> None:
    row = dict.fromkeys(END_TO_END_COLUMNS, "x") | {"value": 1}
    path = table(tmp_path / "e2e.csv", [row], END_TO_END_COLUMNS)
    with pytest.raises(MemboundError, match=r"end-to-end.*give a table of single operators.*latency_us"):
        calibrate_from(path)


@pytest.mark.parametrize(
    ("rows", "device", "said"),
    [
        ([gemm_row("H200-SXM", 1, 8, 8, 5.0)], "A100-SXM4-80GB", "of 'A100-SXM4-80GB'; its column gpu holds H200"),
        ([gemm_row("H200-SXM", 1, 8, 8, 5.0)], "no such device", "'no such device' is unknown"),
        ([gemm_row("H200-SXM", 1, 8, 8, 5.0)], "missing.yaml", "missing.yaml' cannot be read"),
        ([gemm_row("no such device", 1, 8, 8, 5.0)], None, "no row that can be fitted: hardware 'no such device'"),
        ([gemm_row("local", 1, 8, 8, 5.0)], None, "run `membound calibrate`"),
        ([gemm_row("H200-SXM", 1, 8, 8, float("nan"))], None, "latency_us is 'nan'"),
        (
            [gemm_row("H200-SXM", 16, 8192, 8192, 1e-3)],
            None,
            "can be fitted: line 2: latency_us is '0.001', faster than the device's roofs allow",
        ),
        ([IMPOSSIBLE | {"op": "allreduce", "tp": 0.5, "m": 1024}], None, "tp is '0.5'"),
        ([IMPOSSIBLE | {"op": "prefill_attention", "q_len": 1_000_000, "kv_len": 10}], None, "q_len is 1000000"),
        ([IMPOSSIBLE | {"op": "moe_ffn", "notes": "E=0;topk=1"}], None, "'E=' in notes is '0'"),
        ([], None, "no rows"),
    ],
)
def test_a_table_that_teaches_nothing_is_one_sentence(
    tmp_path: Path, home: Path, rows: list[Row], device: str | None, said: str
) -> None:
    path = table(tmp_path / "ops.csv", rows)
    with pytest.raises(MemboundError, match=said) as caught:
        calibrate_from(path, device)
    assert "\n" not in str(caught.value)
    assert not home.exists()


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    device = get_hardware("H200-SXM")
    path = device_fits_path(device.name)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema_version": 7}')
    with pytest.raises(MemboundError, match=r"damaged or from another version.*calibrate --from TABLE.csv"):
        fits_for(device)


def test_a_damaged_file_is_kept_aside_when_the_table_is_fitted_again(tmp_path: Path) -> None:
    path = device_fits_path("H200-SXM")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    rows = [*gemms(get_hardware("A100-SXM4-80GB")), *gemms(get_hardware("H200-SXM"))]
    result = calibrate_from(table(tmp_path / "ops.csv", rows))
    assert path.with_name("H200-SXM.json.damaged").read_text() == "{"
    assert "H200-SXM.json.damaged" in result.notes[0]
    assert [DeviceFits.load(kept).device for kept in result.paths] == ["A100-SXM4-80GB", "H200-SXM"]
