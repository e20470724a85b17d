"""How long does each kernel take, and what share of this device's own ceilings is that?

A row of calls is captured as one CUDA graph, so that the host's launches are not what is timed, and replayed between
two events; the median of many rows counts. Each call of a row has inputs of its own until all together exceed the L2
cache several times. Ceilings are measured in the same run: a copy of memory, and large matrix products.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

import torch
from torch import Tensor

from membound.kernels.bench.capture import warmed_up
from membound.kernels.bench.trial import Case, Inputs, Math, Run, Trial
from membound.kernels.bench.workers import answers, command_of
from membound.roofline.progress import Progress

ROWS = 30  # each a sample
FEWEST_ROWS = 3  # where there is no time for so many
FEWEST_CALLS = 8  # in a row
BEYOND_L2 = 3  # times the cache, that the inputs of a row should exceed
MOST_INPUTS = 32
COPY_BYTES = 2**30
MATMUL_SIZE = 8192

Timer = Callable[[Sequence[Run]], list[float]]  # seconds a call, one sample for each row of these calls


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a copy, read and write counted, and FLOP/s of a large product in each precision that works."""

    copy_bytes_per_s: float
    flop_per_s: Mapping[str, float]


@dataclass(frozen=True)
class Timed:
    """One case: the median and the spread (half the range of the middle half of the samples) of a call's seconds.

    `peers` has seconds, or why there are none. With `cached` its inputs fit into L2 however they are rotated.
    """

    kernel: str
    case: str
    seconds: float
    spread_s: float
    nbytes: int
    flops: int
    math: Math
    inputs: int
    cached: bool
    peers: Mapping[str, float | str]

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def flop_per_s(self) -> float:
        return self.flops / self.seconds

    def of_copy(self, ceilings: Ceilings) -> float:
        return self.bytes_per_s / ceilings.copy_bytes_per_s

    def of_matmul(self, ceilings: Ceilings) -> float | None:
        """None where no product in this precision was measured."""
        ceiling = ceilings.flop_per_s.get(self.math)
        return None if ceiling is None else self.flop_per_s / ceiling

    def of_roof(self, ceilings: Ceilings) -> float:
        """The share of the roof that bounds it: the larger of the two shares."""
        return max(self.of_copy(ceilings), self.of_matmul(ceilings) or 0.0)


@dataclass(frozen=True)
class Failed:
    """A case that could not be timed, and why."""

    kernel: str
    case: str
    problem: str


def cuda_timer(device: torch.device, budget_s: float = inf) -> Timer:
    """Times rows of calls on a GPU with events: ROWS of them, or fewer where they would take longer than `budget_s`."""

    def time_rows(runs: Sequence[Run]) -> list[float]:
        with torch.cuda.device(device):
            row = list(runs) * -(-FEWEST_CALLS // len(runs))
            play = _captured(runs, row)
            (first_s,) = _played_s(play, 1)
            return [seconds / len(row) for seconds in _played_s(play, rows_within(budget_s, first_s))]

    return time_rows


def rows_within(budget_s: float, row_s: float) -> int:
    """How many rows of so many seconds to time."""
    return max(FEWEST_ROWS, int(min(ROWS, budget_s / max(row_s, 1e-9))))


def _played_s(play: Callable[[], None], times: int) -> list[float]:
    """Seconds of each time, on the GPU."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for start, end in events:
        start.record()
        play()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _captured(runs: Sequence[Run], row: Sequence[Run]) -> Callable[[], None]:
    """Plays a row of `runs`, which are alike, as one graph."""
    warmed_up(lambda: [run() for run in runs], torch.cuda.Stream(), again=runs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in row]

    def play() -> None:
        graph.replay()
        assert kept  # results live as long as the graph that writes them

    return play


def ceilings(device: torch.device, timer: Timer) -> Ceilings:
    """Measured now: clocks and other users of the device are those of the kernels' measurements."""
    rates: dict[str, float] = {}
    for math, make in _PRODUCTS.items():
        try:
            rates[math] = 2 * MATMUL_SIZE**3 / median(timer([make(device)]))
        except (RuntimeError, NotImplementedError):
            continue  # not on this device; a case in this precision then has no share
    return Ceilings(2 * COPY_BYTES / median(timer([_copy(device)])), rates)


def _copy(device: torch.device) -> Run:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _square(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random numbers, since a GPU multiplies zeros with less power and higher clocks; the second is transposed."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    if dtype == torch.int8:
        a, b = (t * 32 for t in (a, b))
    return a.to(dtype), b.to(dtype).t()


def _bf16(device: torch.device) -> Run:
    a, b = _square(device, torch.bfloat16)
    return lambda: a @ b


def _int8(device: torch.device) -> Run:
    a, b = _square(device, torch.int8)
    return lambda: torch._int_mm(a, b)


def _fp8(device: torch.device) -> Run:
    a, b = _square(device, torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


_PRODUCTS: Mapping[Math, Callable[[torch.device], Run]] = {"bf16": _bf16, "int8": _int8, "fp8": _fp8}


def bench(
    cases: Sequence[Case],
    device: torch.device,
    seed: int,
    timer: Timer,
    l2_bytes: int,
    progress: Progress,
) -> Iterator[Timed | Failed]:
    """Every case in turn, and beside it the peers that are installed."""
    for done, case in enumerate(cases):
        progress(done / len(cases), f"{case.kernel}: {case.name}")
        try:
            yield _timed(case, Inputs(device, seed), timer, l2_bytes)
        except Exception as failure:  # whatever it is, it belongs into the table
            yield Failed(case.kernel, case.name, _first_line(failure))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def bench_apart(
    cases: Sequence[Case], numbers: Sequence[int], device: torch.device, seed: int
) -> Iterator[tuple[int, Timed | Failed]]:
    """Those `cases` of these numbers one after the other in a process, which is replaced where one ends it."""
    for answer in answers(command_of("bench", str(device), seed), numbers, workers=1):
        case, row = cases[answer.case], answer.row
        if row is None:
            yield answer.case, Failed(case.kernel, case.name, answer.problem or "it said nothing")
        else:
            yield answer.case, Failed(**row) if "problem" in row else Timed(**row)


def _timed(case: Case, inputs: Inputs, timer: Timer, l2_bytes: int) -> Timed:
    trials = [case.make(inputs)]
    first = trials[0]
    count = min(MOST_INPUTS, max(1, -(-BEYOND_L2 * l2_bytes // max(first.nbytes, 1))))
    trials += [case.make(inputs) for _ in range(count - 1)]
    samples = sorted(timer([trial.run for trial in trials]))
    middle = samples[len(samples) // 4 : -(-3 * len(samples) // 4)]
    return Timed(
        case.kernel,
        case.name,
        median(samples),
        (middle[-1] - middle[0]) / 2,
        first.nbytes,
        first.flops,
        first.math,
        count,
        count * first.nbytes < l2_bytes,
        {name: _peer_s(name, trials, timer) for name in first.peers},
    )


def _peer_s(name: str, trials: Sequence[Trial], timer: Timer) -> float | str:
    """Seconds of a call of a peer on the same inputs, or why there are none."""
    try:
        return median(timer([trial.peers[name]() for trial in trials]))
    except ImportError:
        return "not installed"
    except Exception as failure:  # a peer's trouble is not ours, and the table says what it was
        return _first_line(failure)


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
