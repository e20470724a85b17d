"""How much of a device's roofs does a kernel reach, as a function of what it computes and moves?

Each family of kernels has one function of seconds with a handful of physical parameters: a launch, a share of the
bandwidth, a share of the matrix rate, what tiles and waves leave idle. A `KernelFit` holds the parameters that a table
of measurements gave (`fitting.py`), for a device, for its generation or for all devices together; a device that nobody
measured inherits from the nearest of them and its interval is wider by what leaving devices out has shown.

Each function gives the seconds and, beside them, what the bare roofs ask at the shares that the kernel reaches: the
larger of those says what binds.

Source of the forms: Williams et al., Roofline (CACM 2009) for the two roofs; Hockney's alpha-beta model for messages;
NVIDIA's "Matrix multiplication background" for tiles and waves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from membound.roofline.hardware import HardwareSpec
from membound.roofline.hardware.power import power_share
from membound.roofline.shape import Count
from membound.roofline.tiles import QUERY_TILE, Tiles

# How sharply the two roofs replace each other: 1 would add them, infinity take the larger. Kernels overlap copies with
# arithmetic, but not at once from the first tile on.
OVERLAP = 3.0
# Rows of the output tile that a block of the matrix unit works on.
TILE = 128.0
# Fewer query rows than this still occupy as many rows of the matrix unit.
MIN_QUERY_ROWS = 16.0
# Attention to the latents of MLA, which all heads share, fills the matrix unit as no other decode does, in tiles of 64
# query rows. No fitted table has it: FlashMLA reaches 580 TFLOP/s on an H800 (its README, February 2025), of 777 that
# power allows.
LATENTS_SHARE, LATENTS_ROWS = 0.75, 64.0


# How many times the dense rate large 2:4 products reach: 1.4 to 1.9 on RTX 4070 Ti Super (pytorch/ao#174), 1.1 on A100
# against a better dense kernel (CUDALibrarySamples#57); the data sheets promise 2.
SPARSE_SPEEDUP = 1.5


# Weight-only kernels unpack to 16 bits in registers and multiply with the instructions of the generation before, which
# on these architectures reach about this share of the new ones' rate (TensorRT-LLM 0.15 on H200: INT4 below BF16 at
# batch 8 with prompts of 2048, ModelOpt's table; measured on A100, where no such instructions are passed over).
MIXED_INPUT_SHARE = {"Hopper": 0.6, "Blackwell": 0.5}


# What is taken for a clock that the catalog does not have, and at which `launch_s` is stated.
_CLOCK_HZ = 1.8e9
# The part of a kernel's latency that passes in cycles of its clock; the rest is the launch itself.
_LATENCY_IN_CYCLES = 0.75


def launch_s(p: Mapping[str, float], hardware: HardwareSpec) -> float:
    """Seconds before and after a kernel's work, which a faster clock shortens."""
    slower = _CLOCK_HZ / (hardware.clock_hz or _CLOCK_HZ)
    return p["launch_s"] * (1.0 - _LATENCY_IN_CYCLES + _LATENCY_IN_CYCLES * slower)


def overlapped(a: Count, b: Count) -> Count:
    """Seconds of two resources that work at the same time: a little more than the larger of the two."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    ratio = smaller / np.maximum(larger, 1e-30)
    return larger * (1.0 + ratio * ratio * ratio) ** (1.0 / OVERLAP)


def matrix_rate(p: Mapping[str, float], hardware: HardwareSpec, dtype: str) -> float:
    """FLOP/s that large products reach: the kernel's share of what the device sustains within its power."""
    return hardware.peak_flops(dtype) * power_share(hardware, dtype) * p["matrix_share"]


def fp16_accumulation_gain(hardware: HardwareSpec) -> float:
    """How many times the rate of fp32 accumulation a device reaches with fp16 accumulation: GeForce halves the former.

    Source: NVIDIA's GA102 and AD102 white papers (RTX 3090: 142 against 71 TFLOP/s, RTX 4090: 330 against 165).
    """
    workstation = hardware.name.startswith(("RTX-A", "RTX-PRO", "RTX-6000"))
    return 2.0 if hardware.name.startswith("RTX-") and not workstation else 1.0


# Last-level caches of two halves, each of which holds what its own units read: what both read is there twice (NVIDIA
# A100 white paper, "A100 L2 cache", from memory; repeated reads of attention's cache come from it up to about half the
# size on A100 and H100, up to all of it on B200 and L40S).
_IN_HALVES = ("Ampere HBM", "Hopper HBM")
# Up to which part of the cache a repeated read comes from it whole.
_WHOLLY_CACHED = 0.75


