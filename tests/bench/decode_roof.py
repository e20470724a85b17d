"""How close does decode come to the bandwidth roof, and how does it compare with llama.cpp on the same file?

    .venv/bin/python tests/bench/decode_roof.py [--llama-python PYTHON] [--rounds 3] [--json FILE]

Decodes one sequence with bf16 and with int8 weights, prints each step's achieved bandwidth beside the calibrated roof
at its working set, and in the same rounds llama-cpp-python on the same GGUF (Q4_1, so it reads fewer bytes) where
PYTHON has it. Needs a calibration (`membound calibrate`). Run it on a machine that does nothing else.

llama-cpp-python's default build crashes on machines whose AMX is masked by a hypervisor; build it into an environment
of its own with

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" pip install --no-cache-dir llama-cpp-python
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from membound.roofline.cost import step_cost
from membound.roofline.hardware import local_hardware
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_weight_bytes
from membound.roofline.techniques import Int8Weights
from membound.roofline.times import times_for
from membound.runtime.assets import fetch_smollm2
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.plain import generate_plain

PROMPT_TOKENS, NEW_TOKENS = 64, 128

LLAMA = """
import json, sys, time
import llama_cpp
gguf, threads, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
llm = llama_cpp.Llama(gguf, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
for line in sys.stdin:
    llm.reset()
    llm.eval([1] * prompt)
    steps, token = [], 1
    for _ in range(new):
        began = time.perf_counter()
        llm.eval([token])
        token = llm.sample(temp=0.0)
        steps.append(time.perf_counter() - began)
    print(json.dumps(sorted(steps)[len(steps) // 2]), flush=True)
"""


def median_step_s(decoder: Decoder) -> float:
    """Median time of a decode step of one sequence, with contexts from PROMPT_TOKENS on."""
    stamps = [time.perf_counter()]
    for _ in generate_plain(decoder, [1] * PROMPT_TOKENS, NEW_TOKENS + 1):
        stamps.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(stamps[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()

    hardware = local_hardware()
    calibration, times = hardware.calibration, times_for(hardware)
    assert calibration is not None
    runtime = Runtime(threads=calibration.threads)
    plain = load_scenario("live-cpu").with_techniques(())
    scenarios = {"bf16": plain, "int8": plain.with_techniques((Int8Weights(),))}
    decoders = {name: runtime.decoder(scenario) for name, scenario in scenarios.items()}

    llama = None
    if options.llama_python:
        sizes = (calibration.threads, PROMPT_TOKENS, NEW_TOKENS)
        command = [options.llama_python, "-c", LLAMA, str(fetch_smollm2()), *map(str, sizes)]
        llama = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    steps: dict[str, list[float]] = {name: [] for name in decoders} | ({"llama.cpp Q4_1": []} if llama else {})
    for _ in range(options.rounds):
        for name, decoder in decoders.items():
            steps[name].append(median_step_s(decoder))
        if llama and llama.stdin and llama.stdout:
            llama.stdin.write("go\n")
            llama.stdin.flush()
            steps["llama.cpp Q4_1"].append(float(json.loads(llama.stdout.readline())))

    rows = []
    for name, samples in steps.items():
        step_s = statistics.median(samples)
        row = {
            "path": name,
            "step_ms": step_s * 1e3,
            "rounds_ms": [s * 1e3 for s in samples],
            "tokens_per_s": 1 / step_s,
        }
        if name in scenarios:
            scenario, spec = scenarios[name], decoders[name].spec
            shape = StepShape.decode(1, PROMPT_TOKENS + NEW_TOKENS / 2)
            cost = step_cost(spec, scenario.setup, times, shape)
            moved = step_weight_bytes(spec, scenario.setup) + spec.kv_bytes_per_token(16) * shape.kv_tokens
            roof = calibration.bandwidth_at(moved)
            row |= {
                "bytes": moved,
                "gb_per_s": moved / step_s / 1e9,
                "roof_gb_per_s": roof / 1e9,
                "share_of_roof": moved / step_s / roof,
                "predicted_ms": cost.time_s * 1e3,
            }
        rows.append(row)
        extra = (
            f"{row['gb_per_s']:6.1f} GB/s = {row['share_of_roof']:4.0%} of the roof ({row['roof_gb_per_s']:.1f} GB/s), "
            f"predicted {row['predicted_ms']:.2f} ms"
            if "bytes" in row
            else ""
        )
        print(f"{name:15} {row['step_ms']:7.2f} ms/token {row['tokens_per_s']:7.1f} tok/s  {extra}")
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
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
