"""How do the weights of a mixture's experts lie, and which expert and which slots does a program compute?

Rows are sorted by expert, and a tile belongs to one expert. Which one is found on the GPU from the offsets, so the host
waits for no counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.routing import Routing
from membound.kernels.triton import check
from membound.kernels.triton.lang import segment_of
from membound.kernels.triton.linear_int4 import FEWEST_OF_WORDS, Int4Weight
from membound.kernels.triton.linear_int4 import PACK_ROWS as INT4_ROWS
from membound.kernels.triton.linear_mxfp4 import GROUP as MXFP4_GROUP
from membound.kernels.triton.linear_mxfp4 import PACK_ROWS, Mxfp4Weight
from membound.kernels.triton.linear_w8a8 import BLOCK, Fp8Blocks

ExpertFormat = Literal["half", "int8", "fp8", "fp8_blocks", "int4", "mxfp4"]
FORMATS: tuple[ExpertFormat, ...] = ("half", "int8", "fp8", "fp8_blocks", "int4", "mxfp4")


@dataclass(frozen=True)
class ExpertWeights:
    """`data` [experts, n, k]: bf16 or fp16 ("half"), or int8, or e4m3 in uint8 with a `scale` [experts, n] (fp32).

    In "fp8_blocks", "int4" and "mxfp4" all are those of as many `Fp8Blocks`, `Int4Weight`s or `Mxfp4Weight`s, of the
    last two of `rows` rows. What an expert computes has its `bias` [experts, n] (fp32) added, if there is one.
    """

    format: ExpertFormat
    data: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    rows: int | None = None
    zero: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, n and k."""
        if self.rows is None:
            experts, n, k = self.data.shape
            return experts, n, k
        elements = MXFP4_GROUP if self.format == "mxfp4" else 2 * self.data.itemsize * self.data.shape[4]
        return self.data.shape[0], self.rows, self.data.shape[2] * elements

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert takes."""
        bias_bytes = 0 if self.bias is None else self.bias[0].nbytes
        packed = self._packed(0)
        if packed is not None:
            return packed.nbytes + bias_bytes
        return self.data[0].nbytes + (0 if self.scale is None else self.scale[0].nbytes) + bias_bytes

    def dequantized(self) -> Tensor:
        """[experts, n, k] in fp32."""
        packed = [self._packed(expert) for expert in range(self.data.shape[0])]
        if packed[0] is not None:
            return torch.stack([one.dequantized() for one in packed if one is not None])
        data = self.data.view(torch.float8_e4m3fn) if self.format == "fp8" else self.data
        return data.float() if self.scale is None else data.float() * self.scale[..., None]

    def _packed(self, expert: int) -> Mxfp4Weight | Int4Weight | Fp8Blocks | None:
        """One expert as a weight of its own, where its format has a class."""
        if self.scale is None:
            return None
        data, scale = self.data[expert], self.scale[expert]
        if self.format == "mxfp4":
            assert self.rows is not None, "mxfp4 has them"
            return Mxfp4Weight(data, scale, self.rows)
        if self.format == "int4":
            return Int4Weight(data, scale, None if self.zero is None else self.zero[expert])
        return Fp8Blocks(data, scale, BLOCK) if self.format == "fp8_blocks" else None

    def check(self, halves: torch.dtype, like: Tensor) -> None:
        """Raises ValueError, which names the argument, unless a kernel can read them beside activations in `halves`."""
        check.require(self.format in FORMATS, "weight.format", f"is {self.format}, should be one of {FORMATS}")
        packed = self.format in ("int4", "mxfp4")
        wanted = "five dimensions and its rows" if packed else "three dimensions"
        fits = self.data.dim() == (5 if packed else 3) and (self.rows is not None) == packed
        check.require(fits, "weight.data", f"shape is {list(self.data.shape)}, {self.format} has {wanted}")
        experts, n, k = self.shape
        if self.format in ("half", "int8", "fp8", "fp8_blocks"):
            stored = {"half": halves, "int8": torch.int8}.get(self.format, torch.uint8)
            check.tensor("weight.data", self.data, [experts, n, k], [stored], like)
        if self.format != "half" and self.scale is None:
            raise ValueError(f"weight.scale: is missing, {self.format} needs it")
        parts: list[tuple[str, Tensor | None, Sequence[int | None], Sequence[torch.dtype]]] = []
        groups = self.data.shape[2]
        if self.format == "mxfp4":
            tiles = -(-n // PACK_ROWS)
            parts = [
                ("data", self.data, [experts, tiles, groups, PACK_ROWS, MXFP4_GROUP // 2], [torch.uint8]),
                ("scale", self.scale, [experts, tiles, -(-groups // 4), PACK_ROWS, 4], [torch.uint8]),
            ]
        elif self.format == "int4":
            stored = torch.int16 if k // groups >= FEWEST_OF_WORDS else torch.uint8
            parts = [
                ("data", self.data, [experts, -(-n // INT4_ROWS), groups, INT4_ROWS, None], [stored]),
                ("scale", self.scale, [experts, -(-groups // 2), n, 2], check.HALVES),
                ("zero", self.zero, [experts, -(-groups // 8), n, 4], [torch.uint8]),
            ]
        elif self.format == "fp8_blocks":
            parts = [("scale", self.scale, [experts, -(-n // BLOCK), -(-k // BLOCK)], [torch.float32])]
        elif self.format != "half":
            parts = [("scale", self.scale, [experts, n], [torch.float32])]
        parts.append(("bias", self.bias, [experts, n], [torch.float32]))
        for name, value, shape, dtypes in parts:
            if value is not None:
                check.tensor(f"weight.{name}", value, shape, dtypes, like)


def check_slots(routing: Routing, experts: int, rows: int, shared_rows: bool, like: Tensor) -> int:
    """The number of slots; raises ValueError, which names the argument, where they do not fit x's rows."""
    check.tensor("routing.order", routing.order, [None], [torch.int32], like)
    check.tensor("routing.offsets", routing.offsets, [experts + 1], [torch.int32], like)
    slots = routing.order.shape[0]
    wanted = slots // routing.top_k if shared_rows else slots
    check.require(rows == wanted, "x", f"has {rows} rows, the routing is of {wanted}")
    return slots


@triton.jit
def expert_tile(order, offsets, experts, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of tile program_id(1): its expert, whether it has slots, which of its BLOCK_M are real, and all of them."""
    tile = tl.program_id(1)
    expert = segment_of(tile, offsets, experts, BLOCK_M, PADDED)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    at = first + tl.arange(0, BLOCK_M)
    here = at < end
    return expert.to(tl.int64), first < end, here, tl.load(order + at, mask=here, other=0)


@triton.jit
def store_slots(out, acc, bias, expert, slot, here, n, columns):
    """Writes acc [N, M] and the expert's bias to the rows of `out` [slots, columns] that are `here`."""
    row = expert * columns + tl.minimum(n, columns - 1)
    if bias is not None:
        acc += tl.load(bias + row)[:, None]
    where = out + slot[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(where, tl.trans(acc).to(out.dtype.element_ty), mask=here[:, None] & (n[None, :] < columns))
