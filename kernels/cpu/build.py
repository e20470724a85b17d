"""How does the C++ of this package become a library that shares torch's threads?

The system's compiler builds it on first use, in some seconds and without torch's headers; the result is kept
under `$MEMBOUND_HOME/kernels`, one file per source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from membound.roofline.home import home_folder

SOURCES = (
    "linear.cpp",
    "linear_tiles.cpp",
    "integer.cpp",
    "integer_tiles.cpp",
    "attention.cpp",
    "eviction.cpp",
    "norms.cpp",
    "pointwise.cpp",
    "mixture.cpp",
    "latent.cpp",
    "recurrent.cpp",
    "replay.cpp",
)
HEADERS = ("batch.h", "codes.h", "kv.h", "norm.h", "threads.h", "tile_units.h", "units.h", "vector.h", "weight.h")
_THIS_PROCESSOR = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# Contraction stays off: a compiler that fuses a multiply-add here and not there changes bits between code paths.
FLAGS = ("-std=c++17", "-O3", _THIS_PROCESSOR, "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
COMPILE_SECONDS = 300
_BUILD_PREFIX = "build-"


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be built or loaded; the message says why in one sentence."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built now if no earlier build fits, connected to torch's thread pool."""
    compiler = find_compiler()
    version = _output([*compiler, "--version"])
    path = cache_directory() / f"{_build_key(version)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        library = ctypes.CDLL(str(path))
        library.membound_set_parallel.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"the built kernels cannot be loaded ({error}); delete {path} to build again") from error
    runtime = openmp_runtime()
    library.membound_set_parallel(ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p) if runtime else None)
    return library


def find_compiler() -> list[str]:
    """The command that compiles C++: `$CXX`, or the first of c++, g++ and clang++ that is installed."""
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    if chosen:
        raise KernelBuildError(f"the C++ compiler named by $CXX is not there: {chosen}")
    raise KernelBuildError("no C++ compiler found (looked for c++, g++ and clang++; $CXX names another)")


def cache_directory() -> Path:
    """Where compiled kernels are kept."""
    return home_folder() / "kernels"


@cache
def openmp_runtime() -> ctypes.CDLL | None:
    """The OpenMP library whose threads torch uses, or another one, or None where there is none.

    A second pool beside torch's would spin for the same cores, so the one that the process has loaded is taken;
    libgomp, libomp and libiomp5 all have the entry `GOMP_parallel` that the kernels call.
    """
    torch_libraries = Path(torch.__file__).parent / "lib"
    found = [str(path) for path in sorted(torch_libraries.glob("lib*omp*")) if _is_openmp(path.name)]
    found = [path for path in _loaded_libraries() if _is_openmp(Path(path).name)] or found
    found.sort(key=lambda path: not path.startswith(str(torch_libraries)))
    for name in [*found, ctypes.util.find_library("gomp"), ctypes.util.find_library("omp")]:
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if library is not None and hasattr(library, "GOMP_parallel"):
            return library
    return None


def _is_openmp(name: str) -> bool:
    return name.startswith(("libgomp", "libomp", "libiomp5"))


def _loaded_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if ".so" in line})


def _build_key(compiler_version: str) -> str:
    key = hashlib.sha256()
    here = Path(__file__).parent
    for name in SOURCES + HEADERS:
        key.update((here / name).read_bytes())
    key.update("\0".join([compiler_version, *FLAGS, platform.machine(), _processor_features()]).encode())
    return key.hexdigest()[:32]


def _processor_features() -> str:
    """What -march=native depends on: a home directory may be shared between machines."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def _build(compiler: list[str], path: Path) -> None:
    here = Path(__file__).parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BUILD_PREFIX) as name:
            temporary = Path(name)
            objects = [temporary / f"{source}.o" for source in SOURCES]
            pairs = zip(SOURCES, objects, strict=True)
            compiled = [[*compiler, *FLAGS, "-c", str(here / source), "-o", str(to)] for source, to in pairs]
            _run_all(compiled, temporary)
            _run_all([[*compiler, "-shared", *map(str, objects), "-o", str(temporary / "kernels.so")]], temporary)
            os.replace(temporary / "kernels.so", path)  # atomic: another process may build the same file
    except OSError as error:
        raise KernelBuildError(f"cannot build the kernels in {path.parent}: {error}") from error


def _remove_abandoned(folder: Path) -> None:
    """Removes what builds that were killed have left."""
    for left in folder.glob(f"{_BUILD_PREFIX}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _run_all(commands: list[list[str]], temporary: Path) -> None:
    running: list[subprocess.Popen[str]] = []
    try:
        with _group_that_ends() as group:
            running += [_started(command, temporary, group) for command in commands]
            outputs = [process.communicate(timeout=COMPILE_SECONDS)[0] for process in running]
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"the C++ compiler took more than {COMPILE_SECONDS} s") from error
    finally:
        for process in running:
            process.wait()
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
            raise KernelBuildError(f"{command[0]} failed: {lines[0]}")


def _started(command: list[str], temporary: Path, group: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(temporary)},
        process_group=group,
    )


@contextmanager
def _group_that_ends() -> Iterator[int]:
    """A process group that is killed when the block ends, or this process: with g++ also the cc1plus that it started.

    Its leader waits for the end of a pipe that this process holds open, however it ends.
    """
    leader = subprocess.Popen(["/bin/sh", "-c", "read line; kill -KILL 0"], stdin=subprocess.PIPE, process_group=0)
    assert leader.stdin is not None, "it is a pipe"
    try:
        yield leader.pid
    finally:
        leader.stdin.close()
        leader.wait()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"cannot run the C++ compiler: {error}") from error
