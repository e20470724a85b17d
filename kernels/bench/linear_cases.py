"""With which weights and batch sizes are the matrix products checked and timed?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench import peers
from membound.kernels.bench.trial import Case, Comparison, Inputs, Math, Trial, fp8_product, product
from membound.kernels.triton.activation import QuantizedRows
from membound.kernels.triton.linear_byte import (
    ByteFormat,
    ByteWeight,
    linear_byte,
    linear_byte_reference,
)
from membound.kernels.triton.linear_half import linear_half, linear_half_reference
from membound.kernels.triton.linear_int4 import (
    Int4Weight,
    linear_int4,
    linear_int4_reference,
)
from membound.kernels.triton.linear_int8 import (
    Int8Weight,
    linear_int8,
    linear_int8_reference,
)
from membound.kernels.triton.linear_mxfp4 import (
    Mxfp4Weight,
    linear_mxfp4,
    linear_mxfp4_reference,
)
from membound.kernels.triton.linear_sparse import (
    SparseWeight,
    linear_sparse,
    linear_sparse_reference,
)
from membound.kernels.triton.linear_w4a8 import linear_w4a8, linear_w4a8_reference, step_of
from membound.kernels.triton.linear_w8a8 import (
    Fp8Blocks,
    linear_fp8_blocks,
    linear_fp8_blocks_reference,
    linear_w8a8,
    linear_w8a8_reference,
)
from membound.kernels.triton.moved import rounded_bytes, weight_only_bytes
from membound.kernels.triton.round_rows import round_steps

Shape = tuple[int, int]  # n, k
DOWN_8B: Shape = (4096, 14336)  # Llama-3.1-8B's down projection
ODD: Shape = (130, 384)
PRODUCTS: dict[bool, Math] = {True: "fp8", False: "bf16"}  # of fp8 weights, by whether the inputs are rounded as well


def _int4(inputs: Inputs, m: int, shape: Shape, group: int, *, symmetric: bool) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Int4Weight.quantize(inputs.normal(n, k), group, symmetric=symmetric)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_int4_reference(x, weight))]

    beside = {
        "cuBLAS bf16": partial(peers.dense, x, n),
        "tinygemm (torchao)": partial(peers.tinygemm_int4, x, n, group),
        "Marlin": partial(peers.marlin_int4, x, n, group),
    }
    return Trial(lambda: linear_int4(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _half(inputs: Inputs, m: int, shape: Shape) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = inputs.normal(n, k)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_half_reference(x, weight))]

    beside = {"cuBLAS": partial(peers.dense, x, n)}
    return Trial(lambda: linear_half(x, weight), compare, weight.nbytes + 2 * m * (n + k), 2 * m * n * k, peers=beside)


def _w4a8(inputs: Inputs, m: int, shape: Shape, group: int, *, symmetric: bool) -> Trial:
    (n, k), step = shape, step_of(group)
    x = round_steps(inputs.normal(m, k), step)
    weight = Int4Weight.quantize(inputs.normal(n, k), group, symmetric=symmetric, lanes=2)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_w4a8_reference(x, weight))]

    nbytes, flops = rounded_bytes(x, weight), 2 * m * n * k
    return Trial(lambda: linear_w4a8(x, weight, torch.bfloat16), compare, nbytes, flops, "int8")


def _int8(inputs: Inputs, m: int, shape: Shape, group: int) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Int8Weight.quantize(inputs.normal(n, k), group)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_int8_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_int8(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _byte(inputs: Inputs, format: ByteFormat, m: int, shape: Shape) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = ByteWeight.quantize(inputs.normal(n, k), format)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_byte_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_byte(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _mxfp4(inputs: Inputs, m: int, shape: Shape) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Mxfp4Weight.quantize(inputs.normal(n, k))

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_mxfp4_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_mxfp4(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _sparse(inputs: Inputs, m: int, shape: Shape) -> Trial:
    """FLOPs are those of the values that are there: half of the dense product's."""
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = SparseWeight.prune(inputs.normal(n, k))

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_sparse_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_sparse(x, weight), compare, weight_only_bytes(m, weight), m * n * k, peers=beside)


def _w8a8(inputs: Inputs, format: ByteFormat, m: int, shape: Shape, *, whole_step: bool = False) -> Trial:
    n, k = shape
    x = (QuantizedRows.of_step if whole_step else QuantizedRows.of)(inputs.normal(m, k), format)
    weight = ByteWeight.quantize(inputs.normal(n, k), format)

    def compare(y: Tensor) -> list[Comparison]:
        same = product if format == "int8" else fp8_product
        return [same(y, linear_w8a8_reference(x, weight))]

    peer = (
        {"torch._int_mm": partial(peers.int_mm, x.data, weight.data)}
        if format == "int8"
        else {"torch._scaled_mm": partial(peers.scaled_mm, x.data, x.scale.expand(m), weight.data, weight.scale)}
    )
    return Trial(
        lambda: linear_w8a8(x, weight, torch.bfloat16),
        compare,
        rounded_bytes(x, weight),
        2 * m * n * k,
        format,
        peer,
    )


