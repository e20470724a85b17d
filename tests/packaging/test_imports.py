"""Do the imports follow the arrows app -> runtime -> {simulator.scheduling, kernels} -> roofline?"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# what a folder may import from the others; itself and everything outside membound is free
MAY_IMPORT = {
    "app": ("app", "data", "kernels", "roofline", "runtime", "simulator"),
    "runtime": ("simulator.scheduling", "kernels", "roofline", "data"),
    "kernels": ("roofline",),
    "simulator.scheduling": ("roofline",),
    "simulator": ("simulator.scheduling", "roofline", "data"),
    "roofline": ("data",),
    "data": (),
}
NEVER_TORCH = ("roofline", "simulator")


def imported(path: Path, package: str) -> Iterator[str]:
    """Dotted names that the module imports; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                parts = [*package.split(".")[: len(package.split(".")) - node.level + 1], *parts]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules(root: Path, packages: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Each module with the installed name of the package that it is in."""
    for folder in packages:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, ".".join(["membound", *path.relative_to(root).parent.parts])


def test_no_module_imports_a_folder_by_its_bare_name(root: Path, packages: tuple[str, ...]) -> None:
    files = [path for folder in (*packages, "tests") for path in (root / folder).rglob("*.py")]
    wrong = [
        f"{path.relative_to(root)}: {name}"
        for path in files
        for name in imported(path, "membound")
        if name.split(".")[0] in packages
    ]
    assert not wrong


def test_imports_follow_the_arrows(root: Path, packages: tuple[str, ...]) -> None:
    wrong = []
    for path, package in modules(root, packages):
        home = package.removeprefix("membound.")
        layer = next(name for name in MAY_IMPORT if within(home, name))
        for name in imported(path, package):
            if not within(name, "membound"):
                continue
            target = name.removeprefix("membound.")
            if not any(within(target, allowed) for allowed in (layer, *MAY_IMPORT[layer])):
                wrong.append(f"{path.relative_to(root)}: {name}")
    assert not wrong


def test_roofline_and_simulator_name_no_torch(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}: {name}"
        for path, package in modules(root, NEVER_TORCH)
        for name in imported(path, package)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["roofline", "simulator"])
def test_importing_every_module_leaves_torch_out(package: str, root: Path, run: Callable[..., object]) -> None:
    names = [
        ".".join([owner, path.stem]) if path.stem != "__init__" else owner for path, owner in modules(root, (package,))
    ]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "print([name for name in ('torch', 'triton', 'streamlit', 'pandas') if name in sys.modules])"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_roofline_and_simulator_import_in_a_blink(least_cpu_s: Callable[..., float]) -> None:
    assert least_cpu_s(sys.executable, "-c", "import membound.roofline, membound.simulator") < 0.7
