"""How does a decode step start its hundreds of kernels without the host deciding on each of them again?

A step in which every sequence brings one token is captured as a CUDA graph for each of a few batch sizes and replayed
for the smallest that fits. Sequences that are not there are rows that store nothing and attend to nothing, which the
Triton kernels understand; all other steps run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.parallel.leader import DividedDecoder

LARGEST_BUCKET = 512  # beyond it the host keeps ahead of the kernels without graphs

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def batch_buckets(largest: int) -> list[int]:
    """The batch sizes that are captured: powers of two, and the largest itself up to `LARGEST_BUCKET`."""
    largest = min(largest, LARGEST_BUCKET)
    return [*(2**i for i in range((largest - 1).bit_length())), largest]


class DecodeGraphs:
    """Decode steps of up to `max(buckets)` sequences of up to `max_blocks` blocks, on one decoder and KV cache."""

    def __init__(
        self, decoder: Decoder, kv: KvCache, max_blocks: int, buckets: list[int], capture: Capture | None = None
    ) -> None:
        """`capture` records what a function launches and returns what repeats it; a test's may just call it again."""
        capture = capture or CudaCapture(decoder.device)
        self.max_blocks = max_blocks
        self._inputs = {bucket: _Inputs(bucket, max_blocks, decoder.device) for bucket in sorted(buckets)}

        def replay_of(inputs: _Inputs) -> Replay:
            return capture(lambda: decoder.forward(inputs.token_ids, inputs.batch, kv, inputs.rows))

        # The largest first: the others then find room in what it allocated.
        self._replays = {bucket: replay_of(self._inputs[bucket]) for bucket in sorted(buckets, reverse=True)}

    @property
    def buckets(self) -> list[int]:
        return list(self._inputs)

    def takes(self, batch: RaggedBatch) -> bool:
        """Whether a step is one that was captured."""
        fits = batch.num_sequences <= self.buckets[-1] and batch.block_table.shape[1] <= self.max_blocks
        return fits and batch.most_queries == 1

    def run(self, token_ids: Tensor, batch: RaggedBatch, logits_rows: Tensor) -> Tensor:
        """What `Decoder.forward` returns for a step, given on the host; valid until the next one."""
        bucket = next(bucket for bucket in self.buckets if bucket >= batch.num_sequences)
        self._inputs[bucket].fill(token_ids, batch)
        logits = self._replays[bucket]()
        if logits_rows.shape[0] == batch.num_sequences:
            return logits[: batch.num_sequences]
        return logits[logits_rows.to(logits.device)]


class _Inputs:
    """One bucket's inputs: all that changes from step to step lies in one buffer, so that one copy brings it."""

    def __init__(self, bucket: int, max_blocks: int, device: torch.device) -> None:
        fields: Fields = dict.fromkeys(("token_ids", "positions", "slots"), (torch.int64, (bucket,)))
        fields |= {"context_len": (torch.int32, (bucket,)), "block_table": (torch.int32, (bucket, max_blocks))}
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in fields.values())
        on_gpu = device.type == "cuda"
        self._host_bytes = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host, moved = _views(self._host_bytes, fields), _views(self._bytes, fields)
        self.token_ids = moved.pop("token_ids")
        edges = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        self.batch = RaggedBatch(query_start=edges, most_queries=1, **moved)
        self.rows = edges[:-1].long()
        self._clear(0)
        self._bytes.copy_(self._host_bytes)

    def fill(self, token_ids: Tensor, batch: RaggedBatch) -> None:
        """Brings a step's inputs to the GPU. The step before must be over, as it is when its tokens were sampled."""
        count, width = batch.block_table.shape
        host = self._host
        host["token_ids"][:count] = token_ids
        host["positions"][:count] = batch.positions
        host["slots"][:count] = batch.slots
        host["context_len"][:count] = batch.context_len
        host["block_table"][:count, :width] = batch.block_table
        self._clear(count)
        self._bytes.copy_(self._host_bytes, non_blocking=True)

    def _clear(self, count: int) -> None:
        """Makes the rows from `count` on padding."""
        for name, nothing in (("token_ids", 0), ("positions", 0), ("slots", -1), ("context_len", 0)):
            self._host[name][count:] = nothing


def _views(buffer: Tensor, fields: Fields) -> dict[str, Tensor]:
    """The fields of a buffer, one behind the other, those of 8 bytes first."""
    views, start = {}, 0
    for name, (dtype, shape) in fields.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        views[name] = buffer[start:end].view(dtype).view(shape)
        start = end
    return views


class CudaCapture:
    """Captures graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        with torch.cuda.device(self._device):
            # What is done once, such as compiling and making workspaces, cannot be captured.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def decode_graphs(
    decoder: Decoder | DividedDecoder, kv: KvCache, max_blocks: int, max_num_seqs: int
) -> tuple[DecodeGraphs | None, str | None]:
    """The graphs of a run's decode steps, and in words what was done; on a CPU neither."""
    if decoder.device.type != "cuda":
        return None, None
    if isinstance(decoder, DividedDecoder):
        return None, "decode without CUDA graphs: the processes of a divided model are told of every step"
    if problem := decoder.graph_problem:
        return None, f"decode without CUDA graphs: {problem}"
    if any(getattr(layer, "on_host", False) for layer in kv):
        return None, "decode without CUDA graphs: the host decides which tokens the KV cache keeps or reads"
    if decoder.kernels.name != "triton":
        return None, f"decode without CUDA graphs: the {decoder.kernels.name} kernels wait for lengths on the host"
    try:
        graphs = DecodeGraphs(decoder, kv, max_blocks, batch_buckets(max_num_seqs))
    except RuntimeError as error:
        torch.cuda.empty_cache()
        return None, f"decode without CUDA graphs: the capture failed ({str(error).splitlines()[0]})"
    return graphs, f"decode by CUDA graphs for batches of {', '.join(map(str, graphs.buckets))}"
