"""The commands about the GPU's kernels: are they right, how fast are they, what do they take of a multiprocessor?"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from membound.app import text
from membound.app.commands.terminal import JsonOption, measuring, print_result, progress
from membound.roofline.errors import MemboundError
from membound.roofline.home import home_folder

if TYPE_CHECKING:
    from rich.table import Table

    from membound.kernels.bench.benchmark import Ceilings, Failed, Timed
    from membound.kernels.bench.check import Checked
    from membound.kernels.bench.trial import Case

    Row = TypeVar("Row", Checked, Timed | Failed)

_Documented = tuple[dict[str, Any], list[dict[str, str]]]  # a document, and its rows as a table

app = typer.Typer(
    name="kernels", help="Check and time the GPU's kernels, and read what they take.", no_args_is_help=True
)

KernelOption = Annotated[
    list[str] | None, typer.Option("--kernel", metavar="NAME", help="only this kernel; may be given again")
]
SeedOption = Annotated[int | None, typer.Option(min=0, max=2**62, help="of the random inputs; another each time")]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="for the JSON and Markdown; data/measurements or the home folder if not given"),
]

INTERPRETER = "Triton's interpreter"
ELSEWHERE = "sm90"  # compiled for where there is no GPU, or one that nothing is known of


@app.command()
def check(
    interpret: Annotated[
        bool, typer.Option("--interpret", help="small sizes on the CPU, by Triton's interpreter; no GPU is needed")
    ] = False,
    kernel: KernelOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every kernel against its fp32 reference, on fresh random inputs; exit code 1 if one is off."""
    if interpret:
        _interpret()
    device = _device(interpreted=interpret)
    from membound.kernels.bench import check as checking

    numbers = [n for n in _chosen(checking.CASES, kernel) if checking.CASES[n].small or not interpret]
    seed = time.time_ns() % 2**31 if seed is None else seed
    name = INTERPRETER if interpret else _gpu_name(device)
    conditions = {**_conditions(device, name), "seed": seed}
    report = _Report(f"kernels-check-{'interpreter' if interpret else name}", out, kept=not interpret)

    def documented(found: Sequence[Checked]) -> _Documented:
        counts = {"cases": len(found), "wrong": sum(not row.right for row in found)}
        left = len(numbers) - len(found)
        document = {
            "title": f"Kernels checked on {name}",
            "conditions": {**conditions, **counts, **({"not yet checked": left} if left else {})},
            "rows": [{**asdict(row), "right": row.right} for row in found],
        }
        return document, [_checked_row(row) for row in found]

    with progress() as listener:
        if interpret:
            found = checking.check([checking.CASES[n] for n in numbers], device, seed, listener.progress)
        else:
            done = checking.check_apart(numbers, device, seed, _workers(device))
            found = _gathered(done, numbers, listener.progress, lambda rows: report.keep(*documented(rows)))
    report.finish(*documented(found), as_json)
    if any(not row.right for row in found):
        raise typer.Exit(1)


@app.command()
def bench(
    kernel: KernelOption = None, seed: SeedOption = None, out: OutOption = None, as_json: JsonOption = False
) -> None:
    """Every kernel timed on a GPU: its share of the bandwidth and matmul ceilings, beside what else is installed."""
    device = _device(interpreted=False)
    import torch

    from membound.kernels.bench import benchmark
    from membound.kernels.bench.check import CASES
    from membound.runtime.decode_roof import decode_roof

    numbers = [n for n in _chosen(CASES, kernel) if not CASES[n].small]
    name, before = _gpu_name(device), _conditions(device, _gpu_name(device))
    seed = time.time_ns() % 2**31 if seed is None else seed
    timer, report = benchmark.cuda_timer(device), _Report(f"kernels-bench-{name}", out)
    with measuring("membound kernels bench") as listener:
        listener.progress(0.0, "ceilings: copies and matrix products")
        ceilings = benchmark.ceilings(device, timer)

        def documented(rows: Sequence[Timed | Failed]) -> _Documented:
            conditions = {
                **before,
                "state after": _state(device),
                "copy": text.bandwidth(ceilings.copy_bytes_per_s),
                "matmul": {math: text.flop_rate(rate) for math, rate in ceilings.flop_per_s.items()},
                "seed": seed,
            }
            document = {
                "title": f"Kernels timed on {name}",
                "conditions": conditions,
                "ceilings": {"copy_bytes_per_s": ceilings.copy_bytes_per_s, "flop_per_s": dict(ceilings.flop_per_s)},
                "rows": [_timed_json(row, ceilings) for row in rows],
            }
            return document, [_timed_row(row, ceilings) for row in rows]

        torch.cuda.empty_cache()
        done = benchmark.bench_apart(CASES, numbers, device, seed)
        rows = _gathered(done, numbers, listener.progress, lambda rows: report.keep(*documented(rows)))
        if not kernel:
            listener.progress(1.0, "decode of Llama-3.1-8B")
            rows.append(decode_roof(device, timer))
    report.finish(*documented(rows), as_json)


