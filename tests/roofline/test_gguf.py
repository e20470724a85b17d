"""Is a GGUF read as its own package reads it, and is a damaged one refused in a sentence?"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Quantization

from membound.roofline.reading.gguf_file import GgufError, GgufFile


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A GGUF with metadata of many types and a matrix [4, 256] in several quantizations."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "中文 🙂")
    writer.add_array("a.strings", ["a", "", "ß"])
    writer.add_array("an.array", [1, 2, 3])
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_uint64("a.large", 2**40)
    matrix = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    writer.add_tensor("F32", matrix)
    writer.add_tensor("F16", matrix.astype(np.float16))
    for kind in (Quantization.Q8_0, Quantization.Q4_1, Quantization.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_what_the_gguf_package_reads(small: Path) -> None:
    ours, theirs = GgufFile(small), gguf.GGUFReader(small)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.metadata["a.strings"] == ["a", "", "ß"]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = ours.dequantize(tensor.name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)


def test_quantized_tensors_come_back_within_a_quantization_step(small: Path) -> None:
    file = GgufFile(small)
    exact = file.dequantize("F32")
    assert np.abs(file.dequantize("Q8_0") - exact).max() < np.abs(exact).max() / 127
    assert np.abs(file.dequantize("Q4_1") - exact).max() < 2 * np.abs(exact).max() / 15


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def patched(offset: int, replacement: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + replacement + content[offset + len(replacement) :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(0), "shorter than a GGUF header"),
        (cut(23), "shorter than a GGUF header"),
        (cut(100), "truncated: its header needs byte"),
        (cut(-1), "truncated: tensor"),
        (patched(0, b"PK\x03\x04"), "not a GGUF: it starts with"),
        (patched(4, struct.pack("<I", 1)), "GGUF version 1"),
        (patched(4, struct.pack(">I", 3)), "little-endian"),
        (patched(8, struct.pack("<Q", 2**60)), "small.gguf"),
        (patched(16, struct.pack("<Q", 2**60)), "small.gguf"),
        (patched(24, struct.pack("<Q", 2**60)), "truncated: its header needs byte"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(small: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    small.write_bytes(damage(small.read_bytes()))
    with pytest.raises(GgufError) as refusal:
        GgufFile(small)
    message = str(refusal.value)
    assert words in message and str(small) in message and "\n" not in message


def test_every_truncation_is_refused(small: Path) -> None:
    content = small.read_bytes()
    for size in range(0, len(content), 97):
        small.write_bytes(content[:size])
        with pytest.raises(GgufError):
            GgufFile(small)


def test_a_missing_file_a_folder_and_a_missing_tensor_are_refused(small: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(GgufError, match="is not a file"):
            GgufFile(path)
    with pytest.raises(GgufError, match=r"has no tensor output\.weight"):
        GgufFile(small).dequantize("output.weight")


def test_quantizations_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    for code, words in ((Quantization.I32, "quantized as I32"), (9999, "unknown quantization type 9999")):
        name = b"x"
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
        info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, code, 0)
        path.write_bytes((header + info).ljust(1024, b"\0"))
        with pytest.raises(GgufError, match=words):
            GgufFile(path).dequantize("x")
