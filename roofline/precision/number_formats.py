"""How many bytes does a weight, an activation or a cached key really take?"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.shape import Count

Role = Literal["weights", "activations", "kv"]


@dataclass(frozen=True)
class Scale:
    """Metadata of `bits` for each block of `rows` x `columns` elements; 0 rows or columns are all of them."""

    bits: float
    rows: int = 1
    columns: int = 0


@dataclass(frozen=True)
class Precision:
    """A number format with its metadata.

    `values` are the numbers, under the name by which a matrix unit would multiply them (`int4`, `fp8`; `nf4` is never
    multiplied as it is). `element_bits` is what one element takes without its `scales`. `sparse` marks 2:4 sparsity.
    A cache keeps its newest `window` tokens in 16 bits.
    """

    name: str
    values: str
    element_bits: float
    scales: tuple[Scale, ...] = ()
    sparse: bool = False
    window: int = 0

    @property
    def bits(self) -> float:
        """Bits of an element with the metadata of its block; what a whole row or matrix shares is not in it."""
        return self.element_bits + sum(s.bits / (s.rows * s.columns) for s in self.scales if s.rows and s.columns)

    @property
    def width(self) -> int:
        """Bits of a value as it is multiplied: 16 for bf16, 4 for int4 in whatever packing."""
        return int(re.sub(r"\D", "", self.values))

    def matrix_bytes(self, n: int, k: int) -> float:
        """Bytes of a matrix [n, k] with all its metadata; quantization groups run along k."""
        metadata = sum(s.bits * _blocks(n, s.rows) * _blocks(k, s.columns) for s in self.scales)
        return (n * k * self.element_bits + metadata) / 8

    def vector_bytes(self, elements: float) -> float:
        """Bytes of `elements` activations or cached values, without what a row or a matrix shares."""
        return elements * self.bits / 8

    def head_bytes(self, length: int) -> float:
        """Bytes of one head's key or value of one token, with all its scales; those of a whole tensor are left out."""
        scales = sum(scale.bits * _blocks(length, scale.columns) for scale in self.scales if scale.rows == 1)
        return (length * self.element_bits + scales) / 8

    def cache_bytes(self, tokens: Count, vectors: int, length: int, sequences: Count = 1) -> Count:
        """Bytes of a KV cache: of each of `tokens` tokens `vectors` vectors (2 x kv heads x layers) of `length`.

        `tokens` counts those of all `sequences`, which are taken to be equally long where there is a window. Scales of
        a whole tensor are left out.
        """
        vector = self.head_bytes(length)
        if not self.window:
            return tokens * (vectors * vector)
        newest = np.minimum(tokens, np.asarray(sequences) * self.window)
        return newest * (vectors * length * 2.0) + (tokens - newest) * (vectors * vector)


