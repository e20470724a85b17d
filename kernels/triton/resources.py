"""What does a launch take of a multiprocessor: registers, spills, shared memory? No GPU is needed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from membound.kernels.triton.launch import Config, Launch
from membound.kernels.triton.machine import INTERPRETED, REFERENCE_MACHINES
from membound.kernels.triton.production import CASES, launches

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


KIB = 1024  # the system takes as much shared memory for each program


@dataclass(frozen=True)
class Multiprocessor:
    """What its programs share, and the shared memory that one may have at most."""

    shared_bytes: int
    program_bytes: int
    threads: int
    registers: int = 65536

    def resident(self, registers: int, shared_bytes: int, threads: int) -> int:
        """How many programs of so many registers a thread are there at once: warps get 256 registers at a time."""
        warps = threads // 32
        by_registers = self.registers // (-(-registers * 32 // 256) * 256 * warps)
        return min(by_registers, self.shared_bytes // (shared_bytes + KIB), self.threads // threads, 32)


# Compute capabilities: the CUDA programming guide's table. From memory.
MULTIPROCESSORS = {
    "sm80": Multiprocessor(164 * KIB, 163 * KIB, 2048),
    "sm89": Multiprocessor(100 * KIB, 99 * KIB, 1536),
    "sm90": Multiprocessor(228 * KIB, 227 * KIB, 2048),
    "sm100": Multiprocessor(228 * KIB, 227 * KIB, 2048),
    "sm120": Multiprocessor(100 * KIB, 99 * KIB, 1536),
}


@dataclass(frozen=True)
class Resources:
    """Of one thread: `registers` and `spilled_bytes`; of one program: `shared_bytes` and `threads`.

    `widest_load_bytes` is what one thread reads from global memory by its widest instruction, `waiting_loads` are the
    loads inside of loops of products that are not asynchronous copies, whose latency each turn pays. `buffers` are the
    tiles that the shallowest of these copies has in shared memory: with one, none is under way while it is multiplied
    (None where nothing is pipelined). `in_flight_bytes` are under way to a multiprocessor for the programs of this
    launch that it runs at once, `resident` of them at most, in the loop that has least: each waits for or refills one
    of its buffers, so that counts half; tiles of inputs, which come from the cache, do not count (None where nothing is
    pipelined; all five None on AMD).
    """

    kernel: str
    arch: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int
    widest_load_bytes: int | None
    waiting_loads: int | None
    buffers: int | None
    resident: int | None
    in_flight_bytes: float | None


def resources_of(launch: Launch, arch: str) -> Resources:
    """Compiles a recorded launch as the JIT would, with its alignments, and reads what it takes."""
    target = TARGETS[arch]
    options = dict(num_warps=launch.config.num_warps, num_stages=launch.config.num_stages)
    compiled = triton_compile(_source(launch), target=target, options=options)
    shared, threads = compiled.metadata.shared, launch.config.num_warps * target.warp_size
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (_number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count"))
        return Resources(launch.name, arch, registers, 4 * spills, shared, threads, None, None, None, None, None)
    if re.search(r"^\s*trap;", compiled.asm["ptx"], re.MULTILINE):
        # What Triton makes, without a word, of a kernel whose accumulators exceed Blackwell's tensor memory.
        raise RuntimeError(f"{launch.name} with {launch.config} compiles to a trap for {arch}")
    if launch.constants.get("OVERLAP") and reads_early(compiled.asm["ptx"]):
        raise RuntimeError(f"{launch.name} touches memory for {arch} before the launch before it has ended")
    registers, spilled = _usage(compiled.asm["cubin"], compiled.asm["ptx"])
    widest, waiting = _widest_load(compiled.asm["ptx"]), _waiting_loads(compiled.asm["ttgir"])
    loops = _tiles(compiled.asm["ttgir"])
    buffers = min((tile.buffers for tiles in loops for tile in tiles if tile.columns > 1), default=None)
    resident = MULTIPROCESSORS[arch].resident(registers, shared, threads)
    programs = math.prod(launch.grid) / REFERENCE_MACHINES[arch].multiprocessors
    ahead = min((_ahead_bytes(tiles, launch.config) for tiles in loops), default=None)
    in_flight = None if ahead is None else min(resident, programs) * ahead
    usage = registers, spilled, shared, threads
    return Resources(launch.name, arch, *usage, widest, waiting, buffers, resident, in_flight)


def _source(launch: Launch) -> ASTSource:
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    signature: dict[str, str] = {}
    constants = {(launch.kernel.arg_names.index(name),): value for name, value in launch.constants.items()}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[index] if index < len(launch.arguments) else None
        general = launch.kernel.params[index].do_not_specialize
        if index >= len(launch.arguments) or value is None or (type(value) is int and value == 1 and not general):
            signature[name] = "constexpr"
            constants.setdefault((index,), value)
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not general:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _usage(cubin: bytes, ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, by the tools that are in Triton's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        binary, source = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        text = _output(triton.knobs.nvidia.cuobjdump, "-res-usage", str(binary))
        registers, stack = _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)
        if stack == 0:
            return registers, 0
        # A stack may hold other things than spilled registers: the assembler, which takes longer, says what.
        source.write_text(ptx)
        gpu = re.search(r"\.target (sm_(\d+)\w*)", ptx)
        assert gpu is not None
        assembler = triton.knobs.nvidia.ptxas_blackwell if int(gpu[2]) >= 100 else triton.knobs.nvidia.ptxas
        text = _output(assembler, "-v", f"--gpu-name={gpu[1]}", str(source), "-o", str(binary))
        return registers, _number(r"(\d+) bytes spill stores", text)


def _output(tool: Any, *arguments: str) -> str:
    done = subprocess.run([tool.path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _widest_load(ptx: str) -> int:
    """Bytes of a thread's widest load or asynchronous copy from global memory; a bulk (TMA) copy counts as 16."""
    widest = 16 if "cp.async.bulk" in ptx else 0
    for count in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (?:0x)?(\w+)", ptx):
        widest = max(widest, int(count, 16))
    for vector, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+) ", ptx):
        widest = max(widest, int(vector or 1) * int(bits) // 8)
    return widest


def reads_early(ptx: str) -> bool:
    """Whether PTX reads or writes global memory before it waits for the launch before, or never waits.

    What a bulk prefetch asks for arrives in the cache only, and stays true to what is written there.
    """
    access = r"\b(?:(?:ld|st|atom|red)[\w.:]*\.global|cp\.async\.c[ag]\b|cp\.async\.bulk\.(?!prefetch))"
    first, wait = re.search(access, ptx), re.search(r"\bgriddepcontrol\.wait\b", ptx)
    return wait is None or (first is not None and first.start() < wait.start())


def _waiting_loads(ttgir: str) -> int:
    """Loads between `scf.for` and the `scf.yield` of the same indentation, where something is multiplied there."""
    waiting, of_loop, multiplies, inside = 0, 0, False, None
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        if inside is None and re.search(r"\bscf\.for\b", line):
            inside, of_loop, multiplies = indentation, 0, False
        elif inside is not None and indentation <= inside:
            waiting += of_loop if multiplies else 0
            inside = None
        elif inside is not None:
            of_loop += bool(re.search(r"= tt\.load ", line))
            multiplies |= bool(re.search(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b", line))
    return waiting


@dataclass(frozen=True)
class _Tile:
    """Where asynchronous copies go: so many buffers of rows of columns."""

    buffers: int
    rows: int
    columns: int
    itemsize: int


def _tiles(ttgir: str) -> list[list[_Tile]]:
    """Of each loop that is pipelined; a tile without a second dimension, such as scales, has one column."""
    loops: list[list[_Tile]] = [[]]
    allocated = r"= ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(?:(\d+)x)?[a-z]+(\d+)|\bscf\.for\b"
    for found in re.finditer(allocated, ttgir):
        if found[1] is None:
            loops.append([])
        else:
            buffers, rows, columns, bits = (int(number or 1) for number in found.groups())
            loops[-1].append(_Tile(buffers, rows, columns, bits // 8))
    return [tiles for tiles in loops if tiles]


def _ahead_bytes(tiles: Sequence[_Tile], config: Config) -> float:
    """A program's: of tiles that may be of weights or of inputs, being as many rows, half."""
    rows = config.tiles.get("BLOCK_M")
    of_inputs = 0.5 if rows == config.tiles.get("BLOCK_N") else 1.0 if "BLOCK_N" in config.tiles else 0.0
    return sum(
        (tile.buffers - 0.5) * tile.rows * tile.columns * tile.itemsize * (1.0 - of_inputs * (tile.rows == rows))
        for tile in tiles
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no '{pattern}'")
    return int(found[1])


def main() -> None:
    """`python -m membound.kernels.triton.resources ARCH [CASE ...]`: one JSON line a launch, of all cases if none."""
    arch, *cases = sys.argv[1:]
    for case in cases or CASES:
        for launch in launches(case, REFERENCE_MACHINES[arch]):
            print(json.dumps({"case": case, **asdict(resources_of(launch, arch))}), flush=True)


if __name__ == "__main__":
    main()
