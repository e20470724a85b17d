"""How does a layer's short convolution take the new tokens of a sequence, and keep the inputs before them?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.steps import FLOATS, Steps, span_of


@triton.jit
def short_conv_kernel(x, state, slots, query_start, positions, weight, bias, out, x_stride, state_stride, channels,
                      WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (sequence, BLOCK channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sequence)
    first, end, fresh = span_of(query_start, positions, sequence)
    if (slot < 0) | (first >= end):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < channels
    kept = state + slot * state_stride + c
    old = here & (fresh == 0)
    offset = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        offset += tl.load(bias + c, mask=here, other=0.0)
    for token in range(first, end):
        y = offset
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            new = tl.load(x + source * x_stride + c, mask=here & (source >= first), other=0.0).to(tl.float32)
            place = source - first + (WIDTH - 1)
            before = tl.load(kept + place * channels, mask=old & (source < first), other=0.0)
            y += (new + before) * tl.load(weight + c * WIDTH + tap, mask=here, other=0.0)
        tl.store(out + token * channels + c, y * tl.sigmoid(y), mask=here)
    # A place takes what stands at a later one. Which thread reads a channel and which one writes it is the compiler's
    # choice, so all wait until it was read.
    for tap in tl.static_range(WIDTH - 1):
        source = end - (WIDTH - 1) + tap
        new = tl.load(x + source * x_stride + c, mask=here & (source >= first), other=0.0).to(tl.float32)
        place = source - first + (WIDTH - 1)
        before = tl.load(kept + place * channels, mask=old & (source < first), other=0.0)
        tl.debug_barrier()
        tl.store(kept + tap * channels, new + before, mask=here)


def short_conv(
    x: Tensor,
    state: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    steps: Steps | None = None,
) -> Tensor:
    """SiLU of the causal convolution of x [tokens, channels] by `weight` [channels, width] (fp32): fp32.

    `state` [slots, width - 1, channels] (fp32) holds the inputs before, and changes in place; sequence i has slot
    `slots[i]` (int64), or if that is negative none: its result is then 0. It brings the i-th token, or those that
    `steps` says. x's first dimension may have gaps.
    """
    check.strided("x", x, [None, None], FLOATS)
    tokens, channels = x.shape
    check.tensor("weight", weight, [channels, None], [torch.float32], x)
    width = weight.shape[1]
    check.require(width > 1, "weight", f"has {width} taps, should have at least 2")
    check.strided("state", state, [None, width - 1, channels], [torch.float32], x)
    if bias is not None:
        check.tensor("bias", bias, [channels], [torch.float32], x)
    sequences = Steps.checked(slots, steps, tokens, x)
    config = configure("short_conv", machine_for(x))
    out = torch.zeros(tokens, channels, dtype=torch.float32, device=x.device)
    launch(
        short_conv_kernel,
        (sequences, triton.cdiv(channels, config.tiles["BLOCK"])),
        x,
        state,
        slots,
        *Steps.pointers(steps),
        weight,
        bias,
        out,
        x.stride(0),
        state.stride(0),
        channels,
        config=config,
        WIDTH=width,
    )
    return out


def short_conv_reference(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the new state of sequences that bring a token x [sequences, channels] each, in fp32."""
    whole = torch.cat([state.float(), x.float()[:, None]], dim=1)  # [sequences, width, channels]
    y = torch.einsum("swc,cw->sc", whole, weight)
    return functional.silu(y if bias is None else y + bias), whole[:, 1:]


def short_conv_bytes(x: Tensor, state: Tensor, weight: Tensor) -> int:
    """Bytes that must move in decode: x in, y out, each sequence's inputs before in and out, the weight once."""
    return x.nbytes + 4 * x.numel() + 2 * x.shape[0] * state[0].nbytes + weight.nbytes
