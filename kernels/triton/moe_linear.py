"""How is a linear layer of many experts computed, each expert's weights read once for all of its tokens?

Rows are sorted by expert, and a tile belongs to one expert. Which one is found on the GPU from the offsets, so the host
waits for no counts. Weights are the left operand: an expert's few tokens fill the narrow side of the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.routing import Routing
from membound.kernels.triton import check
from membound.kernels.triton.lang import dot, fp8_to, int8_to, mxfp4_to_bf16, segment_of
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_mxfp4 import GROUP as MXFP4_GROUP
from membound.kernels.triton.linear_mxfp4 import PACK_ROWS, Mxfp4Weight

ExpertFormat = Literal["half", "int8", "fp8", "mxfp4"]


@dataclass(frozen=True)
class ExpertWeights:
    """`data` [experts, n, k]: bf16 or fp16 ("half"), or int8, or e4m3 in uint8 with a `scale` [experts, n] (fp32).

    In "mxfp4" both are those of as many `Mxfp4Weight`s of `rows` rows. What an expert computes has its `bias`
    [experts, n] (fp32) added, if there is one.
    """

    format: ExpertFormat
    data: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, n and k."""
        if self.rows is not None:
            return self.data.shape[0], self.rows, self.data.shape[2] * MXFP4_GROUP
        experts, n, k = self.data.shape
        return experts, n, k

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert takes."""
        if self.rows is not None:
            bias_bytes = 0 if self.bias is None else self.bias[0].nbytes
            return self._mxfp4(0).nbytes + bias_bytes
        return sum(part[0].nbytes for part in (self.data, self.scale, self.bias) if part is not None)

    def _mxfp4(self, expert: int) -> Mxfp4Weight:
        assert self.scale is not None and self.rows is not None, "mxfp4 has both"
        return Mxfp4Weight(self.data[expert], self.scale[expert], self.rows)

    def dequantized(self) -> Tensor:
        """[experts, n, k] in fp32."""
        if self.rows is not None:
            return torch.stack([self._mxfp4(expert).dequantized() for expert in range(self.data.shape[0])])
        data = self.data.view(torch.float8_e4m3fn) if self.format == "fp8" else self.data
        return data.float() if self.scale is None else data.float() * self.scale[..., None]


@triton.jit
def moe_linear_kernel(x, data, scale, bias, out, order, offsets, slots, experts, columns, k_size, x_stride,
                      ROWS_A_TOKEN: tl.constexpr, FORMAT: tl.constexpr, FP8_NATIVE: tl.constexpr,
                      EVEN_K: tl.constexpr, PADDED: tl.constexpr, PACK_N: tl.constexpr, STAGES: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of slots of one expert)."""
    tile = tl.program_id(1)
    expert = segment_of(tile, offsets, experts, BLOCK_M, PADDED)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    at = first + tl.arange(0, BLOCK_M)
    here = at < end
    slot = tl.load(order + at, mask=here, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = expert.to(tl.int64) * columns + tl.minimum(n, columns - 1)
    data_at = data + row[:, None] * k_size + k[None, :]
    x_at = x + (slot // ROWS_A_TOKEN)[:, None].to(tl.int64) * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORMAT == "mxfp4":  # as `linear_mxfp4`
        STEP: tl.constexpr = BLOCK_K // 32
        j = tl.arange(0, 16)
        groups = k_size // 32
        inner = tl.minimum(n, columns - 1)
        pack = expert.to(tl.int64) * tl.cdiv(columns, PACK_N) + inner // PACK_N
        packed = pack * groups * PACK_N + inner % PACK_N
        scale_at = scale + pack * tl.cdiv(groups, 4) * PACK_N + inner % PACK_N
        half_at = x + (slot // ROWS_A_TOKEN)[:, None].to(tl.int64) * x_stride + j[None, :]
        for step in tl.range(0, tl.cdiv(groups, STEP), num_stages=STAGES):
            four = tl.load(scale_at + step * STEP // 4 * PACK_N)
            for i in tl.static_range(STEP):
                group = step * STEP + i
                there = group < groups
                byte = tl.load(data + (packed + group * PACK_N)[:, None] * 16 + j[None, :], mask=there, other=0)
                exponent = ((four >> (group % 4 * 8)) & 0xFF)[:, None]
                x_low = tl.load(half_at + group * 32, mask=here[:, None] & there, other=0.0)
                x_high = tl.load(half_at + group * 32 + 16, mask=here[:, None] & there, other=0.0)
                acc = dot(mxfp4_to_bf16(byte & 0xF, exponent), tl.trans(x_low), acc)
                acc = dot(mxfp4_to_bf16(byte >> 4, exponent), tl.trans(x_high), acc)
    else:
        for start in range(0, k_size, BLOCK_K):
            if EVEN_K:
                weight = tl.load(data_at + start)
                token = tl.load(x_at + start, mask=here[:, None], other=0.0)
            else:
                inside = k[None, :] < k_size - start
                weight = tl.load(data_at + start, mask=inside, other=0)
                token = tl.load(x_at + start, mask=here[:, None] & inside, other=0.0)
            if FORMAT == "int8":
                acc = dot(int8_to(weight, token.dtype), tl.trans(token), acc)
            elif FORMAT == "fp8":
                acc = dot(fp8_to(weight, token.dtype, FP8_NATIVE), tl.trans(token), acc)
            else:
                acc = dot(weight, tl.trans(token), acc)
        if FORMAT != "half":
            acc *= tl.load(scale + row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row)[:, None]
    where = out + slot[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(where, tl.trans(acc).to(out.dtype.element_ty), mask=here[:, None] & (n[None, :] < columns))


def moe_linear(
    x: Tensor, weight: ExpertWeights, routing: Routing, *, shared_rows: bool, config: Config | None = None
) -> Tensor:
    """Each slot's row of x times its expert's weight, transposed: [slots, n] in x's dtype, in the order of slots.

    With `shared_rows`, x is [tokens, k] and a token's slots share its row; without, it is [slots, k].
    """
    check.require(weight.format in ("half", "int8", "fp8", "mxfp4"), "weight.format", f"is {weight.format}")
    check.strided("x", x, [None, None], [torch.bfloat16] if weight.format == "mxfp4" else check.HALVES)
    if weight.format == "mxfp4":
        check.require(weight.rows is not None and weight.data.dim() == 5, "weight", "is not one of `Mxfp4Weight`s")
        experts, n, k = weight.shape
        check.require(k == x.shape[1], "x", f"has {x.shape[1]} columns, the weight has {k}")
        tiles_n, groups = -(-n // PACK_ROWS), k // MXFP4_GROUP
        check.tensor("weight.data", weight.data, [experts, tiles_n, groups, PACK_ROWS, 16], [torch.uint8], x)
        check.require(weight.scale is not None, "weight.scale", "is missing, mxfp4 needs it")
        assert weight.scale is not None
        check.tensor("weight.scale", weight.scale, [experts, tiles_n, -(-groups // 4), PACK_ROWS, 4], [torch.uint8], x)
    else:
        stored = {"half": x.dtype, "int8": torch.int8, "fp8": torch.uint8}[weight.format]
        check.tensor("weight.data", weight.data, [None, None, x.shape[1]], [stored], x)
        experts, n, k = weight.shape
    if weight.format in ("int8", "fp8"):
        if weight.scale is None:
            raise ValueError(f"weight.scale: is missing, {weight.format} needs it")
        check.tensor("weight.scale", weight.scale, [experts, n], [torch.float32], x)
    if weight.bias is not None:
        check.tensor("weight.bias", weight.bias, [experts, n], [torch.float32], x)
    slots = routing.order.shape[0]
    rows = slots // routing.top_k if shared_rows else slots
    check.require(x.shape[0] == rows, "x", f"has {x.shape[0]} rows, the routing is of {rows}")
    check.tensor("routing.order", routing.order, [None], [torch.int32], x)
    check.tensor("routing.offsets", routing.offsets, [experts + 1], [torch.int32], x)
    machine = machine_for(x)
    bits = 4 if weight.format == "mxfp4" else 8 * weight.data.itemsize
    config = config or configure("moe_linear", machine, rows_an_expert=-(-slots // experts), bits=bits)
    scale = weight.scale.view(torch.int32) if weight.format == "mxfp4" and weight.scale is not None else weight.scale
    tiles = slots // config.tiles["BLOCK_M"] + experts if slots else 0
    out = torch.empty(slots, n, dtype=x.dtype, device=x.device)
    launch(
        moe_linear_kernel,
        (triton.cdiv(n, config.tiles["BLOCK_N"]), tiles),
        x,
        weight.data,
        scale,
        weight.bias,
        out,
        routing.order,
        routing.offsets,
        slots,
        experts,
        n,
        k,
        x.stride(0),
        config=config,
        ROWS_A_TOKEN=routing.top_k if shared_rows else 1,
        FORMAT=weight.format,
        FP8_NATIVE=machine.has_fp8,
        EVEN_K=k % config.tiles["BLOCK_K"] == 0,
        PADDED=triton.next_power_of_2(experts),
        PACK_N=PACK_ROWS,
        STAGES=config.num_stages,
    )
    return out


@triton.jit
def moe_combine_kernel(slots, weights, out, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        value = tl.load(slots + slot * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        total += value * tl.load(weights + slot)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


def moe_combine(slots: Tensor, routing: Routing) -> Tensor:
    """The weighted sum of each token's slots, [slots, n] to [tokens, n]."""
    tokens, top_k = routing.weights.shape
    check.tensor("slots", slots, [tokens * top_k, None], check.HALVES)
    check.tensor("routing.weights", routing.weights, [tokens, top_k], [torch.float32], slots)
    n = slots.shape[1]
    config = configure("moe_combine", machine_for(slots))
    out = torch.empty(tokens, n, dtype=slots.dtype, device=slots.device)
    grid = (tokens, triton.cdiv(n, config.tiles["BLOCK"]))
    launch(moe_combine_kernel, grid, slots, routing.weights, out, n, config=config, TOP_K=top_k)
    return out


def moe_linear_reference(x: Tensor, weight: ExpertWeights, routing: Routing, *, shared_rows: bool) -> Tensor:
    """The same in fp32, slot by slot."""
    rows = x.float().repeat_interleave(routing.top_k, dim=0) if shared_rows else x.float()
    experts = routing.experts.flatten().long()
    y = torch.einsum("sk,snk->sn", rows, weight.dequantized()[experts])
    return y if weight.bias is None else y + weight.bias[experts]


def moe_linear_bytes(x: Tensor, weight: ExpertWeights, routing: Routing) -> int:
    """Bytes that must move: the weights of every expert that has a token, x once, the slots' results."""
    active = int((routing.offsets.diff() > 0).sum())
    results = routing.order.shape[0] * weight.shape[1] * x.itemsize
    return active * weight.expert_bytes + x.nbytes + results