def cached_share(hardware: HardwareSpec, working_set_bytes: Count) -> Count:
    """The share of a repeated read that the last-level cache serves: all that fits well, nothing beyond its size."""
    cache_bytes = hardware.cache_bytes or 0
    if not cache_bytes:
        return np.zeros_like(working_set_bytes) if np.ndim(working_set_bytes) else 0.0
    held_bytes = 0.5 * cache_bytes if hardware.generation in _IN_HALVES else float(cache_bytes)
    left = (held_bytes - working_set_bytes) / ((1.0 - _WHOLLY_CACHED) * held_bytes)
    return np.minimum(np.maximum(left, 0.0), 1.0)


def stream_s(p: Mapping[str, float], hardware: HardwareSpec, moved_bytes: Count, cached: Count = 0.0) -> Count:
    """Seconds to move bytes at the share of the bandwidth that the kernel reaches.

    The `cached` share comes from the last-level cache, of which each unit gets `cache_bytes_per_cycle`.
    """
    seconds = moved_bytes / (hardware.bandwidth_bytes_per_s * p["bandwidth_share"])
    if not np.any(cached):
        return seconds
    cache_rate = (hardware.compute_units or 100) * (hardware.clock_hz or _CLOCK_HZ) * p["cache_bytes_per_cycle"]
    faster = np.minimum(hardware.bandwidth_bytes_per_s * p["bandwidth_share"] / cache_rate, 1.0)
    return seconds * (1.0 - cached * (1.0 - faster))


def padded_rows(m: Count) -> Count:
    """Rows that the matrix unit really computes for m rows: whole tiles, of 16 rows while one tile holds them all.

    A single row is a product of a matrix with a vector, for which engines have kernels that compute no other.
    """
    tiled = np.where(np.asarray(m) <= TILE, np.ceil(m / 16.0) * 16.0, np.ceil(m / TILE) * TILE)
    return np.where(np.asarray(m) <= 1.0, m, tiled)


def gemm_s(
    p: Mapping[str, float],
    hardware: HardwareSpec,
    rate: Count,
    m: Count,
    n: Count,
    k: Count,
    moved_bytes: Count,
    cached: Count = 0.0,
) -> tuple[Count, Count, Count]:
    """(seconds, memory seconds, compute seconds) of [m, k] x [k, n]; too few tiles for all units cost `wave_loss`."""
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE)
    waves = tiles / (hardware.compute_units or 100)
    tiled_s = 2.0 * padded_rows(m) * n * k / rate * (1.0 + p["wave_loss"] / np.maximum(waves, 1.0))
    memory_s = stream_s(p, hardware, moved_bytes, cached)
    return launch_s(p, hardware) + overlapped(memory_s, tiled_s), memory_s, 2.0 * m * n * k / rate


def decode_attention_s(
    p: Mapping[str, float],
    hardware: HardwareSpec,
    rate: Count,
    streams: Count,
    rows_per_stream: Count,
    kv_tokens: Count,
    bytes_per_kv_token: Count,
    flops_per_pair: Count,
    cached: Count = 0.0,
    rows_of_a_tile: Count = MIN_QUERY_ROWS,
) -> tuple[Count, Count, Count]:
    """(seconds, memory seconds, compute seconds) of attention of few queries over many cached tokens.

    `streams` are the (sequence, KV head) pairs, each of which reads its own keys and values: `kv_tokens` in all over
    the streams. A stream keeps only so many bytes in flight, so that it takes `half_streams` of them for each TB/s of
    the device to reach half its bandwidth, and each pays for part of a tile (`tile_tokens`). A stream's
    `rows_per_stream` queries share its read; each query-key pair costs `flops_per_pair`.
    """
    tiles = (kv_tokens + streams * p["tile_tokens"]) / np.maximum(kv_tokens, 1e-9)
    half = p["half_streams"] * hardware.bandwidth_bytes_per_s / 1e12
    memory_s = stream_s(p, hardware, kv_tokens * bytes_per_kv_token, cached)
    read_s = memory_s * tiles * (1.0 + half / np.maximum(streams, 1e-9))
    pair_s = kv_tokens * flops_per_pair / rate
    taken_s = overlapped(read_s, np.maximum(rows_per_stream, rows_of_a_tile) * pair_s)
    return launch_s(p, hardware) + taken_s, memory_s, rows_per_stream * pair_s


