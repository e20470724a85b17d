"""How close does decode come to the bandwidth roof, and how does it compare with llama.cpp on the same file?

    .venv/bin/python tests/bench/decode_roof.py [--llama-python PYTHON] [--rounds 3] [--json FILE]

Steps of decode of 1, 4, 16 and 32 sequences and a prompt of 512 tokens, SmolLM2-135M with weights in bf16, int8 and
int4, and in the same rounds llama-cpp-python on the same GGUF (Q4_1, 5 bits a weight) where PYTHON has it.
Both compute logits of every sequence and take the largest; neither detokenizes. One sequence's achieved bandwidth
stands beside the calibrated roof at its working set (`membound calibrate`). Run it on a machine that does nothing else.

llama-cpp-python's default build crashes on machines whose AMX is masked by a hypervisor; build it into an environment
of its own with

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" pip install --no-cache-dir llama-cpp-python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from membound.roofline.cost import step_cost
from membound.roofline.hardware import local_hardware
from membound.roofline.scenario import Scenario, load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_weight_bytes
from membound.roofline.times import times_for
from membound.runtime.assets import fetch_smollm2
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.ragged import Part, ragged_batch

CONTEXT, STEPS, PROMPT_TOKENS, BLOCK_SIZE = 64, 24, 512, 16
BATCHES = (1, 4, 16, 32)
PEER = "llama.cpp Q4_1"
Sizes = dict[str, float]

# Reads a line for each round and answers with the median seconds of a step of each batch, and those of a prompt.
LLAMA = """
import ctypes, json, sys, time
import llama_cpp as lib
path, threads, context, steps, prompt = sys.argv[1], *map(int, sys.argv[2:6])
batches = list(map(int, sys.argv[6:]))
silent = lib.llama_log_callback(lambda *_: None)  # kept, or it is called after it was freed
lib.llama_log_set(silent, ctypes.c_void_p(0))
lib.llama_backend_init()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

def opened(sequences, tokens):
    params = lib.llama_context_default_params()
    params.n_ctx = sequences * tokens
    params.n_batch = params.n_ubatch = max(512, sequences)
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    return lib.llama_init_from_model(model, params)

def decode(context, items):
    batch = lib.llama_batch_init(len(items), 0, 1)
    batch.n_tokens = len(items)
    for i, (token, place, sequence, wanted) in enumerate(items):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, wanted
    began = time.perf_counter()
    assert lib.llama_decode(context, batch) == 0
    lib.llama_synchronize(context)
    rows = [i for i, item in enumerate(items) if item[3]]
    import numpy as np
    best = [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab,)).argmax()) for i in rows]
    seconds = time.perf_counter() - began
    lib.llama_batch_free(batch)
    return seconds, best

