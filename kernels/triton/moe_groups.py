"""How are the experts of a mixture multiplied whose scales are of groups or of blocks of their weights?

Each program multiplies a tile of one expert's slots as `linear_int4` and `linear_fp8_blocks` multiply a tile of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.routing import Routing
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_int4 import PACK_ROWS, int4_products
from membound.kernels.triton.linear_w8a8 import BLOCK, Fp8Blocks, fp8_blocks_products
from membound.kernels.triton.moe_experts import ExpertWeights, expert_tile, store_slots
from membound.kernels.triton.overlap import follow


@triton.jit(do_not_specialize=["experts"])
def moe_linear_int4_kernel(x, data, scale, zero, bias, out, order, offsets, experts, columns, groups, x_stride,
                    ROWS_A_TOKEN: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, PACK_N: tl.constexpr,
                    SCALE_BF16: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, PADDED: tl.constexpr,
                    OVERLAP: tl.constexpr,
                    STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of slots of one expert)."""
    follow(OVERLAP)
    expert, busy, here, slot = expert_tile(order, offsets, experts, PADDED, BLOCK_M)
    if not busy:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    PART: tl.constexpr = GROUP // LANES
    j = tl.arange(0, PART)
    row = tl.minimum(n, columns - 1)
    pack = expert * tl.cdiv(columns, PACK_N) + row // PACK_N
    words_at = data + (pack * groups * PACK_N + row % PACK_N)[:, None] * PART + j[None, :]
    x_at = x + (slot // ROWS_A_TOKEN)[:, None].to(tl.int64) * x_stride + j[None, :]
    scale_at = scale + expert * tl.cdiv(groups, 2) * columns + row
    zero_at = zero
    if zero is not None:
        zero_at = zero + expert * tl.cdiv(groups, 8) * columns + row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = int4_products(acc, x_at, here, words_at, scale_at, zero_at, 0, tl.cdiv(groups, 2), columns, groups,
                        GROUP, LANES, PACK_N, SCALE_BF16, EVEN, WIDEN, STAGES)  # fmt: skip
    store_slots(out, acc, bias, expert, slot, here, n, columns)


@triton.jit(do_not_specialize=["experts"])
def moe_linear_fp8_blocks_kernel(x, x_scale, data, scale, bias, out, order, offsets, experts, columns, k_size, blocks,
                          x_stride, ROWS_A_TOKEN: tl.constexpr, WIDEN: tl.constexpr, EVEN_K: tl.constexpr,
                          SCALE_BLOCK: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
                          OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of slots of one expert); without `x_scale`, x and the products are halves."""
    follow(OVERLAP)
    expert, busy, here, slot = expert_tile(order, offsets, experts, PADDED, BLOCK_M)
    if not busy:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, SCALE_BLOCK)
    row = tl.minimum(n, columns - 1)
    token = (slot // ROWS_A_TOKEN).to(tl.int64)  # of a slot that is not there the first, which is not stored
    data_at = data + (expert * columns + row)[:, None] * k_size + k[None, :]
    x_at = x + token[:, None] * x_stride + k[None, :]
    scale_at = scale + (expert * tl.cdiv(columns, SCALE_BLOCK) + row // SCALE_BLOCK) * blocks
    x_scale_at = x_scale
    if x_scale is not None:
        x_scale_at = x_scale + token * blocks
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = fp8_blocks_products(acc, x_at, x_scale_at, data_at, scale_at, 0, blocks, k_size,
                              WIDEN, EVEN_K, SCALE_BLOCK, STAGES)  # fmt: skip
    store_slots(out, acc, bias, expert, slot, here, n, columns)


def start_int4(
    x: Tensor, weight: ExpertWeights, routing: Routing, out: Tensor, rows_a_token: int, config: Config | None
) -> None:
    """Launches the product of x with experts in int4, whose arguments were checked."""
    assert weight.scale is not None, "it was checked"
    (experts, n, _), groups, slots = weight.shape, weight.data.shape[2], routing.order.shape[0]
    machine = machine_for(x)
    config = config or configure("moe_int4", machine, rows_an_expert=-(-slots // experts))
    launch(
        moe_linear_int4_kernel,
        _grid(n, slots, experts, config),
        x,
        weight.data,
        weight.scale.view(torch.int32),
        None if weight.zero is None else weight.zero.view(torch.int32),
        weight.bias,
        out,
        routing.order,
        routing.offsets,
        experts,
        n,
        groups,
        x.stride(0),
        config=config,
        ROWS_A_TOKEN=rows_a_token,
        GROUP=weight.shape[2] // groups,
        LANES=2 * weight.data.itemsize,
        PACK_N=PACK_ROWS,
        SCALE_BF16=weight.scale.dtype == torch.bfloat16,
        EVEN=groups % 2 == 0,
        WIDEN=machine.widening,
        PADDED=triton.next_power_of_2(experts),
        STAGES=config.num_stages,
    )


def start_fp8_blocks(
    x: Tensor | Fp8Blocks, weight: ExpertWeights, routing: Routing, out: Tensor, rows_a_token: int,
    config: Config | None,
) -> None:  # fmt: skip
    """Launches the product of x, in halves or with a scale for each 128 elements, with experts in blocks of fp8."""
    (experts, n, k), slots = weight.shape, routing.order.shape[0]
    data, x_scale = (x.data, x.scale) if isinstance(x, Fp8Blocks) else (x, None)
    machine = machine_for(data)
    config = config or configure("moe_fp8_blocks", machine, rows_an_expert=-(-slots // experts))
    launch(
        moe_linear_fp8_blocks_kernel,
        _grid(n, slots, experts, config),
        data,
        x_scale,
        weight.data,
        weight.scale,
        weight.bias,
        out,
        routing.order,
        routing.offsets,
        experts,
        n,
        k,
        -(-k // BLOCK),
        data.stride(0),
        config=config,
        ROWS_A_TOKEN=rows_a_token,
        WIDEN=machine.widening,
        EVEN_K=k % BLOCK == 0,
        SCALE_BLOCK=BLOCK,
        PADDED=triton.next_power_of_2(experts),
        STAGES=config.num_stages,
    )


def _grid(n: int, slots: int, experts: int, config: Config) -> tuple[int, int]:
    tiles = slots // config.tiles["BLOCK_M"] + experts if slots else 0
    return triton.cdiv(n, config.tiles["BLOCK_N"]), tiles
