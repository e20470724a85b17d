"""Is each device possible and sourced, found by the names people write, and is bad YAML refused in one sentence?"""

from __future__ import annotations

import contextlib
import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import (
    HardwareSpec,
    catalog,
    devices,
    get_hardware,
    normalised,
    parse_hardware,
    read_hardware,
    user_hardware,
)

FACTS = Path(__file__).parents[3] / "shared" / "facts"
DATA = Path(__file__).parents[2] / "data" / "hardware"
DEVICE: dict[str, Any] = dict(
    name="Card",
    vendor="Somebody",
    kind="gpu",
    memory_bytes=2**34,
    bandwidth_bytes_per_s=1e12,
    matrix_flops={"bf16": 1e14},
    source="a test",
)
FIGURES = ("memory_bytes", "bandwidth_bytes_per_s", "cache_bytes", "cache_bandwidth_bytes_per_s", "compute_units")
FIGURES += ("clock_hz", "matrix_flops", "sparse_flops", "vector_flops", "runs_as", "scale_up", "scale_out", "host")
FIGURES += ("power_w",)


def facts(file: str) -> list[dict[str, str]]:
    with (FACTS / file).open(encoding="utf-8") as table:
        return list(csv.DictReader(table))


needs_facts = pytest.mark.skipif(not FACTS.is_dir(), reason="../shared/facts is not here")


# --- every device ---


@pytest.mark.parametrize("name", catalog())
def test_every_figure_has_a_source_and_what_is_verified_is_there(name: str) -> None:
    spec = catalog()[name]
    given_figures = {figure for figure in FIGURES if getattr(spec, figure)}
    assert given_figures <= spec.sources.keys()
    assert not {figure for figure in spec.verified if figure.partition(".")[0] not in given_figures}
    for figure in spec.verified:
        table, _, key = figure.partition(".")
        assert not key or key in (getattr(spec, table) if table.endswith("flops") else vars(getattr(spec, table)))
    assert spec.price is None or (spec.price.source and spec.price.date.year >= 2025)


@pytest.mark.parametrize("name", catalog())
def test_narrower_numbers_are_not_slower_and_memory_is_slower_than_cache(name: str) -> None:
    spec = catalog()[name]
    rates = spec.matrix_flops
    for wide, narrow in (("fp32", "fp16"), ("tf32", "bf16"), ("bf16", "fp8"), ("fp8", "fp6"), ("fp8", "fp4")):
        if wide in rates and narrow in rates:
            assert rates[narrow] >= rates[wide]
    assert spec.cache_bandwidth_bytes_per_s is None or spec.cache_bandwidth_bytes_per_s > spec.bandwidth_bytes_per_s
    if spec.scale_up and spec.scale_out:
        assert spec.scale_out.bandwidth_bytes_per_s <= 2 * spec.scale_up.bandwidth_bytes_per_s
    assert spec.scale_up is None or spec.scale_up.bandwidth_bytes_per_s < spec.bandwidth_bytes_per_s


# Dense fp16 FLOP a clock and SM or CU with fp32 accumulation, at most: the vendors' architecture whitepapers.
FLOP_A_CLOCK = {
    "Volta HBM": 1024,
    "Turing GDDR": 1024,
    "Ampere HBM": 2048,
    "Ampere GDDR": 1024,
    "Ada GDDR": 1024,
    "Hopper HBM": 4096,
    "Blackwell HBM": 8192,
    "Blackwell GDDR": 1024,
    "CDNA2 HBM": 1024,
    "CDNA3 HBM": 2048,
    "CDNA4 HBM": 4096,
    "RDNA3 GDDR": 512,
}


@pytest.mark.parametrize("name", [n for n, d in catalog().items() if d.clock_hz and d.generation in FLOP_A_CLOCK])
def test_no_dense_rate_is_above_what_the_units_multiply_at_boost(name: str) -> None:
    """A sparse figure in the place of a dense one, or a rate with fp16 accumulation on a GeForce, would be."""
    spec = catalog()[name]
    assert spec.compute_units and spec.clock_hz
    most = FLOP_A_CLOCK[spec.generation] * spec.compute_units * spec.clock_hz
    assert 0.2 * most < spec.matrix_flops["fp16"] <= 1.02 * most
    if "GeForce" in spec.notes:
        assert spec.matrix_flops["fp16"] <= 0.51 * most