@app.command()
def resources(
    arch: Annotated[
        str | None,
        typer.Option(help="such as sm90, which it is where there is no GPU; else this GPU's"),
    ] = None,
    kernel: KernelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Registers, spills and shared memory of every kernel, compiled ahead of time."""
    from membound.app.machine import need_torch

    need_torch()
    _need_triton()
    from membound.kernels.bench.resources import compile_all
    from membound.kernels.triton.production import CASES
    from membound.kernels.triton.resources import TARGETS

    arch = arch or _own_arch(set(TARGETS))
    if arch not in TARGETS:
        raise MemboundError(f"option --arch is '{arch}'; give one of {', '.join(TARGETS)}")
    names = {case.split()[0] for case in CASES}
    _known(kernel, names)
    cases = [case for case in CASES if not kernel or case.split()[0] in kernel]
    with progress() as listener:
        found = compile_all(arch, cases, listener.progress)
    failed = [row for row in found if "problem" in row]
    document = {
        "title": f"Kernels compiled for {arch}",
        "conditions": {
            "created": _now(),
            "versions": _versions(),
            "spilling": sum(row.get("spilled_bytes", 0) > 0 for row in found),
            "not compiled": len(failed),
        },
        "rows": found,
    }
    _Report(f"kernels-resources-{arch}", out).finish(document, [_resources_row(row) for row in found], as_json)
    if failed:
        raise typer.Exit(1)


def _interpret() -> None:
    """Switches Triton's interpreter on, which is possible only before Triton is imported."""
    if "triton" in sys.modules:
        if not sys.modules["triton"].knobs.runtime.interpret:
            raise MemboundError("option --interpret comes too late: Triton is imported already in this process")
        return
    os.environ["TRITON_INTERPRET"] = "1"


def _need_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MemboundError(f"Triton cannot be imported ({error}); `make test` installs it") from None


def _device(*, interpreted: bool) -> Any:
    """The device to run on; raises MemboundError with what to do where there is none."""
    from membound.app.machine import need_torch

    need_torch()
    import torch

    from membound.kernels.dispatch import missing_for_triton

    if interpreted:
        _need_triton()
        return torch.device("cpu")
    if problem := missing_for_triton("cuda"):
        raise MemboundError(f"{problem}; `membound kernels check --interpret` checks the kernels without a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _own_arch(known: set[str]) -> str:
    import torch

    from membound.kernels.triton.machine import machine_of

    own = machine_of(torch.device("cuda")).arch if torch.cuda.is_available() else ELSEWHERE
    return own if own in known else ELSEWHERE


def need_gpu() -> None:
    """Raises MemboundError where torch finds no GPU; one that Triton cannot compile for runs plain PyTorch."""
    import torch

    if not torch.cuda.is_available():
        raise MemboundError(f"option --device is 'cuda', but torch {torch.__version__} finds no GPU; give cpu")


def _chosen(cases: Sequence[Case], kernels: list[str] | None) -> list[int]:
    """Their numbers."""
    _known(kernels, {case.kernel for case in cases})
    return [number for number, case in enumerate(cases) if not kernels or case.kernel in kernels]


def _workers(device: Any) -> int:
    import torch

    from membound.kernels.bench.workers import workers_for

    return workers_for(os.cpu_count() or 1, torch.cuda.mem_get_info(device)[0])


def _gathered(
    done: Iterator[tuple[int, Row]],
    numbers: Sequence[int],
    show: Callable[[float, str], None],
    keep: Callable[[list[Row]], object],
) -> list[Row]:
    """The rows of all `numbers` in their order; those that are there are kept whenever one more is done."""
    rows: dict[int, Row] = {}
    try:
        for number, row in done:
            rows[number] = row
            show(len(rows) / len(numbers), f"{row.kernel}: {row.case}")
            keep([rows[n] for n in numbers if n in rows])
    except RuntimeError as error:
        raise MemboundError(str(error)) from None
    return [rows[n] for n in numbers if n in rows]


def _known(kernels: list[str] | None, names: set[str]) -> None:
    for name in kernels or []:
        if name not in names:
            raise MemboundError(f"option --kernel is '{name}'; give one of {', '.join(sorted(names))}")


def _conditions(device: Any, name: str) -> dict[str, Any]:
    return {"device": name, "created": _now(), "versions": _versions(), "state": _state(device)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _gpu_name(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def _state(device: Any) -> str:
    """Clocks and power of a GPU, the load of a CPU."""
    from membound.runtime.nvml import Nvml

    if device.type == "cuda":
        nvml = Nvml.of(device)
        return nvml.read().describe() if nvml else "no NVML"
    return f"load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown load"


@dataclass(frozen=True)
class _Report:
    """Where a command's document and table go: two files where they are asked for or kept, and the terminal last."""

    name: str
    out: Path | None
    kept: bool = True

    def keep(self, document: dict[str, Any], rows: list[dict[str, str]]) -> list[Path]:
        from membound.kernels.bench import record

        if self.out is None and not self.kept:
            return []
        return record.write(self.out or _measurements(), record.slug(self.name), document, rows)

    def finish(self, document: dict[str, Any], rows: list[dict[str, str]], as_json: bool) -> None:
        from membound.kernels.bench import record

        for path in self.keep(document, rows):
            typer.echo(f"written to {path}", err=True)
        print_result(record.finite(document), as_json, lambda found: _table(found, rows))


def _measurements() -> Path:
    """data/measurements of a checkout, else a folder of the user's."""
    import membound.data

    data = Path(next(iter(membound.data.__path__)))
    return data / "measurements" if (data.parent / ".git").exists() else home_folder() / "measurements"


def _table(document: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Table:
    from rich.table import Table

    from membound.kernels.bench import record

    conditions = document["conditions"]
    table = Table(title=document["title"], caption=record.words(conditions))
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _checked_row(row: Checked) -> dict[str, str]:
    verdict = "right" if row.right else f"WRONG{f': {row.problem}' if row.problem else ''}"
    return {
        "kernel": row.kernel,
        "case": row.case,
        "largest error": f"{row.error:.1e}",
        "of tolerance": text.percent(row.of_tolerance) if row.problem is None and row.of_tolerance < 1e6 else "-",
        "verdict": verdict,
    }


def _resources_row(row: Mapping[str, Any]) -> dict[str, str]:
    columns = ("case", "kernel", "registers", "spilled_bytes", "shared_bytes", "threads", "resident")
    shown = {column.replace("_", " "): str(row.get(column, "-")) for column in columns}
    in_flight = row.get("in_flight_bytes")
    shown["in flight, KiB"] = "-" if in_flight is None else f"{in_flight / 1024:.0f}"
    return shown | ({"kernel": row["problem"]} if "problem" in row else {})


def _timed_json(row: Timed | Failed, ceilings: Ceilings) -> dict[str, Any]:
    from membound.kernels.bench.benchmark import Failed

    if isinstance(row, Failed):
        return asdict(row)
    rates = {"bytes_per_s": row.bytes_per_s, "flop_per_s": row.flop_per_s}
    shares = {"of_copy": row.of_copy(ceilings), "of_matmul": row.of_matmul(ceilings), "of_roof": row.of_roof(ceilings)}
    return {**asdict(row), **rates, **shares}


def _timed_row(row: Timed | Failed, ceilings: Ceilings) -> dict[str, str]:
    from membound.kernels.bench.benchmark import Failed

    columns = ("time", "±", "GB/s", "of copy", "TFLOP/s", "of matmul", "beside it")
    if isinstance(row, Failed):
        return {"kernel": row.kernel, "case": row.case, **dict.fromkeys(columns, "-"), "beside it": row.problem}
    of_matmul = row.of_matmul(ceilings)
    beside = [f"{name} {text.seconds(s) if isinstance(s, float) else s}" for name, s in row.peers.items()]
    values = (
        text.seconds(row.seconds),
        text.percent(row.spread_s / row.seconds),
        text.digits(row.bytes_per_s / 1e9),
        "in L2" if row.cached else text.percent(row.of_copy(ceilings)),
        text.digits(row.flop_per_s / 1e12) if row.flops else "-",
        text.percent(of_matmul) if of_matmul is not None and row.flops else "-",
        "; ".join(beside),
    )
    return {"kernel": row.kernel, "case": row.case, **dict(zip(columns, values, strict=True))}
