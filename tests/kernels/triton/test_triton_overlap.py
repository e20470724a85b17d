"""Launches begin before those ahead of them have ended only where nothing can be read too early."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton import launch as launching  # noqa: E402
from membound.kernels.triton import overlapping as overlaps  # noqa: E402
from membound.kernels.triton.decode_attention import decode_attention  # noqa: E402
from membound.kernels.triton.kv_blocks import KvBlocks  # noqa: E402
from membound.kernels.triton.launch import Config, recording  # noqa: E402
from membound.kernels.triton.linear_half import linear_half  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402
from membound.kernels.triton.meta import META, floats, ints, of  # noqa: E402
from membound.kernels.triton.overlap import BULK_ALIGNMENT, ROW_BYTES_AHEAD, steps_ahead  # noqa: E402
from membound.kernels.triton.resources import reads_early  # noqa: E402
from membound.kernels.triton.rms_norm import rms_norm  # noqa: E402
from membound.kernels.triton.rope_store import rope_store  # noqa: E402
from membound.kernels.triton.silu_mul import silu_mul  # noqa: E402

WAIT = "griddepcontrol.wait; // dummy %r1\n"
ASK = "cp.async.bulk.prefetch.L2.global [%rd1], 512; // %r1\n"


@pytest.mark.parametrize(
    "access",
    [
        "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n",
        "ld.relaxed.gpu.global.b32 %r1, [%rd1];\n",
        "@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };\n",
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n",
        "atom.global.gpu.acq_rel.add.s32 %r1, [ %rd1 + 0 ], %r2;\n",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r1], [%rd1, {%r2, %r3}], [%r4];\n",
    ],
)
def test_what_touches_memory_before_it_waits_is_found(access):
    assert reads_early(access + WAIT) and reads_early(access) and reads_early("ld.param.b64 %rd1, [x];\n")
    assert not reads_early("ld.param.b64 %rd1, [x];\n" + ASK + WAIT + access)


def step_of_a_layer():
    """Llama-3.1-8B's, without the products that are the vendor's library's."""
    x, gain, table = of(1, 4096), floats(4096), floats(131072, 64)
    kv, place = KvBlocks.zeros("bf16", 512, 16, 8, 128, META), of(1, dtype=torch.int64)
    q = rope_store(linear_half(rms_norm(x, gain, 1e-5), of(6144, 4096)), table, table, place, place, kv)
    attended = decode_attention(q, kv, ints(1, 512), ints(1), 0.1).flatten(1)
    rms_norm(linear_half(attended, of(4096, 4096)), gain, 1e-5, residual=x)
    linear_half(silu_mul(of(1, 28672)), of(4096, 14336))


@pytest.mark.parametrize(("arch", "overlap"), [("sm80", False), ("sm90", True), ("sm100", True), ("sm120", False),
                                              ("gfx942", False)])  # fmt: skip
def test_every_launch_of_a_step_overlaps_where_the_gpu_can(arch, overlap):
    with recording(REFERENCE_MACHINES[arch]) as record:
        step_of_a_layer()
    assert Counter(one.constants["OVERLAP"] for one in record.launches) == {overlap: 8}
    assert all(one.constants["AHEAD"] > 0 for one in record.launches if one.name == "linear_half_kernel")
    with recording(REFERENCE_MACHINES[arch]) as record, overlaps.apart():
        step_of_a_layer()
    assert not any(one.constants["OVERLAP"] for one in record.launches)


class OnGpu(torch.Tensor):
    """A tensor that says it lies on cuda:0."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize(("arch", "works", "options"), [("sm90", True, {"launch_pdl": True}), ("sm90", False, {}),
                                                       ("sm80", True, {}), ("gfx942", True, {})])  # fmt: skip
def test_only_a_gpu_on_which_it_works_is_told_to_overlap(monkeypatch, arch, works, options):
    """Triton's back ends refuse options that they do not know."""
    started = []

    class Kernel:
        __name__ = "kernel"
        arg_names = ("x", "OVERLAP")

        def __getitem__(self, grid):
            return lambda *arguments, **named: started.append(named)

    monkeypatch.setattr(launching, "_launched", {})
    monkeypatch.setattr(launching, "machine_of", lambda device: REFERENCE_MACHINES[arch])
    monkeypatch.setattr(overlaps, "works", lambda device: works)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launching.launch(Kernel(), (1,), torch.empty(2).as_subclass(OnGpu), config=Config({}))
    assert started == [{"OVERLAP": bool(options), "num_warps": 4, "num_stages": 2, **options}]


def test_a_gpu_is_tried_once_and_never_within_a_capture(monkeypatch):
    tried, capturing = [], [True]

    def fails(device):
        tried.append(device)
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(overlaps, "_found", {})
    monkeypatch.setattr(overlaps, "_tried", fails)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "device", lambda index: overlaps.apart())
    gpu = torch.device("cuda", 1)
    assert not overlaps.works(gpu) and not tried
    capturing[0] = False
    assert not overlaps.works(gpu) and not overlaps.works(gpu) and tried == [gpu]
    monkeypatch.setattr(overlaps, "_tried", lambda device: True)
    assert overlaps.works(torch.device("cuda", 0)) and not overlaps.works(gpu)


@given(
    first=st.integers(0, 40),
    rows=st.integers(1, 4),
    k=st.integers(1, 600),
    step=st.sampled_from([16, 64, 128]),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16]),
)
def test_what_is_asked_for_lies_within_its_row(first, rows, k, step, dtype):
    memory = torch.empty(first + rows * k, dtype=dtype)
    weight = memory[first:].view(rows, k)
    ahead = steps_ahead(weight, step * weight.itemsize, k * weight.itemsize)
    if ahead:
        assert ROW_BYTES_AHEAD <= ahead * step * weight.itemsize < ROW_BYTES_AHEAD + step * weight.itemsize
        assert k % step == 0, "the last step of a row ends with it"
        assert all((first + row * k) * weight.itemsize % BULK_ALIGNMENT == 0 for row in range(rows))
    else:
        assert k % step or first * weight.itemsize % BULK_ALIGNMENT