@needs_facts
def test_the_devices_of_the_facts_table_carry_its_figures() -> None:
    rows = facts("hardware.csv")
    assert len(rows) == 34
    for row in rows:
        spec = get_hardware(row["gpu"])
        assert spec.memory_bytes / 2**30 == pytest.approx(float(row["memory_gb"]), rel=0.075)
        assert spec.bandwidth_bytes_per_s / 1e9 == pytest.approx(float(row["bandwidth_gbs"]), rel=0.01)
        columns = {"bf16_dense_tflops": "bf16", "fp8_dense_tflops": "fp8", "int8_dense_tops": "int8"}
        for column, dtype in columns.items():
            if row[column] and row["arch"] != "Apple":
                assert spec.peak_flops(dtype) / 1e12 == pytest.approx(float(row[column]), rel=0.01)
        if row["tdp_w"]:
            assert spec.power_w == float(row["tdp_w"])


@pytest.mark.parametrize(
    ("device", "reported_mib"),
    {
        "T4": 15360,
        "L4": 23034,
        "A10": 23028,
        "A10G": 23028,
        "A40": 46068,
        "L20": 46068,
        "L40": 46068,
        "L40S": 46068,
    }.items(),
)
def test_memory_is_what_a_card_reports_where_ecc_takes_a_sixteenth_of_gddr(device: str, reported_mib: int) -> None:
    """Totals that nvidia-smi shows with ECC: modal-labs/modal-client pull request 2797 and each file's own source."""
    spec = get_hardware(device)
    assert spec.memory_bytes == reported_mib * 2**20
    assert "nvidia-smi reports" in spec.sources["memory_bytes"]


def test_the_traps_of_data_sheets_are_avoided() -> None:
    """facts/hardware.csv: B300 loses int8, GeForce halves fp32 accumulation, L40S and H200 pages list sparse rates."""
    assert get_hardware("B300").peak_flops("int8") < get_hardware("B200").peak_flops("int8") / 25
    assert get_hardware("RTX4090").peak_flops("bf16") == 165.2e12
    assert get_hardware("L40S").peak_flops("fp8") == 733e12
    assert get_hardware("H200").peak_flops("fp8") == get_hardware("H100").peak_flops("fp8") == 1978.9e12
    half, whole = get_hardware("MI250X-1GCD"), get_hardware("MI250X")
    assert half.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s / 2, rel=0.001)


def test_links_are_one_way_and_per_device() -> None:
    """aiconfigurator-core, systems/*.yaml: NVLink 300, 450 and 900 GB/s one way, 72 GB200s in one domain."""
    for name, one_way in {"A100": 300e9, "H100": 450e9, "B200": 900e9, "L40S": 32e9}.items():
        link = get_hardware(name).scale_up
        assert link and link.bandwidth_bytes_per_s == one_way and link.max_devices == 8
    rack, hgx = get_hardware("GB200").scale_up, get_hardware("H100").scale_out
    assert rack and rack.max_devices == 72
    assert hgx and hgx.bandwidth_bytes_per_s == 50e9


def test_a_device_without_bf16_runs_it_in_fp16_or_refuses_it() -> None:
    v100 = get_hardware("V100")
    assert "bf16" not in v100.matrix_flops
    assert v100.computes_in("bf16") == "fp16" and v100.peak_flops("bf16") == 125e12
    old = parse_hardware({**DEVICE, "matrix_flops": {"fp16": 1e13}}, "test")
    assert old.computes_in("bf16") is None
    with pytest.raises(MemboundError, match="'Card' has no bf16 matrix rate; it has fp16"):
        old.peak_flops("bf16")


def test_fp32_falls_to_the_vector_units() -> None:
    spec = parse_hardware({**DEVICE, "vector_flops": 2e13}, "test")
    assert spec.peak_flops("fp32") == 2e13
    with pytest.raises(MemboundError, match="no bf16 2:4 sparse matrix rate; it has none"):
        spec.peak_flops("bf16", sparse=True)


