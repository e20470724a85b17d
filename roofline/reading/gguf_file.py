"""What is in a GGUF file: its metadata and its tensors, dequantized on demand.

The header is read here rather than by `gguf.GGUFReader`, which spends seconds on a vocabulary and reports a
damaged file as a numpy traceback; block sizes and dequantization are the `gguf` package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.reading.files import is_file

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_MAX_DIMENSIONS = 4


class GgufError(MemboundError):
    """A GGUF that is missing, damaged, or holds what membound cannot read."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its shape with rows first (GGUF stores it reversed) and its bytes in the file."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF: `metadata` by key (arrays as lists), `tensors` by name. The file is mapped, not read.

    Raises GgufError if it is not a GGUF of version 2 or 3, or shorter than its header promises.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not is_file(self.path):
            raise GgufError(f"{self.path} is not a file: it must be a GGUF.")
        if self.path.stat().st_size < 24:
            raise GgufError(f"{self.path} is not a GGUF: it is shorter than a GGUF header.")
        self._bytes = np.asarray(np.memmap(self.path, dtype=np.uint8, mode="r"))
        header = _Cursor(self.path, self._bytes.data)
        if (magic := header.take(4)) != b"GGUF":
            raise GgufError(f"{self.path} is not a GGUF: it starts with {magic!r}, not b'GGUF'.")
        if (version := header.scalar("I")) not in (2, 3):
            raise GgufError(f"{self.path} is GGUF version {version}: it must be 2 or 3, little-endian.")
        num_tensors, num_fields = header.scalar("Q"), header.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = header.string()
            self.metadata[key] = header.value(header.value_type(key), key)
        self.tensors = self._read_tensor_infos(header, num_tensors)

    def _read_tensor_infos(self, header: _Cursor, count: int) -> dict[str, TensorInfo]:
        listed = [_read_tensor_info(header) for _ in range(count)]
        alignment = int(self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise GgufError(f"{self.path}: general.alignment is {alignment}: it must be a positive number of bytes.")
        start = -(-header.position // alignment) * alignment
        tensors = {}
        for name, shape, quantization, offset in listed:
            block, block_bytes = GGML_QUANT_SIZES[quantization]
            if shape[-1] % block:
                raise GgufError(
                    f"{self.path}: tensor {name} has rows of {shape[-1]}, which {quantization.name} blocks "
                    f"of {block} do not divide."
                )
            nbytes = math.prod(shape) // block * block_bytes
            if start + offset + nbytes > self._bytes.size:
                raise GgufError(
                    f"{self.path} is truncated: tensor {name} ends at byte {start + offset + nbytes}, "
                    f"and the file has {self._bytes.size}."
                )
            tensors[name] = TensorInfo(shape, quantization, start + offset, nbytes)
        return tensors

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, a row of them for each of its rows; raises GgufError."""
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"{self.path} has no tensor {name}, which its architecture needs.")
        block, block_bytes = GGML_QUANT_SIZES[info.quantization]
        data = self._bytes[info.offset : info.offset + info.nbytes]
        return data.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor in fp32, in its `TensorInfo.shape`; raises GgufError if it is absent or cannot be decoded."""
        rows: NDArray[Any] = self.blocks(name)
        info = self.tensors[name]
        if info.quantization in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            rows = rows.view(np.float32 if info.quantization == GGMLQuantizationType.F32 else np.float16)
        try:
            values = gguf.quants.dequantize(rows, info.quantization)
        except NotImplementedError:
            raise GgufError(
                f"{self.path}: tensor {name} is quantized as {info.quantization.name}, which cannot be dequantized."
            ) from None
        return np.array(values, dtype=np.float32)


class _Cursor:
    """Reads little-endian values one after the other and refuses to read past the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self._data):
            raise GgufError(
                f"{self.path} is truncated: its header needs byte {end}, and the file has {len(self._data)}."
            )
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise GgufError(f"{self.path} is damaged: the string before byte {self.position} is not UTF-8.") from None

    def value_type(self, key: str) -> GGUFValueType:
        code = self.scalar("I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise GgufError(f"{self.path}: {key} has the value type {code}, which GGUF does not define.") from None

    def value(self, kind: GGUFValueType, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.value_type(key), self.scalar("Q")
        if item == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if item == GGUFValueType.ARRAY:
            raise GgufError(f"{self.path}: {key} is an array of arrays, which membound does not read.")
        dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _read_tensor_info(header: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name, dimensions = header.string(), header.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise GgufError(
            f"{header.path}: tensor {name} has {dimensions} dimensions: GGUF allows 1 to {_MAX_DIMENSIONS}."
        )
    shape = tuple(header.scalar("Q") for _ in range(dimensions))[::-1]
    code = header.scalar("I")
    try:
        quantization = GGMLQuantizationType(code)
    except ValueError:
        raise GgufError(f"{header.path}: tensor {name} has the unknown quantization type {code}.") from None
    return name, shape, quantization, header.scalar("Q")
