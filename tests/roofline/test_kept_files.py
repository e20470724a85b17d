"""Do names of any script, files that are damaged or no files, and two writers at once leave what is kept intact?"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware, parse_hardware
from membound.roofline.home import file_stem, home_folder
from membound.roofline.models.files import resolve_model
from membound.roofline.reading.files import locked, write_files
from membound.roofline.scenario import load_scenario
from membound.roofline.times.device_fits import DeviceFits
from membound.roofline.times.kernel_fits import published_fits

DEVICE: dict[str, Any] = dict(
    name="昇腾",
    vendor="v",
    kind="gpu",
    memory_bytes=2**34,
    bandwidth_bytes_per_s=1e12,
    matrix_flops={"bf16": 1e14},
    source="made up for this test",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def describe(home: Path, file: str, **changes: Any) -> Path:
    path = home / "hardware" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**DEVICE, **changes}, allow_unicode=True), "utf-8")
    return path


def test_names_of_any_script_are_told_apart(home: Path) -> None:
    describe(home, "a.yaml")
    assert get_hardware("昇腾").name == "昇腾"
    for name, said in (("寒武纪", "is unknown"), ("???", "no letter or digit"), ("", "no letter or digit")):
        with pytest.raises(MemboundError, match=said):
            get_hardware(name)


def test_two_files_with_one_name_are_both_named(home: Path) -> None:
    describe(home, "a.yaml")
    describe(home, "b.yaml", name="other", aliases=["昇腾"])
    with pytest.raises(MemboundError, match=r"a\.yaml.*b\.yaml"):
        get_hardware("昇腾")


@given(st.text(max_size=300), st.text(max_size=300))
def test_different_names_have_different_files(one: str, other: str) -> None:
    assert (file_stem(one) == file_stem(other)) == (one == other)
    assert len(file_stem(one).encode()) < 200 and "/" not in file_stem(one)
    assert file_stem("H200-SXM") == "H200-SXM"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bandwidth_bytes_per_s": 1e-300}, "'bandwidth_bytes_per_s' is 1e-300: give bytes/s between"),
        ({"clock_hz": 1.98}, "'clock_hz' is 1.98: give hertz between"),
        ({"power_w": 1e-300}, "'power_w' is 1e-300: give watts between"),
        ({"memory_bytes": int("9" * 400)}, "give bytes between"),
        ({"compute_units": int("9" * 400)}, "give compute units between"),
        ({"matrix_flops": {"bf16": -1}}, "'matrix_flops.bf16' is -1: give FLOP/s between"),
        ({"name": "?!"}, "'name' is '?!': a name needs a letter or a digit"),
    ],
)
def test_an_impossible_figure_is_named_with_its_unit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MemboundError) as error:
        parse_hardware({**DEVICE, **changes}, "it")
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".yaml", "x" * 300 + ".gguf", "\0.json"])
def test_a_model_whose_path_cannot_be_is_one_sentence(name: str) -> None:
    with pytest.raises(MemboundError, match=r"model|GGUF"):
        resolve_model(name)


def test_a_variant_of_nothing_is_refused(home: Path) -> None:
    path = describe(home, "a.yaml", variant_of="nope")
    with pytest.raises(MemboundError, match=r"a.yaml.*'variant_of' is 'nope', which is unknown"):
        get_hardware(str(path))
    assert get_hardware(str(describe(home, "a.yaml", variant_of="h100 sxm5"))).variant_of == "H100-SXM5"


def test_paths_that_cannot_be_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("~nouser/x.yaml", "\0.yaml", f"{'x' * 300}.yaml", str(tmp_path / "pipe.yaml")):
        with pytest.raises(MemboundError, match="hardware file"):
            get_hardware(name)
    for folder in ("~nouser/x", "/" + "x" * 300):
        monkeypatch.setenv("MEMBOUND_HOME", folder)
        with pytest.raises(MemboundError, match="MEMBOUND_HOME"):
            home_folder()


@pytest.mark.parametrize(("name", "value"), [("bandwidth_share", None), ("bandwidth_share", 0), ("launch_s", -1)])
def test_fits_that_hold_nonsense_are_damaged(tmp_path: Path, name: str, value: float | None) -> None:
    fit = published_fits()["gemm", "bf16", "any", "any"]
    parameters = {**fit.parameters, name: value} if value is not None else {**fit.parameters}
    if value is None:
        del parameters[name]
    document = {"family": "gemm", "kernel": "bf16", "scope": "X", "library": "any", "parameters": parameters}
    document |= {"rows": 1, "median_error": 0.1, "spread": 0.1, "sources": []}
    path = tmp_path / "X.json"
    path.write_text(json.dumps({"device": "X", "tables": [], "fits": [document], "residuals": []}))
    with pytest.raises(MemboundError, match=r"X.json' is damaged.*(bandwidth_share|launch_s is -1)"):
        DeviceFits.load(path)


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kept"

    def add(word: str) -> None:
        for _ in range(10):
            with locked(tmp_path / "lock"):
                write_files({path: (path.read_bytes() if path.exists() else b"") + word.encode()})

    threads = [threading.Thread(target=add, args=(word,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text()) == sorted("abcd" * 10)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "lock"]


def test_a_file_or_folder_of_another_kind_is_told_to_be_one(tmp_path: Path) -> None:
    other = tmp_path / "numbers.csv"
    other.write_text("a,b\n", encoding="utf-8")
    with pytest.raises(MemboundError, match="is a file, but no data sheet"):
        get_hardware(str(other))
    with pytest.raises(MemboundError, match="is a file of no known kind"):
        resolve_model(str(other))
    with pytest.raises(MemboundError, match="is a folder; give the path of a YAML file"):
        load_scenario(str(tmp_path))


def test_what_is_missing_beside_another_mistake_is_not_shown_with_the_whole_sheet_as_its_value(tmp_path: Path) -> None:
    sheet = tmp_path / "mine.yaml"
    sheet.write_text("{name: Mine, vendor: Acme, kind: gpu, architecture: Rubin}", encoding="utf-8")
    with pytest.raises(MemboundError) as refused:
        get_hardware(str(sheet))
    assert "Acme" not in str(refused.value) and "missing" in str(refused.value)
