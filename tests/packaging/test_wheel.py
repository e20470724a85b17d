"""Is what gets installed exactly the packages, with their data, under the one name membound?"""

from __future__ import annotations

import shutil
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def setuptools_table(root: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    return table


@pytest.fixture(scope="module")
def package_files(repository_files: list[Path], packages: tuple[str, ...]) -> list[Path]:
    return [path for path in repository_files if path.parts[0] in packages]


@pytest.fixture(scope="module")
def scripts(package_files: list[Path]) -> set[Path]:
    """Modules that are in no package, so they are not installed."""
    modules = {path for path in package_files if path.suffix == ".py"}
    return {path for path in modules if path.parent / "__init__.py" not in modules}


@pytest.fixture(scope="module")
def wheel_names(
    root: Path, repository_files: list[Path], run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> set[str]:
    """Names in a wheel built from a copy, since setuptools reuses what it finds in build/."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in repository_files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, source / path)
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_package_list_equals_the_folders_with_an_init(
    package_files: list[Path], setuptools_table: dict[str, Any]
) -> None:
    folders = {path.parent for path in package_files if path.name == "__init__.py"}
    named = {".".join(["membound", *folder.parts]): folder.as_posix() for folder in folders}
    assert set(setuptools_table["packages"]) == set(named)
    assert setuptools_table["package-dir"] == named


def test_only_recorders_of_data_are_outside_a_package(scripts: set[Path]) -> None:
    assert {path for path in scripts if path.parts[0] != "data"} == set()


def test_the_wheel_has_membound_alone_at_its_top(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"membound"}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(
    wheel_names: set[str], package_files: list[Path], scripts: set[Path]
) -> None:
    inside = {name for name in wheel_names if name.startswith("membound/")}
    assert inside == {f"membound/{path.as_posix()}" for path in package_files if path not in scripts}
