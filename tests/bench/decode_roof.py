"""How close does decode come to the bandwidth roof, and how does it compare with other engines on the same weights?

    .venv/bin/python tests/bench/decode_roof.py [--peer vllm=PYTHON ...] [--folder FOLDER] [--rounds 3] [--json FILE]

Steps of decode of 1, 4, 16 and 32 sequences and a prompt of 512 tokens, SmolLM2-135M in each of `FORMATS`, and in the
same rounds each peer that a PYTHON has: `peers/` says how to install it. llama.cpp and OpenVINO read the same GGUF
(Q4_1, 5 bits a weight); FOLDER holds it as `peers/hf_folder.py` wrote it for the others. All compute logits of every
sequence and take the largest; none detokenizes; every number is a median of step times. One sequence's achieved
bandwidth stands beside the calibrated roof at its working set (`membound calibrate`). Run it on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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
from membound.roofline.times.known import times_for
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.loading.assets import fetch_smollm2
from membound.runtime.ragged import Part, ragged_batch

CONTEXT, STEPS, PROMPT_TOKENS, BLOCK_SIZE = 64, 24, 512, 16
BATCHES = (1, 4, 16, 32)
Sizes = dict[str, float]

# With 8-bit activations, as llama.cpp and OpenVINO multiply, and the lm_head in 8 bits, as in their GGUF.
FORMATS: dict[str, dict[str, str]] = {
    "bf16": {},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "int8, int8 inputs": {"format": "int8", "activations": "int8", "lm_head": "int8"},
    "int4, int8 inputs": {"format": "int4", "activations": "int8", "lm_head": "int8"},
}

# Of each peer: what its weights are, and whether it reads the GGUF itself.
PEERS = {
    "llama_cpp": ("llama.cpp Q4_1", True),
    "openvino": ("OpenVINO Q4_1", True),
    "onnxruntime": ("ONNX Runtime int4", False),
    "vllm": ("vLLM bf16", False),
    "transformers": ("transformers bf16", False),
}


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


class Peer:
    """An engine in an environment of its own, which `peers/KIND_peer.py` asks for its times.

    Between rounds its processes are stopped: some wait for work by looking for it.
    """

    def __init__(self, kind: str, python: str, folder: Path | None, threads: int) -> None:
        self.name, reads_gguf = PEERS[kind]
        model = fetch_smollm2() if reads_gguf else folder
        assert model is not None, f"{self.name} needs --folder"
        numbers = (threads, CONTEXT, STEPS, PROMPT_TOKENS, *BATCHES)
        script = Path(__file__).with_name("peers") / f"{kind}_peer.py"
        command = [python, str(script), str(model), *map(str, numbers)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.sizes_s()  # it has loaded and is warm

    def sizes_s(self) -> Sizes:
        assert self.process.stdin is not None and self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended; its standard error says why"
        os.killpg(self.process.pid, signal.SIGSTOP)
        found: Sizes = json.loads(line)
        return found

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


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
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=Path, help="the model as a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()

    calibration = local_hardware().calibration
    assert calibration is not None, "run `membound calibrate` first"
    runtime = Runtime(threads=calibration.threads)
    plain = load_scenario("live-cpu").with_techniques(())
    scenarios = {
        name: plain.with_value("techniques", [{"name": "weight_quantization", **format}] if format else [])
        for name, format in FORMATS.items()
    }
    decoders = {name: runtime.decoder(scenario) for name, scenario in scenarios.items()}

    peers = [Peer(*asked.split("=", 1), options.folder, calibration.threads) for asked in options.peer]

    rounds: dict[str, list[Sizes]] = {name: [] for name in [*decoders, *(peer.name for peer in peers)]}
    for _ in range(options.rounds):
        for name, decoder in decoders.items():
            rounds[name].append(sizes_s(decoder))
        for peer in peers:
            rounds[peer.name].append(peer.sizes_s())
    for peer in peers:
        peer.end()

    tokens = {**{str(size): size for size in BATCHES}, "prompt": PROMPT_TOKENS}
    print(f"{'tokens/s':18}" + "".join(f"{size:>10}" for size in tokens))
    rows = []
    for name, samples in rounds.items():
        seconds = {size: statistics.median(sample[size] for sample in samples) for size in tokens}
        row: dict[str, Any] = {
            "path": name,
            "tokens_per_s": {size: count / seconds[size] for size, count in tokens.items()},
            "rounds_ms": {size: [sample[size] * 1e3 for sample in samples] for size in tokens},
        }
        text = f"{name:18}" + "".join(f"{rate:10.1f}" for rate in row["tokens_per_s"].values())
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