# --- names ---


@needs_facts
@pytest.mark.parametrize("file", ["measured_ops_dev.csv", "measured_e2e_dev.csv"])
def test_every_single_device_of_the_development_tables_is_found(file: str) -> None:
    names = {row["gpu"] for row in facts(file)}
    assert len(names) > 10
    for name in names:
        if "+" not in name:
            assert get_hardware(name).kind in ("gpu", "accelerator")


@pytest.mark.parametrize(
    ("written", "device"),
    {
        "NVIDIA H200": "H200-SXM",
        "NVIDIA H100 80GB HBM3": "H100-SXM5",
        "NVIDIA GeForce RTX 4090": "RTX-4090",
        "nvidia_a100-sxm4-80gb": "A100-SXM4-80GB",
        "A100-80GB-SXM(330W)": "A100-SXM4-80GB-330W",
        "A100-80GB-SXM?": "A100-SXM4-80GB",
        "MI355X-288GB": "MI355X",
        "AMD Instinct MI300X": "MI300X",
        "B200-192GB": "B200-SXM",
        "Apple-M1Max-32c": "M1-Max-32c",
        "RTX 3090 24GB": "RTX-3090",
        "NVIDIA L4 24GB": "L4",
        "NVIDIA A10 24GB": "A10",
        "A10G 24GB": "A10G",
        "Tesla T4 16GB": "T4",
        "NVIDIA A40 48GB": "A40",
        "NVIDIA L20 48 GB": "L20",
        "DGX Spark 128GB": "DGX-Spark",
        "NVIDIA GH200 144G HBM3e": "GH200-144GB",
        "NVIDIA GH200 Grace Hopper Superchip 96GB": "GH200-96GB",
        "A100-SXM4-40G": "A100-SXM4-40GB",
        "NVIDIA RTX 4000 Ada-PCIe-20GB": "RTX-4000-Ada",
        "NVIDIA L40S-PCIe-48GB": "L40S",
        "AMD Instinct MI300X-NPS1-SPX-192GB-750W": "MI300X",
        "NVIDIA H200-SXM-141GB-CTS": "H200-SXM",
        "Intel Gaudi 2 AI accelerator": "Gaudi-2",
        "Apple M3 Max 40-core GPU": "M3-Max-40c",
        "M1 Max 32GB": "M1-Max-32c-32GB",
        "H100-80GB-SXM(500W)": "H100-SXM5-500W",
    }.items(),
)
def test_spellings_that_people_write(written: str, device: str) -> None:
    assert get_hardware(written).name == device


def test_a_smaller_power_or_memory_in_a_name_makes_a_variant_with_the_kernels_of_the_whole_one() -> None:
    capped, whole = get_hardware("H100-80GB-SXM(500W)"), get_hardware("H100")
    assert (capped.power_w, capped.variant_of) == (500.0, whole.name) and get_hardware(capped.name) == capped
    assert capped.model_copy(update={"name": whole.name, "aliases": whole.aliases, "variant_of": None}) == (
        whole.model_copy(update={"power_w": 500.0, "price": None})
    )
    small = get_hardware("M3 Max 64GB")
    assert small.memory_bytes == 64 * 2**30 and small.variant_of == "M3-Max-40c" and get_hardware(small.name) == small


@pytest.mark.parametrize(
    "name",
    [
        *("RTX 4090 Laptop GPU", "RTX 4090 Mobile", "RTX 3080-12GB", "RTX 5090 24GB", "H100-SXM9", "L400", "A100X"),
        *("H200 PCIe", "B200 PCIe", "H100 64GB", "M1 Max 128GB", "H100-SXM5-800W"),
    ],
)
def test_a_part_of_a_name_is_not_the_device(name: str) -> None:
    with pytest.raises(MemboundError, match=f"hardware '{name}' is unknown; (did you mean|known are)"):
        get_hardware(name)


