"""What does membound find on this machine? The first thing to paste into an issue report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membound.app.checkout import DIRTY, ROOT, commit
from membound.app.home import membound_home
from membound.app.store import Store
from membound.roofline.errors import MemboundError
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.home import device_fits_path, local_calibration_path
from membound.roofline.times.device_fits import DeviceFits

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8")
CPU_FLAGS_ARM = ("asimddp", "i8mm", "bf16", "sve", "sve2")


def report() -> dict[str, Any]:
    """One dictionary a section; a section that cannot be read says why under `error`, and nothing raises."""
    return {name: _guarded(section) for name, section in _SECTIONS.items()}


def render(found: dict[str, Any]) -> Table:
    """The report as a table for a terminal."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, section in found.items():
        table.add_row(name, _sentence(section))
    return table


def find_browser() -> str | None:
    """Path of a Chrome or Chromium; the environment's CHROME comes first."""
    for name in (os.environ.get("CHROME"), *BROWSERS):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _guarded(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return section()
    except MemboundError as error:
        return {"error": str(error)}
    except Exception as error:
        said = str(error).splitlines()
        return {"error": f"cannot be found out: {said[0] if said else type(error).__name__}"}


def _sentence(section: dict[str, Any]) -> str:
    parts = []
    for key, value in section.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, list):
            value = ", ".join(_sentence(v) if isinstance(v, dict) else str(v) for v in value) or "none"
        elif isinstance(value, dict):
            value = f"({_sentence(value)})"
        elif value is None:
            value = "none"
        label = key.replace("_gib", " (GiB)").replace("_", " ")
        parts.append(f"{label} {value}")
    return "; ".join(parts)


def _first_line(*command: str) -> str | None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ran.stdout.strip().splitlines()
    return lines[0] if ran.returncode == 0 and lines else None


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _membound() -> dict[str, Any]:
    found = commit()
    return {
        "version": _version_of("membound"),
        "commit": None if found is None else found.removesuffix(DIRTY),
        "changed_since_commit": None if found is None else found.endswith(DIRTY),
        "folder": str(ROOT),
    }


def _python() -> dict[str, Any]:
    return {"version": platform.python_version(), "executable": sys.executable}


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model, flags = _cpu()
    memory_gib = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory_gib = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "system": platform.platform(),
        "cpu": model,
        "cpu_flags": flags,
        "usable_cores": usable,
        "cores": os.cpu_count(),
        "memory_gib": memory_gib,
        "load_average": load,
    }


def _cpu() -> tuple[str, list[str]]:
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    else:
        fields["model name"] = _first_line("sysctl", "-n", "machdep.cpu.brand_string") or ""
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return model, [flag for flag in CPU_FLAGS + CPU_FLAGS_ARM if flag in present]


def _torch() -> dict[str, Any]:
    version = _version_of("torch")
    if version is None:
        return {"version": None, "note": "predicting works without torch; measuring needs it (make setup)"}
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / GIB, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda_devices": devices,
    }


def _triton() -> dict[str, Any]:
    return {"version": _version_of("triton")}


def _kernels() -> dict[str, Any]:
    if _version_of("torch") is None:
        return {"in_use": None, "reason": "torch is not installed"}
    import torch

    from membound.kernels.dispatch import kernels_for, why_not_cpp, why_not_triton

    if torch.cuda.is_available():
        name = kernels_for("cuda").name
        return {"in_use": name, "reason": why_not_triton() or "torch finds a GPU that Triton compiles for"}
    name = kernels_for("cpu").name
    return {"in_use": name, "reason": why_not_cpp() or "the C++ kernels build here"}


def _compiler() -> dict[str, Any]:
    path = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    return {"path": path, "version": _first_line(path, "--version") if path else None}


def _browser() -> dict[str, Any]:
    path = find_browser()
    return {"path": path, "version": _first_line(path, "--version") if path else None}


def _store() -> dict[str, Any]:
    """The home folder, whether a file can be written there, and the runs that its index lists."""
    home = membound_home()
    try:
        with tempfile.TemporaryFile(dir=home):
            writable = True
    except OSError:
        writable = False
    found: dict[str, Any] = {"path": str(home), "writable": writable}
    if not writable:
        found["note"] = "set MEMBOUND_HOME to a folder of your own"
    try:
        runs: int | str = len(Store(home).runs()) if (home / "index.sqlite").exists() else 0
    except MemboundError as error:
        runs = str(error)
    return found | {"runs": runs, "free_gib": round(shutil.disk_usage(home).free / GIB, 1)}


def _calibration() -> dict[str, Any]:
    path = local_calibration_path()
    fitted = {"devices_fitted_to_tables": _fitted_devices()}
    if not path.exists():
        return {"path": None, "note": "this machine is not calibrated (membound calibrate)"} | fitted
    stored = Calibration.load(path)
    return (
        {"path": str(path)}
        | {key: getattr(stored, key) for key in ("created", "machine", "threads", "kernels")}
        | fitted
    )


def _fitted_devices() -> list[str]:
    """The devices whose kernels were fitted to a table here, each with its rows; a damaged file says so."""
    folder = device_fits_path("any").parent
    listed = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            fits = DeviceFits.load(path)
            listed.append(f"{fits.device} ({sum(table.rows for table in fits.tables):,} rows)")
        except MemboundError as error:
            listed.append(str(error))
    return listed


def _foreign_kernels() -> dict[str, Any]:
    version = _version_of("kernels")
    note = "none, so no other package is called kernels"
    if version is not None:
        note = "Hugging Face's package; it and membound.kernels do not meet"
    return {"version": version, "note": note}


_SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "membound": _membound,
    "python": _python,
    "machine": _machine,
    "torch": _torch,
    "triton": _triton,
    "kernels": _kernels,
    "compiler": _compiler,
    "browser": _browser,
    "store": _store,
    "calibration": _calibration,
    "kernels distribution": _foreign_kernels,
}
