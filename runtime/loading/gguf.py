"""How are the weights of a GGUF read?"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from membound.roofline.models import ModelError, ModelSpec
from membound.roofline.reading.gguf_file import GgufFile
from membound.runtime.loading.assemble import Assembler, gguf_changes
from membound.runtime.loading.gguf_facts import read_gguf_arithmetic
from membound.runtime.loading.layouts import GGUF
from membound.runtime.loading.store import Weights
from membound.runtime.supported import checked

# Since 2025 llama.cpp keeps MLA's unpacking matrix in the halves that its absorbed form applies.
_KV_B, _HALVES = "attn_kv_b.weight", ("attn_k_b.weight", "attn_v_b.weight")


def load_gguf(path: Path | str) -> tuple[ModelSpec, Weights]:
    """Reads a GGUF of one of the architectures in `layouts`, dequantized to bf16.

    Raises GgufError, ModelError or WeightsError with one sentence about what is wrong with the file.
    """
    file = GgufFile(path)
    tied = "output.weight" not in file.tensors
    spec = checked(ModelSpec.from_gguf_metadata(file.metadata, file.path.stem, tie_embeddings=tied))
    kind = str(file.metadata["general.architecture"])
    if kind not in GGUF:
        raise ModelError(
            f"general.architecture of {spec.name} is {kind!r}, whose tensors this engine cannot read: "
            f"it must be one of {', '.join(GGUF)}."
        )
    if "rope_factors_short.weight" in file.tensors:
        raise ModelError(f"rotations of {spec.name} are scaled by the length of the text, which is not computed.")

    def read(name: str) -> Tensor:
        if name.endswith(_KV_B) and name not in file.tensors:
            return _joined_halves(*(torch.from_numpy(file.dequantize(name.replace(_KV_B, half))) for half in _HALVES))
        return torch.from_numpy(file.dequantize(name))

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    layout = GGUF[kind]
    arithmetic = read_gguf_arithmetic(file.metadata, spec, layout)
    return spec, Assembler(spec, arithmetic, layout, read, _origin(file), gguf_changes).weights(factors)


def _joined_halves(k_b: Tensor, v_b: Tensor) -> Tensor:
    """kv_b [heads * (nope + v), rank] of its halves [heads, rank, nope] and [heads, v, rank]."""
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)


def _origin(file: GgufFile) -> str:
    matrices = Counter(info.quantization.name for info in file.tensors.values() if len(info.shape) > 1)
    bits = re.match(r"[IT]?Q(\d)", matrices.most_common(1)[0][0]) if matrices else None
    was = f": these weights were {bits[1]}-bit once" if bits else ""
    return f"{file.path.name}, dequantized to bf16{was}"