for line in sys.stdin:
    found = {}
    for sequences in batches:
        ctx = opened(sequences, context + steps + 8)
        for s in range(sequences):
            decode(ctx, [(1, p, s, p == context - 1) for p in range(context)])
        times = [decode(ctx, [(1, context + i, s, True) for s in range(sequences)])[0] for i in range(steps)]
        found[str(sequences)] = sorted(times)[len(times) // 2]
        lib.llama_free(ctx)
    ctx = opened(1, prompt + 8)
    times = []
    for _ in range(3):
        lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
        times.append(decode(ctx, [(1, p, 0, p == prompt - 1) for p in range(prompt)])[0])
    found["prompt"] = sorted(times)[1]
    lib.llama_free(ctx)
    print(json.dumps(found), flush=True)
"""


def median_s(run: Callable[[], object], count: int) -> float:
    run()
    samples = []
    for _ in range(count):
        start_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples)


def sizes_s(decoder: Decoder) -> Sizes:
    """Median seconds of a step of each batch, and of a prompt."""
    found = {}
    for sequences in BATCHES:
        each = -(-(CONTEXT + STEPS) // BLOCK_SIZE)
        cache = decoder.new_cache(sequences * each, BLOCK_SIZE)
        parts = [Part(CONTEXT + STEPS // 2, 1, range(s * each, (s + 1) * each)) for s in range(sequences)]
        found[str(sequences)] = median_s(stepper(decoder, parts, cache), STEPS)
    blocks = PROMPT_TOKENS // BLOCK_SIZE
    cache = decoder.new_cache(blocks, BLOCK_SIZE)
    found["prompt"] = median_s(stepper(decoder, [Part(0, PROMPT_TOKENS, range(blocks))], cache), 3)
    return found


def stepper(decoder: Decoder, parts: list[Part], cache: Any) -> Callable[[], torch.Tensor]:
    """A step as an engine takes it: the batch is built, the logits computed and the largest found."""

    def step() -> torch.Tensor:
        batch = ragged_batch(parts, BLOCK_SIZE)
        ids = torch.ones(batch.num_tokens, dtype=torch.int64)
        return decoder.forward(ids, batch, cache, (batch.query_start[1:] - 1).long()).argmax(dim=-1)

    return step


def beside_roof(scenario: Scenario, decoder: Decoder, step_s: float) -> dict[str, float]:
    """The bandwidth of a step of one sequence, that of the roof, and what was predicted."""
    hardware = local_hardware()
    assert hardware.calibration is not None
    shape = StepShape.decode(1, CONTEXT + STEPS / 2)
    moved = step_weight_bytes(decoder.spec, scenario.setup) + decoder.spec.kv_bytes_per_token(16) * shape.kv_tokens
    roof = hardware.calibration.bandwidth_at(moved)
    cost = step_cost(decoder.spec, scenario.setup, times_for(hardware), shape)
    return {
        "bytes": moved,
        "gb_per_s": moved / step_s / 1e9,
        "roof_gb_per_s": roof / 1e9,
        "share_of_roof": moved / step_s / roof,
        "predicted_ms": cost.time_s * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()

    calibration = local_hardware().calibration
    assert calibration is not None, "run `membound calibrate` first"
    runtime = Runtime(threads=calibration.threads)
    plain = load_scenario("live-cpu").with_techniques(())
    formats = {"bf16": None, "int8": "int8", "int4": "int4"}
    scenarios = {
        name: plain if format is None else plain.with_value(
            "techniques", [{"name": "weight_quantization", "format": format}]
        )
        for name, format in formats.items()
    }  # fmt: skip
    decoders = {name: runtime.decoder(scenario) for name, scenario in scenarios.items()}

    llama = None
    if options.llama_python:
        numbers = (calibration.threads, CONTEXT, STEPS, PROMPT_TOKENS, *BATCHES)
        command = [options.llama_python, "-c", LLAMA, str(fetch_smollm2()), *map(str, numbers)]
        llama = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    rounds: dict[str, list[Sizes]] = {name: [] for name in decoders} | ({PEER: []} if llama else {})
    for _ in range(options.rounds):
        for name, decoder in decoders.items():
            rounds[name].append(sizes_s(decoder))
        if llama and llama.stdin and llama.stdout:
            llama.stdin.write("go\n")
            llama.stdin.flush()
            rounds[PEER].append(json.loads(llama.stdout.readline()))

    tokens = {**{str(size): size for size in BATCHES}, "prompt": PROMPT_TOKENS}
    print(f"{'tokens/s':16}" + "".join(f"{size:>10}" for size in tokens))
    rows = []
    for name, samples in rounds.items():
        seconds = {size: statistics.median(sample[size] for sample in samples) for size in tokens}
        row: dict[str, Any] = {
            "path": name,
            "tokens_per_s": {size: count / seconds[size] for size, count in tokens.items()},
            "rounds_ms": {size: [sample[size] * 1e3 for sample in samples] for size in tokens},
        }
        text = f"{name:16}" + "".join(f"{rate:10.1f}" for rate in row["tokens_per_s"].values())
        if name in scenarios:
            row |= beside_roof(scenarios[name], decoders[name], seconds["1"])
            text += f"   1: {row['gb_per_s']:.1f} of {row['roof_gb_per_s']:.1f} GB/s = {row['share_of_roof']:.0%}, "
            text += f"{seconds['1'] * 1e3:.2f} ms, predicted {row['predicted_ms']:.2f}"
        rows.append(row)
        print(text)
    conditions = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": calibration.machine,
        "threads": calibration.threads,
        "kernels": runtime.kernels.name,
        "torch": torch.__version__,
        "load_average_1min": os.getloadavg()[0],
        "rounds": options.rounds,
    }
    print(json.dumps(conditions))
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