def prefill_attention_s(
    p: Mapping[str, float],
    hardware: HardwareSpec,
    rate: float,
    heads: Count,
    tokens: Count,
    sequences: Count,
    attended: Count,
    flops_per_pair: Count,
    moved_bytes: Count,
    tiles: Tiles | None = None,
) -> tuple[Count, Count, Count]:
    """(seconds, memory seconds, compute seconds) of causal attention of whole prompts or chunks.

    Prompts that are not equally long have `tiles`, which do not follow from the sums.

    Beside its products each query-key pair needs an exponential, of which a unit does `softmax_per_cycle` with what
    belongs to it; kernels compute the `masked_share` of the pairs that the causal mask hides. A tile of 128 queries of
    a head starts and ends in `tile_cycles`; fewer tiles than `wave_loss` times the units leave some idle.
    """
    _, rows, tiled_pairs, hidden = tiles or Tiles.of_equal(None, tokens, sequences, attended)
    pairs = heads * (tiled_pairs + hidden * p["masked_share"])
    units = _tile_units(hardware)
    cycles_per_s = units * (hardware.clock_hz or _CLOCK_HZ)
    work_s = pairs * flops_per_pair / rate
    if hardware.kind == "gpu":
        exponentials = p["softmax_per_cycle"] * (2.0 if hardware.name in _TWICE_THE_EXPONENTIALS else 1.0)
        work_s = overlapped(work_s, pairs / (cycles_per_s * exponentials))
    taken = heads * rows / QUERY_TILE
    idle = (1.0 + (p["wave_loss"] * units / np.maximum(taken, 1e-9)) ** 2) ** 0.5
    tiled_s = (work_s + taken * p["tile_cycles"] / cycles_per_s) * idle
    memory_s = stream_s(p, hardware, moved_bytes)
    return launch_s(p, hardware) + overlapped(memory_s, tiled_s), memory_s, heads * attended * flops_per_pair / rate


# Twice the exponentials a cycle: 10.7e12 a second where the B200 has 5e12 (NVIDIA, "Making softmax more efficient with
# NVIDIA Blackwell Ultra"; verda.com, "GB300 NVL72 architecture").
_TWICE_THE_EXPONENTIALS = ("B300-SXM", "GB300")


def _tile_units(hardware: HardwareSpec) -> float:
    """Units that work on a tile each. Accelerators have few and large ones, and work as a GPU of about this many."""
    return float(hardware.compute_units or 100) if hardware.kind == "gpu" else 100.0


def moe_s(
    p: Mapping[str, float],
    hardware: HardwareSpec,
    rate: float,
    pairs: Count,
    active: Count,
    expert_flops: Count,
    expert_bytes: Count,
    routed_bytes: Count,
) -> tuple[Count, Count, Count]:
    """(seconds, memory seconds, compute seconds) of the experts' two or three products.

    `pairs` are (token, expert) pairs on this device, `active` the distinct experts among them; an expert's rows are
    padded by `pad_rows`. `routed_bytes` is what the permutation, the activation and the weighted sum move; it counts
    `routing_share` times.
    """
    rows = pairs / np.maximum(active, 1e-9) + p["pad_rows"]
    tiled_s = active * rows * expert_flops / rate
    memory_s = stream_s(p, hardware, active * expert_bytes)
    moved_s = routed_bytes * p["routing_share"] / (hardware.bandwidth_bytes_per_s * p["bandwidth_share"])
    taken_s = overlapped(memory_s, tiled_s) + moved_s
    return launch_s(p, hardware) + taken_s, memory_s + moved_s, pairs * expert_flops / rate


def elementwise_s(
    p: Mapping[str, float], hardware: HardwareSpec, moved_bytes: Count, cached: Count = 0.0
) -> tuple[Count, Count]:
    """(seconds, memory seconds) of a kernel that reads, computes next to nothing, and writes."""
    memory_s = stream_s(p, hardware, moved_bytes, cached)
    return launch_s(p, hardware) + memory_s, memory_s


# Times the message passes a link, of n ranks: reduce-scatter and all-gather make an all-reduce.
_PASSES = {"allreduce": 2.0, "allgather": 1.0, "reducescatter": 1.0, "alltoall": 1.0}


def collective_s(
    p: Mapping[str, float],
    operation: str,
    message_bytes: Count,
    ranks: Count,
    bandwidth_bytes_per_s: Count,
    shared_bus: bool,
) -> tuple[Count, Count]:
    """(seconds, link seconds) of a collective over `ranks` devices: alpha + beta (Hockney), ring volume.

    The latency grows by `hop_s` a rank. Small messages do not fill the link: they take `small_loss` longer, up to
    about 4 MB. Where all ranks share a bus (PCIe through the host), it slows with the ranks (`contention`).
    """
    passes = _PASSES.get(operation)
    volume = 1.0 if passes is None else passes * (ranks - 1.0) / ranks
    bandwidth = bandwidth_bytes_per_s * p["bandwidth_share"]
    if shared_bus:
        bandwidth = bandwidth / (np.maximum(ranks, 2.0) / 2.0) ** p.get("contention", 1.9)
    link_s = volume * message_bytes / bandwidth * (1.0 + p["small_loss"] / (1.0 + message_bytes / 4e6))
    return p["launch_s"] + p["hop_s"] * (ranks - 1.0) + link_s, link_s
