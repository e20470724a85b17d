"""How do weights lie for the Triton kernels, one by one and as the experts of a mixture?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from membound.kernels.base import PackedWeight, WeightFormat
from membound.kernels.quantize import Packer, checked_bits, codes_of, finite_half
from membound.kernels.routing import Routing
from membound.kernels.triton.linear_int4 import GROUPS, Int4Weight
from membound.kernels.triton.linear_int8 import GROUPS as INT8_GROUPS
from membound.kernels.triton.linear_int8 import Int8Weight
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight
from membound.kernels.triton.linear_sparse import SparseWeight
from membound.kernels.triton.linear_w4a8 import GROUPS as W4A8_GROUPS
from membound.kernels.triton.moe_experts import ExpertFormat, ExpertWeights
from membound.kernels.triton.moe_linear import moe_linear
from membound.kernels.triton.round_rows import round_blocks


@dataclass(frozen=True, eq=False)
class TritonWeight(PackedWeight):
    """The parts of Triton's `Int4Weight` (offset: its zero), `Int8Weight`, `SparseWeight` (kept: its places) or
    `Mxfp4Weight`.

    They lie in another order than a plain weight's of the same format.
    """


@dataclass(frozen=True, eq=False)
class TritonFp8(PackedWeight):
    """e4m3 with a scale a block, or whose inputs are rounded to e4m3 as well; see `Kernels.pack_fp8`."""

    rounds_inputs: bool = False
    whole_step: bool = False


class TritonPacker(Packer):
    """Plain layouts, but int4 and 2:4 as their Triton kernels read them where they can."""

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        n, k = codes.shape
        checked_bits(codes, format)
        group_size = k // scale.shape[1] if scale.dim() == 2 and scale.shape[1] else 0
        if format == "int8" and zero is None and group_size in INT8_GROUPS and group_size * scale.shape[1] == k:
            grouped = Int8Weight.pack(codes.to(torch.int8), finite_half(scale))
            return TritonWeight(format, grouped.data, grouped.scale, None, group_size, (n, k))
        whole = zero is None or bool((zero == zero.round()).all() and (zero >= 0).all() and (zero <= 15).all())
        groups = {"int4": GROUPS, "w4a8": W4A8_GROUPS}.get(format, ())
        if group_size not in groups or group_size * scale.shape[1] != k or not whole:
            return super().pack_codes(codes, scale, zero, format)
        zeros = None if zero is None else zero.to(torch.uint8)
        lanes = 2 if format == "w4a8" else None  # a quarter of a group fills no tensor core with bytes
        own = Int4Weight.pack(codes.to(torch.uint8), finite_half(scale), zeros, lanes=lanes)
        return TritonWeight(format, own.data, own.scale, own.zero, group_size, (n, k))

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        plain = super().pack_gguf(raw, type, shape)
        if type not in ("Q4_0", "Q8_0"):
            return plain
        assert plain.scale is not None, "it has a scale for each 32 codes"
        return self.pack_codes(codes_of(plain), plain.scale, None, plain.format)

    def _mxfp4(self, weight: Tensor) -> PackedWeight:
        own = Mxfp4Weight.quantize(weight)
        return TritonWeight("mxfp4", own.data, own.scale, size=own.shape)

    def _sparse24(self, weight: Tensor) -> PackedWeight:
        own = SparseWeight.prune(weight.to(torch.bfloat16))
        return TritonWeight("sparse24", own.values, size=own.shape, kept=own.places)


# How the experts of a mixture are multiplied together, by the format of their weights: of plain ones, a scale a row.
PLAIN_EXPERTS: dict[WeightFormat, ExpertFormat] = {"bf16": "half", "int8": "int8", "fp8": "fp8"}
PACKED_EXPERTS: dict[WeightFormat, ExpertFormat] = {"int4": "int4", "mxfp4": "mxfp4"}


def expert_format(weight: PackedWeight) -> ExpertFormat | None:
    """How experts of such weights are multiplied together; None where each is multiplied alone."""
    if isinstance(weight, TritonFp8):
        return "fp8_blocks" if weight.scale is not None and weight.scale.dim() == 2 else None
    if isinstance(weight, TritonWeight):
        return PACKED_EXPERTS.get(weight.format)
    plain = weight.group_size is None and weight.data.dim() == 2
    return PLAIN_EXPERTS.get(weight.format) if plain else None


def kind_of(weight: PackedWeight) -> tuple[object, ...]:
    """What must be the same of weights that lie behind each other."""
    parts = (weight.data, weight.scale, weight.offset)
    shapes = tuple(None if part is None else (part.shape, part.dtype) for part in parts)
    return type(weight), weight.format, weight.shape, weight.group_size, getattr(weight, "rounds_inputs", False), shapes


@dataclass(frozen=True, eq=False)
class TritonExperts:
    """The linear layers of a mixture's experts in one piece of memory, of which `weights` are parts."""

    together: ExpertWeights
    weights: tuple[PackedWeight, ...]

    @classmethod
    def of(
        cls, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None, format: ExpertFormat
    ) -> TritonExperts:
        """Copies the experts' weights, which are alike, behind each other."""

        def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
            there = [part for part in parts if part is not None]
            return torch.stack(there) if there else None

        data = torch.stack([weight.data for weight in weights])
        scale, zero = stacked([weight.scale for weight in weights]), stacked([weight.offset for weight in weights])
        bias = stacked([bias.float() for bias in biases or ()])
        parts = tuple(
            replace(
                weight,
                data=data[i],
                scale=None if scale is None else scale[i],
                offset=None if zero is None else zero[i],
            )
            for i, weight in enumerate(weights)
        )
        rows = weights[0].shape[0] if format in ("int4", "mxfp4") else None
        return cls(ExpertWeights(format, data, scale, bias, rows, zero), parts)

    def __call__(self, x: Tensor, routing: Routing, *, shared_rows: bool) -> Tensor:
        if getattr(self.weights[0], "rounds_inputs", False):
            rounded = round_blocks(x)
            return moe_linear(rounded, self.together, routing, shared_rows=shared_rows, dtype=x.dtype)
        return moe_linear(x, self.together, routing, shared_rows=shared_rows)