def test_a_near_miss_names_the_device_and_a_far_one_all() -> None:
    with pytest.raises(MemboundError, match=r"did you mean .*RTX-4090"):
        get_hardware("RTX 4900")
    with pytest.raises(MemboundError, match="`membound catalog devices` lists"):
        get_hardware("toaster!")


@pytest.mark.parametrize("name", catalog())
def test_a_device_is_found_by_its_name_and_aliases_and_by_nothing_of_another(name: str) -> None:
    spec = catalog()[name]
    for spelling in (name, name.lower(), name.replace("-", " "), f"{spec.vendor} {name}", *spec.aliases):
        assert get_hardware(spelling) == spec


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_scanned_aliases_are_those_of_the_file(path: Path) -> None:
    document = yaml.safe_load(path.read_text("utf-8"))
    assert normalised(path.stem) == normalised(document["name"])
    names = {normalised(name) for name in (document["name"], *document.get("aliases", ()))}
    assert names == {name for name, stem in devices._shipped_names().items() if stem == path.stem}


@given(name=st.sampled_from(sorted(catalog())), extra=st.text("abcdefghij0123456789", min_size=1, max_size=6))
def test_a_longer_name_is_never_the_same_device(name: str, extra: str) -> None:
    with contextlib.suppress(MemboundError):
        assert get_hardware(name + extra).name != name


