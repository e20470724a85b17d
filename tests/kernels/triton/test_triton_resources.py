"""Do the kernels compile for GPUs that are not here, and fit into them without spilling registers?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from membound.kernels.triton import launch as launching
from membound.kernels.triton import production_linear
from membound.kernels.triton.decode_attention import decode_attention
from membound.kernels.triton.kv_blocks import KvBlocks
from membound.kernels.triton.launch import Config, configure, splits_for
from membound.kernels.triton.machine import REFERENCE_MACHINES, Machine
from membound.kernels.triton.meta import META, ints, of
from membound.kernels.triton.production import CASES, launches
from membound.kernels.triton.resources import KIB, MULTIPROCESSORS
from membound.roofline.hardware import get_hardware

# A program's shared memory and registers at most; of gfx942 the 64 KiB of LDS in AMD's CDNA 3 instruction set manual,
# from memory.
SHARED_BYTES = {"gfx942": 64 * KIB} | {arch: one.program_bytes for arch, one in MULTIPROCESSORS.items()}
REGISTERS = {"gfx942": 131072} | {arch: one.registers for arch, one in MULTIPROCESSORS.items()}
# From a load to its arrival where memory is busy, of Hopper: about twice what it is where nothing else is read. NVIDIA
# advises 32 KiB and more under way on each multiprocessor of an H100 (both from memory).
LATENCY_S = 1.1e-6
PAGED = ("decode_attention_kernel", "verify_attention_kernel", "prefill_attention_kernel", "mla_decode_kernel")
# What takes most shared memory, which sm89 has less than half as much of as sm90.
LARGE_TILES = [
    "decode_attention bf16",
    "prefill_attention bf16",
    "mla_decode 128 heads",
    "mla_prefill",
    "linear_int4 m 64",
    "linear_fp8_blocks of halves m 64",
    "moe_linear int4 8192 tokens",
]
STREAMING = ("attention", "linear", "mla")  # the kernels whose time is reading weights or the cache


def usual_cases() -> list[str]:
    """The first case of each kernel."""
    return list({case.split()[0]: case for case in reversed(CASES)}.values())


def output_of(*arguments: str) -> list[dict]:
    # Its own process, since a kernel that was defined for the interpreter cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def resources(arch: str, cases: list[str]) -> list[dict]:
    return output_of("-m", "membound.kernels.triton.resources", arch, *cases)


def bound_by_memory(row: dict) -> bool:
    """Weights for few tokens, and caches; not prompts, whose products take longer than what they read."""
    products = any(word in row["case"] for word in ("prefill", " m 512", " m 4096", "8192 tokens"))
    return any(word in row["kernel"] for word in STREAMING) and not products


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "gfx942"])
def test_every_kernel_compiles_fits_and_spills_nothing(arch):
    cases = {"sm90": list(CASES), "sm89": LARGE_TILES}.get(arch) or usual_cases()
    compiled = resources(arch, cases)
    assert {row["case"] for row in compiled} == set(cases)
    for row in compiled:
        assert row["spilled_bytes"] == 0, row
        assert row["registers"] * row["threads"] <= REGISTERS[arch], row
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        if arch != "gfx942" and any(word in row["kernel"] for word in STREAMING):
            # Scales of 32 weights cut a thread's row of codes in halves.
            assert row["widest_load_bytes"] >= (8 if "groups of 32" in row["case"] else 16), row
            assert row["waiting_loads"] == 0, row
        if arch != "gfx942" and row["kernel"] in PAGED and row["case"] != "prefill_attention bf16":  # bound by products
            # Behind a load of the block table Triton has half as many buffers as stages: three stages have one.
            assert row["buffers"] >= 2, row
        if arch == "sm90" and bound_by_memory(row):  # Little's law, at an H200's bandwidth
            needed = (
                LATENCY_S * get_hardware("H200-SXM").bandwidth_bytes_per_s / REFERENCE_MACHINES[arch].multiprocessors
            )
            assert row["in_flight_bytes"] >= needed, row


PROMOTIONS = """
import json, re, sys
from triton.compiler import compile
from membound.kernels.triton.machine import REFERENCE_MACHINES
from membound.kernels.triton.production import launches
from membound.kernels.triton.resources import TARGETS, _source

launch = launches(sys.argv[1], REFERENCE_MACHINES["sm90"])[0]
options = dict(num_warps=launch.config.num_warps, num_stages=launch.config.num_stages)
ptx = compile(_source(launch), target=TARGETS["sm90"], options=options).asm["ptx"]
(loop,) = [block for block in ptx.split("$L__BB") if "wgmma.mma_async" in block]
products = len(re.findall("wgmma.mma_async", loop))
print(json.dumps({"products": products, "sums": len(re.findall(r"add[.\\w]*[.]f32 ", loop)), **launch.config.tiles,
                  "threads": 32 * launch.config.num_warps}))