def _blocks(size: int, block: int) -> int:
    return -(-size // block) if block else 1


def sparse24(dense: Precision) -> Precision:
    """2:4 sparsity: of four values two are kept, each with a 2-bit index: (2b + 4) / 4 bits of an element of b.

    16 bits become 9 and 8 become 5: decode gains 1.78 and 1.6 times at most, not 2 (NVIDIA's 2:4 format as CUTLASS
    documents it; facts/roofline-notes.md 4.2).
    """
    if dense.sparse:
        return dense
    kept = (2 * dense.element_bits + 4) / 4
    return replace(dense, name=f"{dense.name}_sparse24", element_bits=kept, sparse=True)


def integer(bits: int, group: int = 0, *, zero_bits: int = 0, scale_bits: int = 16) -> Precision:
    """Integers with a scale, and where `zero_bits` a zero point, for each `group` along a row; 0 is the whole row."""
    zero = f"_zero{'' if zero_bits == bits else zero_bits}" if zero_bits else ""
    name = f"int{bits}_{f'g{group}' if group else 'row'}{zero}"
    return Precision(name, f"int{bits}", bits, (Scale(scale_bits + zero_bits, columns=group),))


def _block_format(name: str, values: str, element_bits: float, block: int, block_bytes: int) -> Precision:
    """A format stored in blocks of `block` elements that take `block_bytes`, scales and minima among them."""
    return Precision(name, values, element_bits, (Scale(8 * block_bytes - element_bits * block, columns=block),))


# The block layouts of ggml (ggml-common.h): values, bits of one, elements in a block, bytes of a block.
GGML_BLOCKS: dict[str, tuple[str, float, int, int]] = {
    "q8_0": ("int8", 8, 32, 34),
    "q5_0": ("int5", 5, 32, 22),
    "q5_1": ("int5", 5, 32, 24),
    "q4_0": ("int4", 4, 32, 18),
    "q4_1": ("int4", 4, 32, 20),
    "q6_k": ("int6", 6, 256, 210),
    "q5_k": ("int5", 5, 256, 176),
    "q4_k": ("int4", 4, 256, 144),
    "q3_k": ("int3", 3, 256, 110),
    "q2_k": ("int2", 2, 256, 84),
    "iq4_nl": ("nf4", 4, 32, 18),
    "iq4_xs": ("nf4", 4, 256, 136),
    "iq3_s": ("nf3", 3, 256, 110),
    "iq3_xxs": ("nf3", 3, 256, 98),
    "iq2_s": ("nf2", 2, 256, 82),
    "iq2_xs": ("nf2", 2, 256, 74),
    "iq2_xxs": ("nf2", 2, 256, 66),
    "iq1_m": ("nf1", 1, 256, 56),
    "iq1_s": ("nf1", 1, 256, 50),
    "tq2_0": ("int2", 2, 256, 66),
    "tq1_0": ("int2", 1.6, 256, 54),
}


@dataclass(frozen=True)
class GgmlMix:
    """A file type of llama.cpp that mixes formats: bits of a weight over all of Llama-3.1-8B, and its two tables."""

    published_bits: float
    lm_head: str
    embedding: str


# Bits: llama.cpp, tools/quantize/README.md at 311c2c9, measured on Llama-3.1-8B (q3_k_m, which that table lacks, from
# memory). Formats of the output and embedding tables: src/llama-quant.cpp (from memory; they lead to the published
# bits of Llama-2-7B too, which a test checks).
GGML_MIXES: dict[str, GgmlMix] = {
    "q2_k_s": GgmlMix(2.9697, "q6_k", "q2_k"),
    "q2_k_m": GgmlMix(3.1593, "q6_k", "q2_k"),
    "q3_k_s": GgmlMix(3.6429, "q6_k", "q3_k"),
    "q3_k_m": GgmlMix(3.9960, "q6_k", "q3_k"),
    "q3_k_l": GgmlMix(4.2979, "q6_k", "q3_k"),
    "q4_k_s": GgmlMix(4.6672, "q6_k", "q4_k"),
    "q4_k_m": GgmlMix(4.8944, "q6_k", "q4_k"),
    "q5_k_s": GgmlMix(5.5704, "q6_k", "q5_k"),
    "q5_k_m": GgmlMix(5.7036, "q6_k", "q5_k"),
}
# Llama-3.1-8B: 8.030 B parameters, of which each table has 128256 x 4096 (its config.json)
_LLAMA_8B, _LLAMA_8B_TABLE = 8_030_261_248, 128_256 * 4096


def _mix_body(name: str) -> Precision:
    """What the layers of a llama.cpp mix store: its published bits without those of the output and embedding tables."""
    mix = GGML_MIXES[name]
    tables = sum(_block_format(table, *GGML_BLOCKS[table]).bits for table in (mix.lm_head, mix.embedding))
    bits = (mix.published_bits * _LLAMA_8B - tables * _LLAMA_8B_TABLE) / (_LLAMA_8B - 2 * _LLAMA_8B_TABLE)
    return Precision(name, f"int{name[1]}", bits)


def _formats() -> Iterator[Precision]:
    per_tensor = Scale(32, rows=0)
    yield Precision("fp32", "fp32", 32)
    yield Precision("tf32", "tf32", 32)
    yield Precision("bf16", "bf16", 16)
    yield Precision("fp16", "fp16", 16)
    yield Precision("fp8", "fp8", 8, (per_tensor,))
    yield Precision("fp8_e5m2", "fp8", 8, (per_tensor,))
    yield Precision("fp8_row", "fp8", 8, (Scale(32),))
    # DeepSeek-V3's: weights in blocks of 128 x 128, activations in groups of 128 (technical report, section 3.3)
    yield Precision("fp8_block", "fp8", 8, (Scale(32, rows=128, columns=128),))
    yield Precision("fp8_g128", "fp8", 8, (Scale(32, columns=128),))
    yield Precision("fp6", "fp6", 6, (Scale(16),))  # FP6-LLM: one fp16 scale a row

    yield Precision("int8", "int8", 8, (Scale(32),))
    for bits in (8, 6, 5, 4, 3, 2):
        for group in (32, 64, 128):
            yield integer(bits, group)
            yield integer(bits, group, zero_bits=bits)
    for bits in (4, 3, 2):
        yield replace(integer(bits, 128), name=f"int{bits}")

    # bitsandbytes: an fp32 absmax for 64 values; double quantization stores it in 8 bits, with an fp32 for 256 of them
    yield Precision("nf4", "nf4", 4, (Scale(32, columns=64),))
    yield Precision("nf4_dq", "nf4", 4, (Scale(8, columns=64), Scale(32, columns=64 * 256)))

    # OCP microscaling v1.0: an 8-bit power of two for 32 values
    yield Precision("mxfp8", "fp8", 8, (Scale(8, columns=32),))
    yield Precision("mxfp6", "fp6", 6, (Scale(8, columns=32),))
    yield Precision("mxfp4", "fp4", 4, (Scale(8, columns=32),))
    # NVFP4: an fp8 scale for 16 values and an fp32 for the matrix
    yield Precision("nvfp4", "fp4", 4, (Scale(8, columns=16), per_tensor))
    yield Precision("ternary", "int2", 2, (per_tensor,))  # bitnet.cpp i2_s: four weights in a byte

    # KV caches: a scale (and a zero) in 16 bits for each head's vector; KIVI-2 keeps its newest 128 tokens in 16 bits
    yield replace(integer(8), name="int8_head")
    yield replace(integer(4, zero_bits=16), name="int4_head_zero16")
    yield integer(4, 32, zero_bits=16)
    yield replace(integer(2, 32, zero_bits=16), name="kivi2", window=128)
    yield replace(integer(4, 32, zero_bits=16), name="kivi4", window=128)

    # llama.cpp's activations: 32 values with a scale and a sum in fp16 (ggml-common.h)
    yield Precision("q8_1", "int8", 8, (Scale(32, columns=32),))
    yield from (_block_format(name, *layout) for name, layout in GGML_BLOCKS.items())
    yield from map(_mix_body, GGML_MIXES)


PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in _formats()}

