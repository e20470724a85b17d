"""How are the heads of q and of k normed where they lie in a projection's rows, by one launch?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.rms_norm import WIDEST
from membound.kernels.triton.steps import FLOATS


@triton.jit
def head_norm_kernel(x, weight, x_stride, heads, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                     OVERLAP: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Program (token, BLOCK_R of its heads)."""
    follow(OVERLAP)
    head = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (column < WIDTH)
    at = x + tl.program_id(0).to(tl.int64) * x_stride + head[:, None] * WIDTH + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    gain = tl.load(weight + (head % GROUPS)[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (value * inverse[:, None] * gain).to(x.dtype.element_ty), mask=inside)


def head_norm(x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
    """RMS-norms in place `heads` pieces of each row of x [tokens, width], side by side from column `first` on.

    Piece i is multiplied with row i % groups of `weight` [groups, piece]. x's first dimension may have gaps.
    """
    check.strided("x", x, [None, None], FLOATS)
    check.tensor("weight", weight, [None, None], FLOATS, x)
    groups, width = weight.shape
    check.require(groups > 0 and 0 < width <= WIDEST, "weight", f"{groups} of {width} are none or wider than {WIDEST}")
    inside = first >= 0 and heads >= 0 and first + heads * width <= x.shape[1]
    check.require(inside, "heads", f"{heads} of {width} from column {first} on are beyond x's {x.shape[1]}")
    config = configure("rms_norm", machine_for(x), width=width)
    launch(
        head_norm_kernel,
        (x.shape[0], triton.cdiv(heads, config.tiles["BLOCK_R"])),
        x[:, first:],
        weight,
        x.stride(0),
        heads,
        eps,
        config=config,
        GROUPS=groups,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )


def head_norm_reference(x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> Tensor:
    """x with its pieces normed, in fp32."""
    groups, width = weight.shape
    normed = x.float().clone()
    pieces = normed[:, first : first + heads * width].unflatten(1, (-1, width))
    own = weight.float()[torch.arange(heads, device=x.device) % groups]
    pieces.copy_(pieces * torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps) * own)
    return normed


def head_norm_bytes(x: Tensor, heads: int, weight: Tensor) -> int:
    """Bytes that must move: the pieces in and out, the weights once."""
    return 2 * x.shape[0] * heads * weight.shape[-1] * x.itemsize + weight.nbytes
