"""Decode by captured steps: padded to a bucket, on the inputs' own buffers, it is the step that runs kernel by kernel.

Without a GPU a capture is stood in for by calling the same function on the same buffers again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.runtime.cuda_graphs import (  # noqa: E402
    LARGEST_BUCKET,
    CudaCapture,
    DecodeGraphs,
    batch_buckets,
    decode_graphs,
)
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.weights import load_safetensors  # noqa: E402

REFERENCE = Path(__file__).parents[3] / "data" / "reference"
BLOCK_SIZE = 4
TABLE = torch.tensor([[3, 6], [1, 0], [4, 2]], dtype=torch.int32)


@given(largest=st.integers(1, 2000))
def test_every_batch_has_a_bucket_less_than_twice_as_large(largest):
    buckets = batch_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == min(largest, LARGEST_BUCKET)
    for batch in range(1, buckets[-1] + 1):
        assert min(bucket for bucket in buckets if bucket >= batch) < 2 * batch


@pytest.fixture(scope="module")
def decoder(device):
    spec, weights = load_safetensors(REFERENCE / "tiny_qwen2")
    return Decoder(spec, weights.to(device), TritonKernels(device.type), "bf16")


def call_again(run):
    run()
    return run


def decode_batch(contexts, new=1):
    """On the host, the last `new` tokens of each sequence."""
    positions = torch.cat([torch.arange(context - new, context) for context in contexts])
    rows = torch.arange(len(contexts)).repeat_interleave(new)
    slots = TABLE[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(0, len(positions) + 1, new, dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return RaggedBatch(positions, slots, starts, lengths, TABLE[: len(contexts)], new)


def test_captured_steps_are_the_steps_and_their_padding_stores_nothing(decoder, device):
    capture = CudaCapture(device) if device.type == "cuda" else call_again
    plain, captured = (decoder.new_cache(8, BLOCK_SIZE) for _ in range(2))
    graphs = DecodeGraphs(decoder, captured, max_blocks=3, buckets=[1, 2, 4], capture=capture)
    assert graphs.buckets == [1, 2, 4]
    assert all((store.k_blocks == 0).all() and (store.v_blocks == 0).all() for store in captured)
    # Three sequences, then one that is in the middle of the others' rows, then two: what was padding becomes a row.
    for step, contexts in enumerate([[1, 1, 1], [2], [3, 2]]):
        ids, batch = torch.arange(len(contexts)) + 7 * step, decode_batch(contexts)
        rows = torch.arange(len(contexts))
        logits = decoder.forward(ids.to(device), batch.to(device), plain, rows.to(device))
        assert graphs.takes(batch)
        # Other splits of the context, so other roundings: as far as bf16's, not equal bits.
        assert torch.allclose(graphs.run(ids, batch, rows), logits, atol=0.1)
        for store, expected in zip(captured, plain, strict=True):
            for blocks, other in ((store.k_blocks, expected.k_blocks), (store.v_blocks, expected.v_blocks)):
                assert torch.allclose(blocks.float(), other.float(), atol=0.1)
                assert torch.equal(blocks == 0, other == 0)
    few = graphs.run(ids, batch, torch.tensor([1]))
    assert torch.equal(few, graphs.run(ids, batch, torch.tensor([0, 1]))[1:])


def test_drafts_prompts_and_what_is_too_large_run_kernel_by_kernel(decoder):
    graphs = DecodeGraphs(decoder, decoder.new_cache(8, BLOCK_SIZE), max_blocks=2, buckets=[1, 2], capture=call_again)
    assert graphs.takes(decode_batch([5, 3]))
    assert not graphs.takes(decode_batch([5, 3], new=2))
    assert not graphs.takes(decode_batch([5, 3, 4]))
    wide = decode_batch([5, 3])
    wide = RaggedBatch(
        wide.positions, wide.slots, wide.query_start, wide.context_len, torch.zeros(2, 3, dtype=torch.int32), 1
    )
    assert not graphs.takes(wide)


def test_only_triton_kernels_on_a_gpu_are_captured_and_what_fails_is_said(decoder, monkeypatch):
    kv = decoder.new_cache(8, BLOCK_SIZE)
    monkeypatch.setattr(decoder, "device", torch.device("cpu"))
    assert decode_graphs(decoder, kv, 2, 4) == (None, None)
    monkeypatch.setattr(decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(decoder, "kernels", TorchKernels())
    graphs, note = decode_graphs(decoder, kv, 2, 4)
    assert graphs is None and note == "decode without CUDA graphs: the torch kernels wait for lengths on the host"
    monkeypatch.setattr(decoder, "kernels", TritonKernels("cpu"))

    def fails(*arguments, **options):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr("membound.runtime.cuda_graphs.DecodeGraphs", fails)
    graphs, note = decode_graphs(decoder, kv, 2, 4)
    assert graphs is None
    assert note == ("decode without CUDA graphs: the capture failed (operation not permitted when stream is capturing)")
