"""How is a [n, k] weight rounded to each of the formats that `linear` reads, and what numbers does it stand for?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from membound.kernels.arena import Arena
from membound.kernels.base import WEIGHT_FORMATS, PackedWeight, WeightFormat
from membound.kernels.code_words import (
    CODE_BITS,
    CODES,
    LAYOUT,
    TILE_ROWS,
    deinterleave,
    interleave,
    with_usual_strides,
)

GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
SMALLEST_GROUP = 32
LARGEST_E4M3 = 448.0
_ROWS = 4096  # bounds the fp32 copy of a large weight


@dataclass(frozen=True)
class Packer:
    """Lays weights out; what is not in its format yet goes into `arena`, where a CPU reads it faster."""

    arena: Arena | None = None
    interleaved: bool = False  # words of 16 rows side by side, for the C++ kernels

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        """A weight rounded to nearest: fp32 and bf16 are a cast, of the others see `Kernels.pack`."""
        if weight.dim() != 2:
            raise ValueError(f"a linear weight has two dimensions, this one has shape {tuple(weight.shape)}")
        if group_size is not None and format not in ("int4", "w4a8", "int3", "int2"):
            raise ValueError(f"group_size: is {group_size}, but {format} has no groups to choose; leave it out")
        if format == "fp32":
            return PackedWeight(format, self._cast(weight, torch.float32))
        if format == "bf16":
            return PackedWeight(format, self._cast(weight, torch.bfloat16))
        if format == "fp8":
            return self._fp8(weight)
        if format == "sparse24":
            return self._sparse24(weight)
        if format == "mxfp4":
            return self._mxfp4(weight)
        if format in ("int8", "w8a8"):
            scale = weight.abs().amax(dim=1).float() / 127  # [n]
            return self.pack_codes(_rounded(weight, scale[:, None], None, -127, 127), scale, None, format)
        if format in CODE_BITS:
            return self._groups(weight, format, group_size)
        if format in WEIGHT_FORMATS:
            raise ValueError(f"{format} weights come from a GGUF file: pack_gguf takes its bytes, nothing rounds to it")
        raise ValueError(f"no such weight format: {format}; there are {', '.join(WEIGHT_FORMATS)}")

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        """Codes of another quantizer; see `Kernels.pack_codes`."""
        n, k = codes.shape
        signed = checked_bits(codes, format) == 8
        if scale.dim() == 1 and signed:
            if zero is not None:
                raise ValueError(f"zero: {format} codes are symmetric, leave it out")
            if not bool(scale.isfinite().all()):
                raise ValueError("weight: has an infinite or NaN row, should be finite")
            return self._words(format, LAYOUT[format](codes), scale.float(), None, None, (n, k))
        scale = scale.unsqueeze(1) if scale.dim() == 1 else scale
        groups = scale.shape[1]
        group_size = k // groups if groups else 0
        if format == "w8a8" or group_size * groups != k or group_size % SMALLEST_GROUP:
            raise ValueError(
                f"scale: has {groups} groups for rows of {k}; {format} takes "
                + ("a scale a row" if format == "w8a8" else f"groups of {SMALLEST_GROUP} or a multiple that divides k")
            )
        if signed and zero is not None:
            raise ValueError(f"zero: {format} codes are symmetric, leave it out")
        stored = finite_half(scale)
        offset = None if zero is None else -(stored.float() * zero.reshape(n, groups).float()).half()
        return self._words(format, LAYOUT[format](codes), stored, offset, group_size, (n, k))

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        """A GGUF tensor's bytes, moved but not changed; see `Kernels.pack_gguf`."""
        if type not in GGUF_TYPES:
            raise ValueError(f"type: is {type}, but of GGUF's block formats only {', '.join(GGUF_TYPES)} are read")
        block, nbytes = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}[
            type
        ]
        n, k = shape
        if k % block or raw.numel() * raw.itemsize != n * k // block * nbytes:
            raise ValueError(
                f"raw: has {raw.numel() * raw.itemsize} bytes for {n} x {k} numbers, {type} has {nbytes} bytes for "
                f"each {block} of a row"
            )
        blocks = with_usual_strides(raw).view(torch.uint8).view(n, k // block, nbytes)
        if type == "Q4_K":
            return self._words("q4_k", blocks.flatten(1), None, None, None, shape)
        if type == "Q6_K":  # to whole words
            padded = pad(blocks, (0, 2))
            return self._words("q6_k", padded.flatten(1), None, None, None, shape)
        numbers = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}[type]
        meta = with_usual_strides(blocks[:, :, : 2 * numbers]).view(torch.float16)  # [n, k / 32, 1 or 2]
        offset = meta[:, :, 1].contiguous() if numbers == 2 else None
        format: WeightFormat = "int8" if type == "Q8_0" else "int4"
        codes = blocks[:, :, 2 * numbers :].flatten(1)
        return self._words(format, codes, meta[:, :, 0].contiguous(), offset, 32, shape)

    def _groups(self, weight: Tensor, format: WeightFormat, group_size: int | None) -> PackedWeight:
        n, k = weight.shape
        if group_size is None:
            group_size = next((size for size in (128, 64, SMALLEST_GROUP) if k % size == 0), 0)
        if not group_size or group_size % SMALLEST_GROUP or k % group_size:
            raise ValueError(
                f"group_size: is {group_size or 'open'}, but {format} needs rows ({k} elements) that a multiple of "
                f"{SMALLEST_GROUP} divides"
            )
        levels = 2 ** CODE_BITS[format] - 1
        grouped = weight.reshape(n, k // group_size, group_size)
        low, high = grouped.amin(-1).float().clamp_max(0), grouped.amax(-1).float().clamp_min(0)
        scale = ((high - low) / levels).half().float()  # codes are of the scale that `linear` will read
        zero = torch.where(scale > 0, -low / torch.where(scale > 0, scale, 1.0), 0.0).round_()
        scales, zeros = (t.repeat_interleave(group_size, dim=1) for t in (scale, zero))
        return self.pack_codes(_rounded(weight, scales, zeros, 0, levels), scale, zero, format)

    def _fp8(self, weight: Tensor) -> PackedWeight:
        scale = weight.abs().amax(dim=1).float() / LARGEST_E4M3
        if not bool(scale.isfinite().all()):
            raise ValueError("weight: has an infinite or NaN row, should be finite")
        divisor = torch.where(scale > 0, scale, 1.0)
        data = self._empty(weight.shape, torch.uint8, weight.device)
        for rows in range(0, weight.shape[0], _ROWS):
            part = slice(rows, rows + _ROWS)
            narrow = (weight[part].float() / divisor[part, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3)
            data[part] = narrow.to(torch.float8_e4m3fn).view(torch.uint8)
        return PackedWeight("fp8", data, scale)

    def _mxfp4(self, weight: Tensor) -> PackedWeight:
        raise ValueError("mxfp4 weights are multiplied by the Triton kernels on a GPU alone")

    def _sparse24(self, weight: Tensor) -> PackedWeight:
        n, k = weight.shape
        if k % 16:
            raise ValueError(f"weight: has rows of {k}, sparse24 needs a multiple of 16")
        if not bool(weight.isfinite().all()):
            raise ValueError("weight: has an infinite or NaN row, should be finite")
        data = self._empty(torch.Size((n, k // 2)), torch.bfloat16, weight.device)
        kept = self._empty(torch.Size((n, k // 8)), torch.uint8, weight.device)
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            four = weight[part].unflatten(1, (-1, 4)).unbind(-1)  # of [rows, k / 4]
            stays = _two_largest([w.abs() for w in four])
            lower = torch.where(stays[0], four[0], torch.where(stays[1], four[1], four[2]))
            upper = torch.where(stays[3], four[3], torch.where(stays[2], four[2], four[1]))
            data[part] = torch.stack([lower, upper], dim=-1).flatten(1).to(torch.bfloat16)
            bits = sum(stay.to(torch.uint8) << place for place, stay in enumerate(stays))
            assert isinstance(bits, Tensor)
            kept[part] = bits[:, 0::2] | bits[:, 1::2] << 4
        return PackedWeight("sparse24", data, size=(n, k), kept=kept)

    def _words(
        self,
        format: WeightFormat,
        row_bytes: Tensor,
        scale: Tensor | None,
        offset: Tensor | None,
        group_size: int | None,
        size: tuple[int, int],
    ) -> PackedWeight:
        """Rows of bytes as they are, or interleaved by words."""
        if not self.interleaved:
            data = self._put(row_bytes.view(torch.int8) if format in ("int8", "w8a8") else row_bytes)
            return PackedWeight(format, data, scale, offset, group_size, size)

        def meta(numbers: Tensor | None) -> Tensor | None:
            if numbers is None:
                return None
            if group_size is None:  # a scale a row
                return self._put(pad(numbers, (0, -size[0] % TILE_ROWS)))
            return self._put(interleave(numbers))

        words = with_usual_strides(pad(row_bytes, (0, -row_bytes.shape[1] % 4))).view(torch.int32)
        data = self._put(interleave(words))
        return PackedWeight(format, data, meta(scale), meta(offset), group_size, size, interleaved=True)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.dtype == dtype and weight.is_contiguous():
            return weight
        return self.arena.like(weight, dtype) if self.arena else weight.to(dtype).contiguous()

    def _empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.arena.empty(shape, dtype) if self.arena else torch.empty(shape, dtype=dtype, device=device)

    def _put(self, tensor: Tensor) -> Tensor:
        return self.arena.like(tensor, tensor.dtype) if self.arena else tensor.contiguous()


def checked_bits(codes: Tensor, format: WeightFormat) -> int:
    """The bits of a format of codes; raises ValueError for another, and for codes that it has not."""
    bits = CODE_BITS.get(format)
    if bits is None:
        raise ValueError(f"format: is {format}, but only {', '.join(CODE_BITS)} are made of codes")
    lowest, highest = (-128, 127) if bits == 8 else (0, 2**bits - 1)
    if codes.numel() and not (lowest <= int(codes.min()) and int(codes.max()) <= highest):
        raise ValueError(f"codes: are {int(codes.min())} to {int(codes.max())}, {format} has {lowest} to {highest}")
    return bits


def finite_half(scale: Tensor) -> Tensor:
    """Scales of groups in fp16; raises ValueError where that holds no number."""
    stored = scale.half()
    if not bool(stored.isfinite().all()):
        raise ValueError("scale: is infinite or NaN in fp16, should be finite")
    return stored


def dequantize(weight: PackedWeight) -> Tensor:
    """The fp32 [n, k] that a packed weight stands for."""
    n, k = weight.shape
    if weight.format in ("fp32", "bf16"):
        return weight.data.float()
    if weight.format == "fp8":
        assert weight.scale is not None
        return weight.data.view(torch.float8_e4m3fn).float() * weight.scale[:, None]
    if weight.format == "sparse24":
        assert weight.kept is not None
        bits = weight.kept[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=weight.kept.device) & 1
        dense = torch.zeros(n, k, device=weight.data.device)
        dense[bits.view(n, k).bool()] = weight.data.float().flatten()
        return dense
    if weight.format == "q4_k":
        return _q4_k(_row_bytes(weight).reshape(n, k // 256, 144)).reshape(n, k)
    if weight.format == "q6_k":
        return _q6_k(_row_bytes(weight).reshape(n, k // 256, 212)).reshape(n, k)
    codes = codes_of(weight).float()
    assert weight.scale is not None
    if weight.group_size is None:
        return codes * weight.scale[:n, None].float()
    groups = weight.group_size

    def spread(numbers: Tensor) -> Tensor:
        rows = deinterleave(numbers, n) if weight.interleaved else numbers
        return rows.float().repeat_interleave(groups, dim=1)

    if weight.offset is not None:
        return codes * spread(weight.scale) + spread(weight.offset)
    middle = 0 if weight.format == "int8" else 2 ** (CODE_BITS[weight.format] - 1)
    return (codes - middle) * spread(weight.scale)


def codes_of(weight: PackedWeight) -> Tensor:
    """The codes [n, k] of a weight of one of CODE_BITS, as `Kernels.pack_codes` takes them."""
    return CODES[weight.format](_row_bytes(weight))[:, : weight.shape[1]]


def rounded_inputs(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [m, k] as w4a8 multiplies it: rounded to int8, a scale for 128, 64 or 32 elements, as many as a group allows.

    fp32 [m, k]; the sums over a step are exact, so a kernel differs only in the order of the additions of steps.
    """
    assert weight.group_size is not None, "w4a8 has groups"
    step = next(step for step in (128, 64, SMALLEST_GROUP) if weight.group_size % step == 0)
    steps = x.float().unflatten(1, (-1, step))  # [m, k / step, step]
    scale = steps.abs().amax(dim=-1, keepdim=True) / 127
    codes = (steps * torch.where(scale > 0, 1 / scale, 0)).round()
    return (codes * scale).flatten(1)


def _row_bytes(weight: PackedWeight) -> Tensor:
    """uint8 [n, bytes]"""
    rows = deinterleave(weight.data, weight.shape[0]) if weight.interleaved else weight.data
    return rows.view(torch.uint8)


def _two_largest(sizes: list[Tensor]) -> list[Tensor]:
    """Of each four numbers, whether it is one of the two largest; of equal ones the first are."""
    stays = []
    for i, own in enumerate(sizes):
        larger = torch.zeros_like(own, dtype=torch.uint8)
        for j, other in enumerate(sizes):
            if j != i:
                larger += other >= own if j < i else other > own
        stays.append(larger < 2)
    return stays


def _rounded(weight: Tensor, scale: Tensor, zero: Tensor | None, lowest: int, highest: int) -> Tensor:
    """round(weight / scale) + zero as int8 or uint8 codes."""
    dtype = torch.int8 if lowest < 0 else torch.uint8
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    divisor = torch.where(scale > 0, scale, 1.0)
    for rows in range(0, weight.shape[0], _ROWS):
        part = slice(rows, rows + _ROWS)
        scaled = (weight[part].float() / divisor[part]).round_()
        scaled = scaled if zero is None else scaled + zero[part]
        codes[part] = scaled.clamp_(lowest, highest).to(dtype)
    return codes


def _halves(pairs: Tensor) -> Tensor:
    """[..., 2] bytes to fp32 [..., 1]."""
    return with_usual_strides(pairs).view(torch.float16).float()


def _q4_k(blocks: Tensor) -> Tensor:
    """[n, blocks, 144] bytes to [n, blocks, 256]: eight groups of 32 with a 6-bit scale and minimum each."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | low >> 6 << 4], dim=-1).float() * _halves(blocks[..., :2])
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1).float() * _halves(blocks[..., 2:4])
    nibbles = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-2).flatten(-3, -2).float()  # [n, blocks, 8, 32]
    return (codes * scales[..., None] - minima[..., None]).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    """[n, blocks, 212] bytes to [n, blocks, 256]: sixteen groups of 16 with an int8 scale each."""
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    codes = torch.cat([low & 15, low >> 4], dim=-2) | (high >> shifts & 3) << 4  # [n, blocks, 2, 4, 32]
    scales = with_usual_strides(blocks[..., 192:208]).view(torch.int8).float() * _halves(blocks[..., 208:210])
    return ((codes.flatten(-3).unflatten(-1, (16, 16)).float() - 32) * scales[..., None]).flatten(-2)
