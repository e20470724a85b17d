"""Decode by captured steps: padded to a bucket, on the inputs' own buffers, it is the step that runs kernel by kernel.

Without a GPU a capture is stood in for by calling the same function on the same buffers again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.launch import recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402
from membound.roofline.models import ModelSpec  # noqa: E402
from membound.runtime import cuda_graphs  # noqa: E402
from membound.runtime.cuda_graphs import (  # noqa: E402
    LARGEST_BUCKET,
    CudaCapture,
    DecodeGraphs,
    batch_buckets,
    decode_graphs,
)
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.loading.weights import load_safetensors, random_weights  # noqa: E402

REFERENCE = Path(__file__).parents[3] / "data" / "reference"
BLOCK_SIZE = 4
TABLE = torch.tensor([[3, 6], [1, 0], [4, 2]], dtype=torch.int32)


@given(largest=st.integers(1, 2000))
def test_few_rows_of_a_bucket_are_padding(largest):
    """A product's rows are rounded up to 16, so that fewer more cost nothing; with powers of two 33 ran as 64."""
    buckets = batch_buckets(largest)
    assert buckets == sorted(set(buckets)) and len(buckets) <= 51
    assert buckets[-1] == min(largest, LARGEST_BUCKET)
    for batch in range(1, buckets[-1] + 1):
        bucket = min(bucket for bucket in buckets if bucket >= batch)
        assert bucket < 2 * batch and bucket - batch < (8 if batch <= 248 else 16)


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
        assert torch.allclose(graphs.run(ids, batch, rows)[1], logits, atol=0.1)
        for store, expected in zip(captured, plain, strict=True):
            for blocks, other in ((store.k_blocks, expected.k_blocks), (store.v_blocks, expected.v_blocks)):
                assert torch.allclose(blocks.float(), other.float(), atol=0.1)
                assert torch.equal(blocks == 0, other == 0)
    normed, few = graphs.run(ids, batch, torch.tensor([1]))
    assert torch.equal(few, graphs.run(ids, batch, torch.tensor([0, 1]))[1][1:])
    assert torch.allclose(decoder.logits(normed)[1:], few, atol=0.05)


def verify_batch(parts):
    """On the host, tokens `start` to `end` of each sequence, of which the last are drafts."""
    positions = torch.cat([torch.arange(start, end) for start, end in parts])
    sizes = torch.tensor([end - start for start, end in parts])
    rows = torch.arange(len(parts)).repeat_interleave(sizes)
    slots = TABLE[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int()])
    lengths = torch.tensor([end for _, end in parts], dtype=torch.int32)
    return RaggedBatch(positions, slots, starts, lengths, TABLE[: len(parts)], int(sizes.max()))


def test_captured_steps_with_drafts_are_the_steps_however_many_a_sequence_brings(decoder, device):
    capture = CudaCapture(device) if device.type == "cuda" else call_again
    plain, captured = (decoder.new_cache(8, BLOCK_SIZE) for _ in range(2))
    graphs = DecodeGraphs(decoder, captured, max_blocks=2, buckets=[2, 3], capture=capture, queries=(1, 4))
    assert all((store.k_blocks == 0).all() for store in captured)
    tree = torch.tensor([1, 3, 5, 1, 3, 7])  # two children of the first token; a chain
    steps = [[(0, 4), (0, 2), (0, 1)], [(4, 6), (2, 5)], [(5, 6), (3, 4)], [(5, 8), (4, 7)]]
    for step, parts in enumerate(steps):
        batch = verify_batch(parts)
        if step == 3:
            batch = RaggedBatch(**{**vars(batch), "tree": tree})
        count = batch.num_tokens
        ids, rows = torch.arange(count) + 11 * step, torch.arange(count)
        logits = decoder.forward(ids.to(device), batch.to(device), plain, rows.to(device))
        assert graphs.takes(batch)
        assert torch.allclose(graphs.run(ids, batch, rows)[1], logits, atol=0.12)
        assert torch.equal(graphs.run(ids, batch, rows[1:2])[1], graphs.run(ids, batch, rows)[1][1:2])
        for store, expected in zip(captured, plain, strict=True):
            assert torch.equal(store.k_blocks == 0, expected.k_blocks == 0)
    assert not graphs.takes(verify_batch([(0, 5)]))


def test_a_models_states_and_experts_are_captured_without_padding(device):
    spec = ModelSpec(
        name="tiny",
        layers=1,
        hidden=32,
        vocab=64,
        attention={"kind": "mamba2", "heads": 4, "head_dim": 16, "d_state": 8, "groups": 2},
        ffn={"kind": "moe", "experts": 4, "top_k": 2, "intermediate": 24},
        tie_embeddings=True,
        max_context=64,
        source="a test",
    )
    decoder = Decoder(spec, random_weights(spec, 3).to(device), TritonKernels(device.type), "bf16")
    assert decoder.graph_problem is None and not decoder.ignores_padding
    plain, captured = (decoder.new_cache(8, BLOCK_SIZE, seats=3) for _ in range(2))
    capture = CudaCapture(device) if device.type == "cuda" else call_again
    graphs = DecodeGraphs(
        decoder, captured, max_blocks=2, buckets=batch_buckets(2, exact=True), capture=capture, exact=True
    )
    statistics = decoder.router_statistics[0]
    for step, seats in enumerate([[2, 0], [2, 0], [2], [1, 2]]):
        contexts = [step + 1, step + 1] if step < 3 else [1, step + 1]
        batch = RaggedBatch(**{**vars(decode_batch(contexts[: len(seats)])), "seats": torch.tensor(seats)})
        ids, rows = torch.arange(len(seats)) + 5 * step, torch.arange(len(seats))
        logits = decoder.forward(ids.to(device), batch.to(device), plain, rows.to(device))
        statistics.reset()
        assert graphs.takes(batch)
        assert torch.allclose(graphs.run(ids, batch, rows)[1], logits, atol=0.05)
        assert statistics.tokens == len(seats) and statistics.load.sum() == 2 * len(seats)
    assert not graphs.takes(decode_batch([3, 3, 3]))


