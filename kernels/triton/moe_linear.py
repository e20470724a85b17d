"""How is a linear layer of many experts computed, each expert's weights read once for all of its tokens?

Weights are the left operand: an expert's few tokens fill the narrow side of the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.routing import Routing
from membound.kernels.triton import check
from membound.kernels.triton.lang import dot, power_of_two
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_mxfp4 import PACK_ROWS
from membound.kernels.triton.linear_w8a8 import BLOCK, Fp8Blocks
from membound.kernels.triton.moe_experts import ExpertWeights, check_slots, expert_tile, store_slots
from membound.kernels.triton.moe_groups import start_fp8_blocks, start_int4
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.widen import e2m1_to_bf16, fp8_to, int8_to


@triton.jit(do_not_specialize=["experts"])
def moe_linear_kernel(x, data, scale, bias, out, order, offsets, experts, columns, k_size, x_stride,
                      OVERLAP: tl.constexpr, ROWS_A_TOKEN: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                      EVEN_K: tl.constexpr, PADDED: tl.constexpr, PACK_N: tl.constexpr, STAGES: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of slots of one expert)."""
    follow(OVERLAP)
    expert, busy, here, slot = expert_tile(order, offsets, experts, PADDED, BLOCK_M)
    if not busy:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = expert * columns + tl.minimum(n, columns - 1)
    data_at = data + row[:, None] * k_size + k[None, :]
    x_at = x + (slot // ROWS_A_TOKEN)[:, None].to(tl.int64) * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORMAT == "mxfp4":  # as `linear_mxfp4`
        STEP: tl.constexpr = BLOCK_K // 32
        j = tl.arange(0, 16)
        groups = k_size // 32
        inner = tl.minimum(n, columns - 1)
        pack = expert * tl.cdiv(columns, PACK_N) + inner // PACK_N
        packed = pack * groups * PACK_N + inner % PACK_N
        scale_at = scale + pack * tl.cdiv(groups, 4) * PACK_N + inner % PACK_N
        nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        half_at = x + (slot // ROWS_A_TOKEN)[:, None].to(tl.int64) * x_stride + j[None, :]
        for step in tl.range(0, tl.cdiv(groups, STEP), num_stages=STAGES):
            four = tl.load(scale_at + step * STEP // 4 * PACK_N)
            for i in tl.static_range(STEP):
                group = step * STEP + i
                there = group < groups
                byte = tl.load(data + (packed + group * PACK_N)[:, None] * 16 + j[None, :], mask=there, other=0)
                scales = power_of_two((four >> (group % 4 * 8)) & 0xFF)
                x_low = tl.load(half_at + group * 32, mask=here[:, None] & there, other=0.0)
                x_high = tl.load(half_at + group * 32 + 16, mask=here[:, None] & there, other=0.0)
                part = dot(e2m1_to_bf16(byte, False, WIDEN), tl.trans(x_low), nothing)
                acc += dot(e2m1_to_bf16(byte, True, WIDEN), tl.trans(x_high), part) * scales[:, None]
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
                acc = dot(int8_to(weight, token.dtype, WIDEN), tl.trans(token), acc)
            elif FORMAT == "fp8":
                acc = dot(fp8_to(weight, token.dtype, WIDEN), tl.trans(token), acc)
            else:
                acc = dot(weight, tl.trans(token), acc)
        if FORMAT != "half":
            acc *= tl.load(scale + row)[:, None]
    store_slots(out, acc, bias, expert, slot, here, n, columns)


def moe_linear(
    x: Tensor | Fp8Blocks,
    weight: ExpertWeights,
    routing: Routing,
    *,
    shared_rows: bool,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """Each slot's row of x times its expert's weight, transposed: [slots, n] in the order of slots.

    With `shared_rows`, x is [tokens, k] and a token's slots share its row; without, it is [slots, k]. It is in halves,
    and the result in its type, or for experts in blocks of fp8 with a scale for each 128 elements and given a `dtype`.
    """
    if isinstance(x, Fp8Blocks):
        check.require(weight.format == "fp8_blocks", "x", f"is in fp8, the experts in {weight.format}")
        check.require(dtype in check.HALVES, "dtype", f"is {dtype}, should be torch.bfloat16 or torch.float16")
        check.require(x.rows_a_block == 1, "x.rows_a_block", f"is {x.rows_a_block}, should be 1")
        check.tensor("x.data", x.data, [None, None], [torch.uint8])
        check.tensor("x.scale", x.scale, [x.data.shape[0], -(-x.data.shape[1] // BLOCK)], [torch.float32], x.data)
    else:
        check.strided("x", x, [None, None], [torch.bfloat16] if weight.format == "mxfp4" else check.HALVES)
        check.require(dtype in (None, x.dtype), "dtype", f"is {dtype}, should be x's {x.dtype}")
    rows = x.data if isinstance(x, Fp8Blocks) else x
    halves = dtype or rows.dtype
    weight.check(halves, rows)
    experts, n, k = weight.shape
    check.require(rows.shape[1] == k, "x", f"has {rows.shape[1]} columns, the weight has {k}")
    slots = check_slots(routing, experts, rows.shape[0], shared_rows, rows)
    out = torch.empty(slots, n, dtype=halves, device=rows.device)
    rows_a_token = routing.top_k if shared_rows else 1
    if weight.format == "fp8_blocks":
        start_fp8_blocks(x, weight, routing, out, rows_a_token, config)
        return out
    assert isinstance(x, Tensor), "it was checked"
    if weight.format == "int4":
        start_int4(x, weight, routing, out, rows_a_token, config)
        return out
    machine = machine_for(x)
    bits = 4 if weight.format == "mxfp4" else 8 * weight.data.itemsize
    config = config or configure("moe_linear", machine, rows_an_expert=-(-slots // experts), bits=bits)
    scale = weight.scale.view(torch.int32) if weight.format == "mxfp4" and weight.scale is not None else weight.scale
    tiles = slots // config.tiles["BLOCK_M"] + experts if slots else 0
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
        experts,
        n,
        k,
        x.stride(0),
        config=config,
        ROWS_A_TOKEN=rows_a_token,
        FORMAT=weight.format,
        WIDEN=machine.widening,
        EVEN_K=k % config.tiles["BLOCK_K"] == 0,
        PADDED=triton.next_power_of_2(experts),
        PACK_N=PACK_ROWS,
        STAGES=config.num_stages,
    )
    return out


@triton.jit
def moe_combine_kernel(slots, weights, out, columns, OVERLAP: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns)."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        weight = tl.load(weights + slot)
        value = tl.load(slots + slot * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        total += tl.where(weight == 0.0, 0.0, value * weight)  # what no expert was asked for nobody wrote
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


def moe_combine(slots: Tensor, routing: Routing) -> Tensor:
    """The weighted sum of each token's slots, [slots, n] to [tokens, n]."""
    check.tensor("routing.weights", routing.weights, [None, None], [torch.float32])
    tokens, top_k = routing.weights.shape
    check.tensor("slots", slots, [tokens * top_k, None], check.HALVES, routing.weights)
    n = slots.shape[1]
    config = configure("moe_combine", machine_for(slots))
    out = torch.empty(tokens, n, dtype=slots.dtype, device=slots.device)
    grid = (tokens, triton.cdiv(n, config.tiles["BLOCK"]))
    launch(moe_combine_kernel, grid, slots, routing.weights, out, n, config=config, TOP_K=top_k)
    return out


def moe_linear_reference(
    x: Tensor | Fp8Blocks, weight: ExpertWeights, routing: Routing, *, shared_rows: bool
) -> Tensor:
    """The same in fp32, slot by slot."""
    rows = x.dequantized() if isinstance(x, Fp8Blocks) else x.float()
    rows = rows.repeat_interleave(routing.top_k, dim=0) if shared_rows else rows
    experts = routing.experts.flatten().long()
    y = torch.einsum("sk,snk->sn", rows, weight.dequantized()[experts])
    return y if weight.bias is None else y + weight.bias[experts]


def moe_linear_bytes(x: Tensor | Fp8Blocks, weight: ExpertWeights, routing: Routing) -> int:
    """Bytes that must move: the weights of every expert that has a token, x once, the slots' results in halves."""
    active = int((routing.offsets.diff() > 0).sum())
    results = routing.order.shape[0] * weight.shape[1] * 2
    return active * weight.expert_bytes + x.nbytes + results
