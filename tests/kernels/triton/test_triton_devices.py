"""What a machine with GPUs would see: on which device a kernel starts, what is captured, what is read when it fails."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from membound.kernels.bench.benchmark import Failed  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton import launch as launching  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.runtime import cuda_graphs, decode_roof  # noqa: E402
from membound.runtime.calibration.linears import MOST_SAMPLES, SAMPLES, LinearGrid, LinearProbe  # noqa: E402
from membound.runtime.calibration.pool import Pool  # noqa: E402
from membound.runtime.cuda_graphs import CudaCapture  # noqa: E402
from membound.runtime.nvml import Nvml  # noqa: E402


class OnSecondGpu(torch.Tensor):
    """A tensor that says it lies on cuda:1."""

    @property
    def device(self):
        return torch.device("cuda", 1)


@pytest.mark.parametrize(("current", "started_on"), [(0, 1), (1, 1)])
def test_a_kernel_starts_on_the_device_of_its_arguments(monkeypatch, current, started_on):
    """Triton itself starts it on the current device, where it would read another GPU's addresses."""
    now = [current]

    @contextmanager
    def on(device):
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            return lambda *arguments, **options: started.append(now[0])

    started: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(launching, "_launched", {})
    launching.launch(Kernel(), (1,), 3, torch.empty(2).as_subclass(OnSecondGpu), config=Config({}))
    assert started == [started_on] and now == [current]


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA runtime that lists what it is asked for."""
    asked = SimpleNamespace(mode=0, captures=[], streams=0, broken=False, stream="before")

    class Stream:
        def __init__(self):
            asked.streams += 1

        def wait_stream(self, other):
            pass

    class Graph:
        def pool(self):
            return "pool"

        def replay(self):
            asked.captures.append("replayed")

    @contextmanager
    def graph(one, pool, capture_error_mode):
        asked.captures.append((pool, capture_error_mode))
        asked.stream = "of the capture"
        yield
        if asked.broken:  # torch goes back to the stream before behind the end of the capture, which raises
            raise RuntimeError("operation failed due to a previous error during capture")

    def set_mode(mode):
        asked.mode = mode

    def set_stream(stream):
        asked.stream = "before"

    fakes = dict(Stream=Stream, CUDAGraph=Graph, graph=graph, current_stream=Stream, set_stream=set_stream)
    fakes |= dict(get_sync_debug_mode=lambda: asked.mode, set_sync_debug_mode=set_mode)
    fakes |= dict.fromkeys(("device", "stream"), lambda _: nullcontext())
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return asked


def test_what_waits_for_the_gpu_is_found_before_a_capture_begins(gpu):
    """In the midst of one the allocator would wait for an end that never comes."""

    def waits():
        if gpu.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    capture = CudaCapture(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(waits)
    assert gpu.captures == [] and gpu.mode == 0


def test_what_follows_a_capture_that_fails_runs_where_it_would_have_run(gpu):
    gpu.broken = True
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture(torch.device("cuda"))(lambda: torch.zeros(1))
    assert gpu.stream == "before"


def test_graphs_share_a_pool_and_their_warm_ups_a_stream(gpu):
    """Each stream keeps what its warm-up took: with one for each graph that is the memory of all of them."""
    capture, calls = CudaCapture(torch.device("cuda")), []
    made = gpu.streams
    replays = [capture(lambda: calls.append(1) or torch.ones(2)) for _ in range(3)]
    assert gpu.captures == [(None, "thread_local"), ("pool", "thread_local"), ("pool", "thread_local")]
    assert len(calls) == 9 and gpu.streams - made == 6  # what `current_stream` returns here, twice a capture
    assert torch.equal(replays[1](), torch.ones(2)) and gpu.captures[-1] == "replayed"


def test_a_decoder_that_cannot_be_timed_is_a_row_of_the_table(monkeypatch):
    """Triton's errors are no RuntimeErrors, and whoever waited for the table would lose all of it."""

    class OutOfResources(Exception):
        pass

    def fails(*arguments, **options):
        raise OutOfResources("out of resource: shared memory")

    monkeypatch.setattr(decode_roof, "random_weights", fails)
    found = decode_roof.decode_roof(torch.device("cpu"), lambda runs: [1.0], layers=1)
    assert isinstance(found, Failed) and found.problem == "OutOfResources: out of resource: shared memory"


def test_a_gpu_without_a_name_for_the_driver_has_no_readings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="MI300X"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert Nvml.of("cuda") is None


def test_drafts_in_windows_share_their_captured_steps():
    """Windows over trees have a kernel, so that models with windows verify in graphs too."""
    decoder = SimpleNamespace(ignores_padding=True)
    assert cuda_graphs.captured_queries(decoder, [], 3) == (1, 4)
    assert cuda_graphs.captured_queries(SimpleNamespace(ignores_padding=False), [], 3) == (1,)


@pytest.mark.parametrize(("cache_bytes", "count"), [(0, SAMPLES), (2**20, 96), (2**26, MOST_SAMPLES)])
def test_weights_that_must_come_from_memory_exceed_the_cache_through_which_a_row_is_repeated(cache_bytes, count):
    """A weight of 128 x 128 in bf16 is 32 KiB: 32 of them, as on a CPU, would be read from an H200's 50 MB of L2."""
    rows = []

    class Watch:
        row_cache_bytes = cache_bytes

        def time_s(self, calls, prepare, budget_s, fewest):
            rows.append([call.keywords["weight"].data.data_ptr() for call in calls])
            return 1.0

    probe = LinearProbe(TorchKernels(), Watch(), Pool.of(2**24, "cpu"), LinearGrid(n=(128,), k=(128,), m=(1,)))
    probe.one_s("bf16", 128, 128, 1, cached=False)
    assert len(rows[0]) == len(set(rows[0])) == count
    probe.one_s("bf16", 128, 128, 1, cached=True)
    assert len(rows[1]) == SAMPLES


def test_a_gpu_with_less_shared_memory_than_a_configuration_needs_gets_fewer_stages(monkeypatch):
    """Such as one whose architecture no rule names; the second time it is known how many fit."""

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            def start(*arguments, num_stages, STAGES, **options):
                tried.append((num_stages, STAGES))
                if num_stages > 2:
                    raise OutOfResources(num_stages * 2**15, 99 * 2**10, "shared memory")

            return start

    tried: list[tuple[int, int]] = []
    monkeypatch.setattr(launching, "_launched", {})
    monkeypatch.setattr(launching, "_fitting", {})
    for _ in range(2):
        launching.launch(Kernel(), (1,), 3, config=Config({}, num_stages=4), STAGES=4)
    assert tried == [(4, 4), (3, 3), (2, 2), (2, 2)]
    launching.launch(Kernel(), (1,), 3, config=Config({}, num_stages=1), STAGES=1)
    assert tried[-1] == (1, 1)