# Zero points are stored as the values are, or unquantized in 16 bits.
MOST_ZERO_BITS = 16
_INTEGER = re.compile(r"int([1-8])_(?:g([1-9]\d{0,4})|row)(_zero(\d{1,2})?)?")
_EXL2 = re.compile(r"exl2_(\d+(?:\.\d+)?)")


def get_precision(name: str) -> Precision:
    """The precision called `name`; raises MemboundError for an unknown one.

    Beside those of `PRECISIONS` there are `int4_g64_zero` with any bits, a group below 100,000 and a zero point of at
    most 16 bits, `exl2_4.25` with any bits a weight, and `NAME_sparse24` of each.
    """
    if name in PRECISIONS:
        return PRECISIONS[name]
    dense = name.removesuffix("_sparse24")
    if dense != name and not dense.endswith("_sparse24"):
        return sparse24(get_precision(dense))
    if match := _INTEGER.fullmatch(name):
        bits = int(match[1])
        zero_bits = int(match[4] or bits) if match[3] else 0
        if zero_bits <= MOST_ZERO_BITS and (zero_bits or not match[3]):
            return integer(bits, int(match[2] or 0), zero_bits=zero_bits)
    if (match := _EXL2.fullmatch(name)) and 1 <= float(match[1]) <= 8:
        # ExLlamaV2 mixes 2 to 8 bits a matrix to meet the bits a weight that its user asked for, scales included
        return Precision(name, "int4", float(match[1]))
    close = difflib.get_close_matches(name, PRECISIONS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "give one such as bf16, fp8, int4_g64, q4_k_m or nvfp4"
    raise MemboundError(f"precision {reprlib.repr(name)} is unknown; {hint}")