"""


@pytest.mark.parametrize("case", ["linear_w8a8 fp8 m 64", "linear_w8a8 fp8 m 4096"])
def test_hopper_adds_its_sums_of_at_most_128_products_of_fp8_in_fp32(case):
    """A sum for each accumulator of a thread, once in each step of BLOCK_K; an instruction multiplies 32 columns."""
    (found,) = output_of("-c", PROMOTIONS, case)
    accumulators = found["BLOCK_N"] * found["BLOCK_M"] // found["threads"]
    assert found["products"] == found["BLOCK_K"] // 32 and found["BLOCK_K"] <= 128
    assert found["sums"] == accumulators


@pytest.mark.parametrize("case", CASES)
def test_a_launch_needs_no_data_and_one_that_streams_keeps_every_multiprocessor_busy(case):
    """Tensors of device 'meta' have none: whatever waits for the GPU, such as a length, fails with them."""
    for machine in REFERENCE_MACHINES.values():
        for launch in launches(case, machine):
            if any(word in launch.name for word in STREAMING) and not case.endswith((" m 64", " m 512")):
                # A few may be idle: where 128 programs have 148 places, two parts of each would take two rounds.
                assert math.prod(launch.grid) >= 0.85 * machine.multiprocessors, launch


def test_how_a_product_is_split_compiles_no_variant_of_its_kernel():
    seen, splits = set(), set()
    for m in range(1, 600):
        with launching.recording(REFERENCE_MACHINES["sm90"]) as record:
            production_linear._linear_int4(m, zero=False)
        splits.add(record.launches[0].grid[2])
        seen |= {(one.name, tuple(one.constants.items()), one.config.num_warps) for one in record.launches}
    assert len(splits) > 3
    assert len([name for name, *_ in seen if name == "linear_int4_kernel"]) == 3  # a rule each in launch.json
    assert len(record.launches) == 1


def general_arguments(kernel):
    """The arguments for whose values a kernel is not compiled anew."""
    if isinstance(kernel, InterpretedFunction):
        return set(kernel.kwargs.get("do_not_specialize") or ())
    return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}


@pytest.mark.parametrize(("kv_heads", "ways"), [(8, 2), (1, 3)])
def test_how_a_context_is_split_compiles_no_variant_of_attention(kv_heads, ways):
    """Batches of every size, whose tables are as wide as their longest context, in each of the ways to combine parts:
    there are none, or few rows, which the kernel combines itself, or more, where many heads share one of K and V."""
    seen, splits = set(), set()
    for sequences in (1, 2, 3, 5, 16, 33, 100):
        for blocks in (1, 7, 64, 333, 2048):
            with launching.recording(REFERENCE_MACHINES["sm90"]) as record:
                kv = KvBlocks.zeros("bf16", 8192, 16, kv_heads, 128, META)
                table, lengths = ints(sequences, blocks), ints(sequences)
                decode_attention(of(sequences, 32, 128), kv, table, lengths, 1.0)
            splits.add(record.launches[0].grid[2])
            for one in record.launches:
                free = general_arguments(one.kernel)
                specialized = [
                    (name, value == 1, value % 16 == 0)
                    for name, value in zip(one.kernel.arg_names, one.arguments, strict=False)
                    if type(value) is int and name not in free
                ]
                without = one.arguments[2] is None, one.arguments[4] is None
                seen.add((one.name, tuple(one.constants.items()), tuple(specialized), without))
    assert len(splits) > 6
    assert len([name for name, *_ in seen if name == "decode_attention_kernel"]) == ways
    assert len([name for name, *_ in seen if name == "combine_kernel"]) == ways - 2


@given(
    programs=st.integers(1, 5000),
    longest=st.integers(1, 200_000),
    shortest=st.sampled_from([4, 256]),
    waves=st.integers(1, 4),
)
def test_a_last_round_of_few_programs_costs_little(programs, longest, shortest, waves):
    """The rounds of programs times the longest part: never more than without splitting, and near what is possible."""
    machine = REFERENCE_MACHINES["sm90"]
    places = waves * machine.multiprocessors
    splits = splits_for(programs, longest, shortest, machine, waves)
    assert 1 <= splits <= max(1, min(64, -(-longest // shortest)))

    def time(count):
        return -(-programs * count // places) * -(-longest // count)

    assert time(splits) <= time(1)
    if programs <= places // 2 and longest >= 64 * shortest:
        whole = places // programs  # as many as all run in one round
        assert time(splits) <= 1.05 * time(min(64, whole))


class CompiledKernel:
    """What Triton's kernels are to `launch`: compiled anew for each number of rows."""

    __name__ = "rows"

    def __init__(self):
        self.device_caches = {0: ({}, None)}

    def __getitem__(self, grid):
        return lambda rows, **options: self.device_caches[0][0].setdefault(rows)


def test_what_was_compiled_by_launches_is_counted(monkeypatch):
    monkeypatch.setattr(launching, "_launched", {})
    kernel = CompiledKernel()
    counts = []
    for rows in (1, 16, 16, 1):
        launching.launch(kernel, (1,), rows, config=Config({}))
        counts.append(launching.compiled())
    assert counts == [1, 2, 2, 2]


def test_a_machine_that_no_rule_names_gets_the_general_one():
    shape = dict(head_dim=128, group=4, kv_bits=16)
    config = configure("decode_attention", Machine("sm121", 20), **shape)
    assert config == configure("decode_attention", REFERENCE_MACHINES["sm90"], **shape)
    with pytest.raises(KeyError, match="no_such_kernel"):
        configure("no_such_kernel", REFERENCE_MACHINES["sm90"])
