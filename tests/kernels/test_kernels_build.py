"""Building the C++ kernels: once per machine, and with a plain reason where it cannot be done."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from membound.app.jobs import process_born  # noqa: E402
from membound.kernels import dispatch  # noqa: E402
from membound.kernels.base import Kernels  # noqa: E402
from membound.kernels.cpu import build as cpu_build  # noqa: E402


def test_the_second_load_does_not_compile(cpp, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build, "SOURCES", ("norms.cpp", "replay.cpp"))  # all of them are built for the other tests
    cpu_build.load_library()
    built = list((tmp_path / "kernels").iterdir())
    assert len(built) == 1 and built[0].suffix == ".so"

    def compile_again(*_, **__):
        raise AssertionError("the cached library was not used")

    monkeypatch.setattr(cpu_build, "_build", compile_again)
    cpu_build.load_library()


def test_the_key_of_a_build_is_its_flags_compiler_and_source(cpp, monkeypatch):
    key = cpu_build._build_key("compiler 1")
    assert key == cpu_build._build_key("compiler 1") != cpu_build._build_key("compiler 2")
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-g"))
    assert key != cpu_build._build_key("compiler 1")


def test_without_a_compiler_plain_pytorch_runs_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    kernels = dispatch.kernels_for("cpu")
    assert kernels.name == "torch"
    assert "no C++ compiler found" in (dispatch.why_not_cpp() or "")
    with pytest.raises(cpu_build.KernelBuildError):
        dispatch.kernels_for("cpu", prefer="cpp")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    dispatch.kernels_for("cpu")
    assert "/no/such/compiler" in (dispatch.why_not_cpp() or "")


def test_a_failing_compiler_is_reported_by_its_first_error(tmp_path, monkeypatch):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho note\necho 'x.cpp:1: error: no'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    with pytest.raises(cpu_build.KernelBuildError, match=r"failed: x\.cpp:1: error: no"):
        cpu_build.load_library()
    assert list((tmp_path / "home" / "kernels").iterdir()) == []


def test_compilers_end_with_a_build_that_is_killed(tmp_path):
    """And what they started, as g++ starts cc1plus: killing them alone would leave it."""
    compiler, started = tmp_path / "cxx", tmp_path / "started"
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {started}\nwait\n")
    compiler.chmod(0o755)
    built = f"from membound.kernels.cpu.build import _run_all; _run_all([[{str(compiler)!r}]] * 2, {str(tmp_path)!r})"
    builder = subprocess.Popen([sys.executable, "-c", built])
    while not started.exists() or started.read_text().count("\n") < 2:
        assert builder.poll() is None
        time.sleep(0.02)
    builder.kill()
    builder.wait()
    deadline = time.monotonic() + 60
    while left := [pid for pid in started.read_text().split() if process_born(int(pid))]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.02)


def test_what_a_killed_build_has_left_is_removed_by_a_later_one(tmp_path):
    old, current = tmp_path / "build-old", tmp_path / "build-current"
    for folder in (old, current):
        folder.mkdir()
        (folder / "linear.cpp.o").write_text("half of it")
    os.utime(old, (0, 0))
    cpu_build._remove_abandoned(tmp_path)
    assert not old.exists() and current.exists()


def test_a_library_that_does_not_load_names_the_file_to_delete(cpp, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_build", lambda compiler, path: path.write_text("not a library"))
    (tmp_path / "kernels").mkdir()
    with pytest.raises(cpu_build.KernelBuildError, match=f"delete {tmp_path}"):
        cpu_build.load_library()


def test_the_kernels_run_on_the_pool_that_torch_loaded(cpp):
    maps = Path("/proc/self/maps")
    runtime = cpu_build.openmp_runtime()
    if runtime is None or not maps.exists() or not shutil.which("ldd"):
        pytest.skip("no OpenMP runtime, or no way to see it")
    assert runtime._name in {line.split()[-1] for line in maps.read_text().splitlines()}
    needed = subprocess.run(["ldd", _built()], capture_output=True, text=True).stdout
    assert "libc" in needed and "omp" not in needed


def _built() -> str:
    version = cpu_build._output([*cpu_build.find_compiler(), "--version"])
    return str(cpu_build.cache_directory() / f"{cpu_build._build_key(version)}.so")


def test_dispatch_keeps_the_contract(cpp):
    kernels: Kernels = dispatch.kernels_for("cpu")
    assert kernels.name == "cpp" and dispatch.why_not_cpp() is None
    assert dispatch.kernels_for("cpu", prefer="torch").name == "torch"
    assert dispatch.kernels_for("cuda").activation_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="run on a CPU"):
        dispatch.kernels_for("cuda", prefer="cpp")