def _fp8_blocks(inputs: Inputs, m: int, shape: Shape, *, rounded: bool = True) -> Trial:
    (n, k), halves = shape, inputs.normal(m, shape[1])
    x, weight = Fp8Blocks.quantize(halves, 1) if rounded else halves, Fp8Blocks.quantize(inputs.normal(n, k), 128)

    def compare(y: Tensor) -> list[Comparison]:
        same = fp8_product if rounded else product
        return [same(y, linear_fp8_blocks_reference(x, weight))]

    nbytes, multiplied = rounded_bytes(x, weight), PRODUCTS[rounded]
    return Trial(lambda: linear_fp8_blocks(x, weight, torch.bfloat16), compare, nbytes, 2 * m * n * k, multiplied)


BYTE_FORMATS: tuple[ByteFormat, ...] = ("int8", "fp8")
LARGE_BYTE: tuple[tuple[ByteFormat, int], ...] = (
    ("int8", 1),
    ("int8", 16),
    ("int8", 64),
    ("int8", 512),
    ("fp8", 1),
    ("fp8", 16),
)

CASES = [
    *(Case("linear_half", f"m {m}", partial(_half, m=m, shape=(130, 300)), True) for m in (1, 5)),
    *(Case("linear_half", f"4096x14336, m {m}", partial(_half, m=m, shape=DOWN_8B)) for m in (1, 4, 8)),
    Case("linear_half", "6144x4096, m 1", partial(_half, m=1, shape=(6144, 4096))),
    *(
        Case("linear_int4", f"{words}, m {m}", partial(_int4, m=m, shape=ODD, group=128, symmetric=symmetric), True)
        for words, symmetric in (("symmetric", True), ("with zeros", False))
        for m in (3, 40)
    ),
    *(
        Case("linear_byte", f"{f}, m {m}", partial(_byte, format=f, m=m, shape=(130, 150)), True)
        for f in BYTE_FORMATS
        for m in (3, 40)
    ),
    *(
        Case(
            "linear_w4a8",
            f"group {group}, m {m}",
            partial(_w4a8, m=m, shape=(130, 768), group=group, symmetric=m == 3),
            True,
        )
        for group, m in ((64, 3), (128, 40), (256, 3))
    ),
    *(
        Case("linear_int8", f"group {group}, m {m}", partial(_int8, m=m, shape=ODD, group=group), True)
        for group, m in ((32, 3), (64, 40), (128, 5))
    ),
    Case("linear_mxfp4", "m 5", partial(_mxfp4, m=5, shape=ODD), True),
    Case("linear_sparse", "m 5", partial(_sparse, m=5, shape=(70, 300)), True),
    *(Case("linear_w8a8", f"{f}, m 5", partial(_w8a8, format=f, m=5, shape=(130, 150)), True) for f in BYTE_FORMATS),
    Case(
        "linear_w8a8",
        "fp8 with one scale, m 5",
        partial(_w8a8, format="fp8", m=5, shape=(130, 150), whole_step=True),
        True,
    ),
    Case("linear_fp8_blocks", "m 5", partial(_fp8_blocks, m=5, shape=(130, 300)), True),
    Case("linear_fp8_blocks", "of halves, m 5", partial(_fp8_blocks, m=5, shape=(130, 300), rounded=False), True),
    *(
        Case(
            "linear_int4",
            f"4096x14336, group 128, m {m}",
            partial(_int4, m=m, shape=DOWN_8B, group=128, symmetric=True),
        )
        for m in (1, 4, 16, 32, 64, 256)
    ),
    Case(
        "linear_int4",
        "4096x14336, group 128, zeros, m 16",
        partial(_int4, m=16, shape=DOWN_8B, group=128, symmetric=False),
    ),
    *(
        Case("linear_byte", f"{f} 4096x14336, m {m}", partial(_byte, format=f, m=m, shape=DOWN_8B))
        for f, m in LARGE_BYTE
    ),
    *(
        Case(
            "linear_w4a8",
            f"4096x14336, group 128, m {m}",
            partial(_w4a8, m=m, shape=DOWN_8B, group=128, symmetric=True),
        )
        for m in (1, 16, 64, 512)
    ),
    *(
        Case("linear_int8", f"4096x14336, group 32, m {m}", partial(_int8, m=m, shape=DOWN_8B, group=32))
        for m in (1, 16, 64)
    ),
    *(Case("linear_mxfp4", f"4096x14336, m {m}", partial(_mxfp4, m=m, shape=DOWN_8B)) for m in (1, 64)),
    *(Case("linear_sparse", f"4096x14336, m {m}", partial(_sparse, m=m, shape=DOWN_8B)) for m in (1, 64)),
    *(
        Case("linear_w8a8", f"{f} 4096x14336, m {m}", partial(_w8a8, format=f, m=m, shape=DOWN_8B))
        for f in BYTE_FORMATS
        for m in (32, 4096)
    ),
    *(Case("linear_fp8_blocks", f"4096x14336, m {m}", partial(_fp8_blocks, m=m, shape=DOWN_8B)) for m in (32, 4096)),
    *(
        Case(
            "linear_fp8_blocks", f"4096x14336 of halves, m {m}", partial(_fp8_blocks, m=m, shape=DOWN_8B, rounded=False)
        )
        for m in (1, 16)
    ),
]
