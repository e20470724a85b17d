"""What does each quantizer and pruner cost SmolLM2-135M in perplexity? `python tests/bench/quantizers.py` prints it.

Every row is the whole model, read on English and on code that no calibration saw. Weights were 4-bit once (the file is
a Q4_1 GGUF), so that groups of 32 at 4 bits with a zero point would cost almost nothing: groups here are of 64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch

from membound.kernels.base import Kernels, PackedWeight, WeightFormat
from membound.kernels.reference import TorchKernels
from membound.roofline.precision.plan import plan_of
from membound.roofline.reading.gguf_file import GgufFile
from membound.runtime.decoder import Decoder
from membound.runtime.loading.assets import fetch_smollm2
from membound.runtime.loading.weights import load_gguf
from membound.runtime.quality.reading import perplexity, read
from membound.runtime.quality.texts import calibration_windows, windows
from membound.runtime.quantization.calibration import Calibrator
from membound.runtime.quantization.pruning import PruningRecipe
from membound.runtime.quantization.recipes import QUANTIZERS
from membound.runtime.recipe import FormatRecipe, Recipe
from membound.runtime.tokenizer import Tokenizer

Row = tuple[str, Callable[[], Recipe]]


class WideKernels(TorchKernels):
    """Plain PyTorch that multiplies in fp32, which is faster than bf16 on a CPU without matrix units."""

    def pack(self, weight: torch.Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return super().pack(weight, "fp32" if format == "bf16" else format, group_size)


def rows(kernels: Kernels, calibrator: Calibrator) -> Iterator[Row]:
    """Every method, in the order of the table."""

    def quantized(method: str, weights: str, activations: str | None = None) -> Callable[[], Recipe]:
        return lambda: QUANTIZERS[method](kernels, plan_of(weights, activations), calibrator)  # type: ignore[index]

    def pruned(method: str, pattern: str) -> Callable[[], Recipe]:
        return lambda: PruningRecipe(FormatRecipe(kernels, "bf16"), method, calibrator, pattern)  # type: ignore[arg-type]

    for format in ("int8", "int4_g64", "int4_g64_zero", "int3_g64", "int3_g64_zero", "int2_g32_zero"):
        methods = ("rtn",) if format == "int8" else ("rtn", "gptq", "awq")
        yield from ((f"{method} {format}", quantized(method, format)) for method in methods)
    for method in ("rtn", "smoothquant", "llm_int8"):
        yield f"{method} int8, int8 activations", quantized(method, "int8", "int8")
    for method in ("rtn", "quarot"):
        yield f"{method} int4_g64, int4_row activations", quantized(method, "int4_g64", "int4_row")
    for format, activations in (("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_block", "fp8_g128")):
        yield f"rtn {format}, {activations} activations", quantized("rtn", format, activations)
    for pattern in ("unstructured", "2:4"):
        yield from (
            (f"{method} 50% {pattern}", pruned(method, pattern)) for method in ("magnitude", "wanda", "sparsegpt")
        )


def main() -> None:
    """Prints a Markdown table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each text that are judged")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens that are calibrated on")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    arguments = parser.parse_args()
    path = fetch_smollm2()
    spec, weights = load_gguf(path)
    tokenizer = Tokenizer.from_gguf_metadata(GgufFile(path).metadata)
    kernels = WideKernels()
    calibrator = Calibrator(kernels, calibration_windows(tokenizer, arguments.calibration))
    english, code = (windows(tokenizer, kind, "evaluation", arguments.tokens) for kind in ("english", "code"))
    plain = Decoder(spec, weights, kernels, "bf16")
    code_before = perplexity(plain, code.token_ids)
    print(f"{english.words}; {code.words}; calibrated on {arguments.calibration} other tokens\n")
    print("| method | English perplexity | code perplexity | KL, nats (English) | top-1 agreement | built in |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name, recipe in rows(kernels, calibrator):
        if arguments.only not in name:
            continue
        start_s = time.perf_counter()
        decoder = Decoder(spec, weights, kernels, recipe())
        built_s = time.perf_counter() - start_s
        reading = read(plain, decoder, english.token_ids)
        print(
            f"| {name} | {reading.perplexity_before:.2f} → {reading.perplexity:.2f} | {code_before:.2f} → "
            f"{perplexity(decoder, code.token_ids):.2f} | {reading.kl_nats:.4f} | {reading.top1_agreement:.1%} | "
            f"{built_s:.0f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
