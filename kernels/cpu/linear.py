"""How does a CPU multiply with a packed weight?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_int64, c_void_p
from functools import partial
from typing import NamedTuple
from weakref import ref

from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, WeightFormat
from membound.kernels.code_words import TILE_ROWS
from membound.kernels.cpu.calls import LibraryCalls, Rows
from membound.kernels.quantize import Packer

# What AVX512-BF16 and AMX multiply with tokens that are rounded to bf16.
BF16_FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "sparse24")
INTEGER_FORMATS = ("int8", "int4", "int3", "int2", "w8a8", "w4a8", "q4_k", "q6_k")
FORMATS = ("fp32", "bf16", "fp8", "sparse24", *INTEGER_FORMATS)  # in the order of weight.h


class LinearCalls(LibraryCalls):
    """linear.cpp, integer.cpp, and both of them on matrix units: linear_tiles.cpp and integer_tiles.cpp"""

    interleaved = True

    def __init__(self, *, batch_invariant: bool) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self._linear = self._declare("membound_linear", _LinearArguments)
        self._weights: dict[int, _KnownWeight] = {}
        self._packer = Packer(Arena(), interleaved=self.interleaved)
        self._rounds_to_bf16 = bool(self._library.membound_bf16_units()) and not batch_invariant

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
        x = self._dense(x)
        out = self._empty(m, known.fields.n)
        arguments = _LinearArguments(known.address, x.data_ptr(), out.data_ptr(), self._rows(m))
        self._run(self._linear, arguments, weight, known)
        return out

    def fields_of(self, weight: PackedWeight) -> WeightFields:
        """The weight as the C++ sees it, valid while it lives."""
        return self._known(weight).fields

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
        forget = partial(self._weights.pop, id(weight))
        known = self._weights[id(weight)] = _KnownWeight(ref(weight, forget), fields, addressof(fields))
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