def test_one_device_is_found_without_reading_all() -> None:
    code = """
import time
from membound.roofline.hardware import devices
start = time.process_time()
devices.get_hardware("A100-80GB-SXM")
print(time.process_time() - start, devices._shipped.cache_info().misses)
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, parsed = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(parsed) == {"1"}
    assert min(map(float, seconds)) < 0.02


# --- a user's own device ---


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "card.yaml"
    path.write_text(yaml.safe_dump({**DEVICE, **changes}), "utf-8")
    return path


def test_a_device_is_read_from_a_path_and_from_the_home_folder(tmp_path: Path, monkeypatch: Any) -> None:
    assert get_hardware(str(write(tmp_path))).name == "Card"
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    write(tmp_path / "home" / "hardware", aliases=["My Card"])
    assert get_hardware("my-card").bandwidth_bytes_per_s == 1e12
    write(tmp_path / "home" / "hardware", name="H100-SXM5")
    with pytest.raises(MemboundError, match=r"is the name of H100-SXM5 of '.*card.yaml' and H100-SXM5 of the catalog"):
        get_hardware("H100-SXM5")


def test_a_broken_file_of_the_home_folder_stops_nobody_who_does_not_ask_for_it(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    write(tmp_path / "hardware")
    (tmp_path / "hardware" / "broken-one.yaml").write_text("a: [")
    assert get_hardware("H100-SXM5").name == "H100-SXM5" and get_hardware("Card").name == "Card"
    assert set(user_hardware()) == {"Card"}
    (said,) = {record.getMessage() for record in caplog.records}
    assert "broken-one.yaml' is not valid YAML at line 1; it is left out" in said
    with pytest.raises(MemboundError, match="not valid YAML"):
        get_hardware("Broken One")


@pytest.mark.parametrize(
    ("name", "says"),
    [("cpu", "give local for this machine"), ("/tmp", "which ends in .yaml"), ("H100-SXN5", "mean H100")],
)
def test_what_is_no_device_is_answered_with_what_is_near_or_nothing(name: str, says: str) -> None:
    with pytest.raises(MemboundError, match=says) as caught:
        get_hardware(name)
    assert "TPU" not in str(caught.value)


@pytest.mark.parametrize("name", ["H100-SXM5", "MI300X", "V100-SXM2-16GB", "TPU-v5e"])
def test_a_device_written_as_yaml_reads_back_equal(name: str, tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(get_hardware(name).to_yaml(), "utf-8")
    assert read_hardware(path) == get_hardware(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"bandwidth_bytes_per_s": -1.0},
            "field 'bandwidth_bytes_per_s' is -1.0: give bytes/s between 1e+08",
        ),
        ({"bandwidth_bytes_per_s": math.nan}, "field 'bandwidth_bytes_per_s' is nan: input should be a finite number"),
        ({"matrix_flops": {"bf16": math.inf}}, "field 'matrix_flops.bf16' is inf: input should be a finite number"),
        ({"matrix_flops": {"fp7": 1e12}}, "matrix_flops names the dtype 'fp7'; known are fp32, tf32, bf16"),
        ({"matrix_flops": {"bf16": -1e12}}, "field 'matrix_flops.bf16' is -1000000000000.0: give FLOP/s between"),
        ({"sparse_flops": {"bf16": 4e14}}, "sparse_flops.bf16 is 4e+14, 4.00 times the dense 1e+14"),
        ({"sparse_flops": {"int8": 4e14}}, "sparse_flops.int8 has no dense rate beside it"),
        ({"runs_as": {"fp16": "fp8"}}, "runs_as.fp16 is fp8; it must lead from a dtype without a matrix rate"),
        ({"bandwidth": 1e12}, "field 'bandwidth' is unknown; remove it or check its spelling"),
        ({"architecture": "Hoper"}, "field 'architecture' is 'Hoper': input should be"),
        ({"price": {"usd_per_h": 1, "date": "soon", "source": "x"}}, "field 'price.date' is 'soon'"),
    ],
)
def test_bad_yaml_is_refused_with_field_and_value(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MemboundError) as error:
        get_hardware(str(write(tmp_path, **changes)))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "name: [", "", "\x00"])
def test_a_file_that_is_no_device_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(MemboundError, match=r"hardware file '.*device.yaml'"):
        get_hardware(str(path))


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(yaml.safe_dump({k: v for k, v in DEVICE.items() if k != "memory_bytes"}), "utf-8")
    with pytest.raises(MemboundError, match="field 'memory_bytes' is missing"):
        get_hardware(str(path))
    with pytest.raises(MemboundError, match="cannot be read: No such file"):
        get_hardware(str(tmp_path / "none.yaml"))


def test_what_a_data_sheet_is_said_to_have_at_least_is_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("{name: X1}", "utf-8")
    with pytest.raises(MemboundError, match="; at least: ") as error:
        get_hardware(str(path))
    path.write_text(str(error.value).partition("; at least: ")[2], "utf-8")
    assert get_hardware(str(path)).name == "X1"


@given(
    dense=st.floats(1e12, 1e17),
    ratio=st.floats(0.01, 10),
)
def test_sparse_rates_are_between_once_and_twice_the_dense(dense: float, ratio: float) -> None:
    document = {**DEVICE, "matrix_flops": {"bf16": dense}, "sparse_flops": {"bf16": dense * ratio}}
    if 1.0001 < ratio < 2.049:
        assert HardwareSpec.model_validate(document).peak_flops("bf16", sparse=True) == dense * ratio
    elif ratio < 0.9999 or ratio > 2.051:
        with pytest.raises(MemboundError, match="one of the two is the other kind of figure"):
            parse_hardware(document, "test")


@pytest.mark.parametrize(
    ("written", "kind"), [("HBM3e", "HBM"), ("gddr6x", "GDDR"), ("LPDDR5X", "LPDDR"), ("DDR5", "DDR"), ("HBM", "HBM")]
)
def test_a_memory_is_of_the_kind_of_its_generation(written: str, kind: str) -> None:
    document = get_hardware("H100-SXM5").model_dump(mode="json", exclude_defaults=True) | {"memory_kind": written}
    assert parse_hardware(document, "the sheet").memory_kind == kind


def test_bytes_of_memory_may_be_written_with_an_exponent_and_must_be_whole():
    """YAML reads 48e9 as text."""
    document = get_hardware("L40S").model_dump(mode="json", exclude={"calibration"})
    assert parse_hardware(document | {"memory_bytes": "48e9"}, "it").memory_bytes == 48_000_000_000
    with pytest.raises(MemboundError, match="memory_bytes"):
        parse_hardware(document | {"memory_bytes": "48.5"}, "it")


def test_all_fields_that_a_data_sheet_lacks_are_named():
    with pytest.raises(MemboundError, match=r"fields 'name', 'kind', .* and 'source' are missing"):
        parse_hardware({"vendor": "x", "memory_bytes": 1}, "it")
