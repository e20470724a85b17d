"""How large are an engine's steps where nobody names `max_num_seqs` and `max_batched_tokens`?

Each engine has defaults of its own, most of them by the device's memory. Those of a server are taken, not those of a
script that calls the engine.
"""

from __future__ import annotations

from membound.roofline.engine_memory import EngineLimits
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import EngineSetup

# Of a scheduler, which is one of each dp rank, where its engine is not known.
SEATS_ON_GPU = 256
SEATS_ON_CPU = 16
STEP_TOKENS = 4096
# Without a count of sequences of its own, SGLang's is at least this (max_running_requests in its log).
_SGLANG_SEATS = 2048
_GIB = 2**30


def usual_limits(profile: str, hardware: HardwareSpec | None, kind: str) -> EngineLimits:
    """The defaults of a profile's engine on a device, of each dp rank; those of no engine where the device is unknown.

    vLLM (vllm/engine/arg_utils.py, get_batch_defaults, for its server): 1,024 sequences and 8,192 tokens from 70 GiB on
    but for the A100, else 256 and 2,048. SGLang (python/sglang/srt/server_args.py of 2025-12, chunked_prefill_size):
    2,048 tokens below 35 GiB, 4,096 below 60, 8,192 below 160, else 16,384. TensorRT-LLM (max_batch_size and
    max_num_tokens of its server, from memory): 2,048 and 8,192. llama.cpp (llama-server of 2026, from memory): 4 slots,
    batches of 2,048.
    """
    general = EngineLimits(SEATS_ON_CPU if kind == "cpu" else SEATS_ON_GPU, STEP_TOKENS)
    if profile == "llama.cpp":
        return EngineLimits(4, 2048)
    if hardware is None or kind == "cpu":
        return general
    memory = hardware.memory_bytes / _GIB
    match profile:
        case "vllm" | "vllm-0.13" | "vllm-0.13-offline" | "vllm-eager":
            large = memory >= 70 and not hardware.name.upper().startswith("A100")
            return EngineLimits(1024, 8192) if large else EngineLimits(256, 2048)
        case "sglang":
            return EngineLimits(_SGLANG_SEATS, 2048 if memory < 35 else _sglang_chunk(memory))
        case "tensorrt-llm" | "tensorrt-llm-offline":
            return EngineLimits(2048, 8192)
    return general


def _sglang_chunk(memory_gib: float) -> int:
    if memory_gib < 60:
        return 4096
    return 8192 if memory_gib < 160 else 16384


def seats_that_pay(limits: EngineLimits, model: ModelSpec, setup: EngineSetup, memory_bytes: float) -> int:
    """Sequences of a default that nobody named: half as many as long as sampling them takes more than their cache.

    vLLM itself takes its default and refuses a model that it leaves no room for; whoever then serves it has given
    fewer, or an engine that samples with less memory.
    """
    seats = int(limits.sequences)
    while seats > 1:
        held = Footprint.of(model, setup, EngineLimits(seats, limits.step_tokens))
        if held.room(memory_bytes) >= held.engine.peak_bytes(held.engine.limits or limits):
            break
        smaller = Footprint.of(model, setup, EngineLimits(seats // 2, limits.step_tokens))
        if smaller.room(memory_bytes) <= held.room(memory_bytes):
            break  # it is not the seats that take the room
        seats //= 2
    return seats