def test_a_layer_of_a_step_is_nine_launches(decoder, device):
    """Each of them takes some microseconds of a graph, whatever it computes: of 4-bit weights as long as they do."""
    kv, layers = decoder.new_cache(8, BLOCK_SIZE), len(decoder.blocks)
    batch = decode_batch([7, 5])
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        decoder.hidden(torch.tensor([3, 4], device=device), batch.to(device), kv)
    counts = Counter(launch.name.removesuffix("_kernel") for launch in record.launches)
    assert counts == {
        "rms_norm": 2 * layers + 1,
        "linear_half": 4 * layers,  # of a wide model the widest is the library's
        "rope_store": layers,
        "decode_attention": layers,
        "silu_mul": layers,
    }


def test_padding_takes_no_expert_and_is_not_counted(device):
    """So that a mixture's steps share graphs, and read no expert for rows that are not there."""
    spec = ModelSpec(
        name="tiny",
        layers=2,
        hidden=32,
        vocab=64,
        attention={"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 16},
        ffn={"kind": "moe", "experts": 6, "top_k": 2, "intermediate": 24},
        tie_embeddings=True,
        max_context=64,
        source="a test",
    )
    decoder = Decoder(spec, random_weights(spec, 3).to(device), TritonKernels(device.type), "bf16")
    assert decoder.graph_problem is None and decoder.ignores_padding
    plain, captured = (decoder.new_cache(8, BLOCK_SIZE) for _ in range(2))
    capture = CudaCapture(device) if device.type == "cuda" else call_again
    graphs = DecodeGraphs(decoder, captured, max_blocks=2, buckets=[4], capture=capture, queries=(1, 2))
    statistics = decoder.router_statistics[1]
    for step, (contexts, new) in enumerate([([1, 1, 1], 1), ([2], 1), ([3, 3], 2)]):
        batch = decode_batch(contexts, new)
        ids, rows = torch.arange(batch.num_tokens) + 5 * step, torch.arange(batch.num_tokens)
        statistics.reset()
        logits = decoder.forward(ids.to(device), batch.to(device), plain, rows.to(device))
        load, probability = statistics.load.clone(), statistics.probability.clone()
        statistics.reset()
        assert torch.allclose(graphs.run(ids, batch, rows)[1], logits, atol=0.1)
        assert statistics.tokens == batch.num_tokens and torch.equal(statistics.load, load)
        assert torch.allclose(statistics.probability, probability, atol=0.01)


def test_inputs_are_written_when_the_last_ones_have_left(decoder, device):
    """Of a step that samples nothing nobody waits for the end, and the copy may still be on its way."""
    told = []

    class Sent:
        def synchronize(self):
            told.append("waited")

        def record(self, stream):
            told.append("sent")

    graphs = DecodeGraphs(decoder, decoder.new_cache(8, BLOCK_SIZE), max_blocks=2, buckets=[1, 2], capture=call_again)
    graphs._staging._sent = Sent()
    fill, kind = cuda_graphs._Kind.fill, graphs._kinds[1, 2]

    class Watched(cuda_graphs._Kind):
        def fill(self, *arguments):
            told.append("filled")
            fill(self, *arguments)

    kind.__class__ = Watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        for _ in range(2):
            graphs.states(torch.tensor([3, 4]), decode_batch([2, 3]))
    assert told == ["waited", "filled", "sent"] * 2


def test_all_kinds_of_step_share_their_memory_and_begin_where_kernels_read_fastest(decoder, device):
    graphs = DecodeGraphs(
        decoder, decoder.new_cache(8, BLOCK_SIZE), max_blocks=3, buckets=[1, 3, 8], capture=call_again, queries=(1, 5)
    )
    largest = max(kind.nbytes for kind in graphs._kinds.values())
    assert graphs._staging.host.nbytes == graphs._staging.moved.nbytes == largest
    for kind in graphs._kinds.values():
        for field in kind.views(graphs._staging.moved).values():
            assert (field.data_ptr() - graphs._staging.moved.data_ptr()) % 16 == 0


def test_a_step_of_more_tokens_than_the_host_needs_help_with_runs_kernel_by_kernel(decoder, device, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "LARGEST_STEP", 4)
    kv = decoder.new_cache(8, BLOCK_SIZE)
    graphs = DecodeGraphs(decoder, kv, max_blocks=3, buckets=[1, 3], capture=call_again, queries=(1, 2))
    assert graphs.takes(decode_batch([5, 3, 4])) and graphs.takes(decode_batch([5], new=2))
    assert not graphs.takes(decode_batch([5, 3], new=2))


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
