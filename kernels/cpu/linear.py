"""How does a CPU multiply with a packed weight?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_int64, c_void_p
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, WeightFormat
from membound.kernels.code_words import TILE_ROWS
from membound.kernels.cpu.calls import LibraryCalls, Rows
from membound.kernels.quantize import Packer

# From so many tokens torch's matrix units beat what the C++ has: AMX always, AVX512-BF16 where that is without it.
MATRIX_UNIT_TOKENS: dict[WeightFormat, int] = {"bf16": 32}
# What AVX512-BF16 multiplies with tokens that are rounded to bf16.
BF16_FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "sparse24")
INTEGER_FORMATS = ("int8", "int4", "int3", "int2", "w8a8", "w4a8", "q4_k", "q6_k")
FORMATS = ("fp32", "bf16", "fp8", "sparse24", *INTEGER_FORMATS)  # in the order of weight.h


class LinearCalls(LibraryCalls):
    """linear.cpp and integer.cpp"""

    interleaved = True

    def __init__(self, *, batch_invariant: bool) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self._linear = self._declare("membound_linear", _LinearArguments)
        self._weights: dict[int, _KnownWeight] = {}
        self._packer = Packer(Arena(), interleaved=self.interleaved)
        self._rounds_to_bf16 = bool(self._library.membound_bf16_units()) and not batch_invariant
        by_torch = torch_has_units(beside_bf16_units=self._rounds_to_bf16) and not batch_invariant
        self._matrix_unit_tokens = MATRIX_UNIT_TOKENS if by_torch else {}

    def batch_invariant_below(self, format: WeightFormat) -> int | None:
        """The number of tokens in a step from which `linear` rounds differently; None means never."""
        return self._matrix_unit_tokens.get(format)

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return self._packer.pack(weight, format, group_size)

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        return self._packer.pack_codes(codes, scale, zero, format)

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        return self._packer.pack_gguf(raw, type, shape)

    def emulates(self, weight: PackedWeight) -> bool:
        return False

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        known = self._known(weight)
        m, k = x.shape
        if k != known.fields.k:
            raise ValueError(f"x has {k} columns, and the weight is {known.fields.n} x {known.fields.k}")
        if known.matrix_unit_tokens is not None:
            if self._tape is not None:
                self._tape.only_up_to(known.matrix_unit_tokens - 1)
            if m >= known.matrix_unit_tokens:
                return functional.linear(x.to(torch.bfloat16), weight.data).float()
        x = self._dense(x)
        out = self._empty(m, known.fields.n)
        arguments = _LinearArguments(known.address, x.data_ptr(), out.data_ptr(), self._rows(m))
        self._run(self._linear, arguments, weight, known)
        return out

    def fields_of(self, weight: PackedWeight) -> WeightFields:
        """The weight as the C++ sees it, valid while it lives."""
        return self._known(weight).fields

    def rows_of_matrix_units(self, weight: PackedWeight, most: int) -> int | None:
        """From so many rows torch multiplies the weight; None where that is never or more than `most`."""
        units = self._matrix_unit_tokens.get(weight.format)
        tape = self._tape
        if units is None or tape is None:
            return units if units is not None and units <= most else None
        tape.only_up_to(units - 1)
        if units <= most and not tape.computed:
            tape.problem = "how many rows a weight has is not known where nothing is computed"
        return units if units <= most and tape.computed else None

    def _known(self, weight: PackedWeight) -> _KnownWeight:
        known = self._weights.get(id(weight))
        if known is None or known.weight() is not weight:
            return self._remember(weight)
        return known

    def _remember(self, weight: PackedWeight) -> _KnownWeight:
        coded = weight.format in INTEGER_FORMATS
        if coded and not weight.interleaved:
            raise ValueError(f"the {weight.format} weight was packed by other kernels; pack it with these")
        parts = (weight.data, weight.scale, weight.offset, weight.kept)
        for part in parts:
            if part is not None and not part.is_contiguous():
                raise ValueError(f"a part of the {weight.format} weight has strides {part.stride()}, should be dense")
        n, k = weight.shape
        fields = WeightFields(
            *(None if part is None else part.data_ptr() for part in parts),
            n,
            k,
            weight.group_size or 0,
            weight.data.nbytes // (-(-n // TILE_ROWS) * TILE_ROWS * 4) if coded else 0,
            FORMATS.index(weight.format),
            self._rounds_to_bf16 and weight.format in BF16_FORMATS,
        )
        units = self._matrix_unit_tokens.get(weight.format)
        forget = partial(self._weights.pop, id(weight))
        known = self._weights[id(weight)] = _KnownWeight(ref(weight, forget), fields, addressof(fields), units)
        return known


class _LinearArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("weight", "x", "out")]
    _fields_ += [("rows", Rows)]


class WeightFields(Structure):
    """A packed weight as the C++ sees it (weight.h)."""

    _fields_ = [(name, c_void_p) for name in ("data", "scale", "offset", "kept")]
    _fields_ += [(name, c_int64) for name in ("n", "k", "group", "words", "format", "bf16_tokens")]


class _KnownWeight(NamedTuple):
    """A packed weight whose fields were read once: reading them takes as long as a small kernel."""

    weight: ref[PackedWeight]
    fields: WeightFields
    address: int
    matrix_unit_tokens: int | None


def torch_has_units(*, beside_bf16_units: bool) -> bool:
    """Whether torch multiplies bf16 matrices in hardware, faster than the C++ does with AVX512-BF16 or without.

    Elsewhere it emulates them, slower than fp32.
    """
    names = ["_is_amx_tile_supported", *([] if beside_bf16_units else ["_is_avx512_bf16_supported"])]
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))
