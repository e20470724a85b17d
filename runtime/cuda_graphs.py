"""How does a step start its hundreds of kernels without the host deciding on each of them again?

Steps in which every sequence brings one token, or one and its drafts, are captured as CUDA graphs for each of a few
batch sizes and replayed for the smallest that fits. Sequences and tokens that are not there are rows that store nothing
and attend to nothing, which the Triton kernels understand; all other steps run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from membound.kernels.base import RaggedBatch, chain_of
from membound.kernels.bench.capture import warmed_up
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.kv.kivi import KiviKv
from membound.runtime.ragged import MOST_IN_TREE

# Beyond so many sequences or tokens the host keeps ahead of the kernels without graphs.
LARGEST_BUCKET, LARGEST_STEP = 512, 1024
LARGEST_EXACT = 32  # as many graphs at most where each is of one batch size alone
# Of the others: few rows are padding, and a product's rows are rounded up to 16 anyway. vLLM's sizes, `cudagraph_
# capture_sizes` of its compilation config, 2025.
BUCKETS = (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_BUCKET + 1, 16))
FEW = 8  # sizes are named one by one
ALIGNED_BYTES = 16  # where a tensor begins that Triton compiles no variant for

Replay = Callable[[], Tensor]  # the normed hidden states of all of a step's rows
Capture = Callable[[Replay], Replay]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# a step's inputs on the host, where numpy writes a few numbers in less time than torch
Fields = dict[str, NDArray[Any]]
# what a layer makes of states [tokens, hidden] and the tokens behind them: the next states, normed
Continue = Callable[[Tensor, Tensor, RaggedBatch], Tensor]
NOTHING = {"token_ids": 0, "positions": 0, "slots": -1, "context_len": 0, "seats": 0, "tree": 0}  # what padding holds


@dataclass(frozen=True)
class DraftStep:
    """A drafter's step: the first `layers` of its decoder, or how it `continues` states that it is given.

    A sequence brings up to `tokens` of them, in each of a few kinds of step.
    """

    tokens: tuple[int, ...] = (1, 2)  # the newest, and a guess before it that was accepted but is yet unread
    layers: int | None = None
    continues: Continue | None = None


def batch_buckets(largest: int, *, exact: bool = False) -> list[int]:
    """The batch sizes that are captured: `BUCKETS`, and the largest itself up to `LARGEST_BUCKET`.

    Where rows that are not there would do harm, each size is captured exactly, up to `LARGEST_EXACT`.
    """
    if exact:
        return list(range(1, min(largest, LARGEST_EXACT) + 1))
    largest = min(largest, LARGEST_BUCKET)
    return [*(bucket for bucket in BUCKETS if bucket < largest), largest]


class DecodeGraphs:
    """Steps of up to `max(buckets)` sequences of up to `max_blocks` blocks, on one decoder and KV cache.

    `queries` are the most tokens that a sequence may bring to each kind of step, of which those of up to `LARGEST_STEP`
    tokens are captured; with `exact` buckets a step must fill one to be replayed. With `drafting` it is a drafter's
    step. A graph ends with the hidden states, since logits of all rows would be the most of its memory. All graphs read
    their inputs in one place and leave their result in one, so that a hundred of them take the memory of the largest.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvCache,
        max_blocks: int,
        buckets: Sequence[int],
        capture: Capture | None = None,
        *,
        queries: Sequence[int] = (1,),
        exact: bool = False,
        drafting: DraftStep | None = None,
    ) -> None:
        """`capture` records what a function launches and returns what repeats it; a test's may just call it again."""
        capture = capture or CudaCapture(decoder.device)
        self._decoder = decoder
        self.max_blocks = max_blocks
        self.buckets = sorted(buckets)
        self.queries = sorted(queries)
        self.exact = exact
        drafting = drafting or DraftStep()
        sizes = [(most, bucket) for most in self.queries for bucket in self.buckets if most * bucket <= LARGEST_STEP]
        self._kinds = {kind: _Kind(*kind, max_blocks) for kind in sizes or [(self.queries[0], self.buckets[0])]}
        tokens = max(kind.tokens for kind in self._kinds.values())
        states = decoder.embed.new_zeros(tokens, decoder.spec.hidden, dtype=decoder.kernels.activation_dtype)
        self._normed = states
        self._states = torch.zeros_like(states) if drafting.continues else states
        self._staging = Staging(max(kind.nbytes for kind in self._kinds.values()), decoder.device)
        self._host = {
            name: {field: view.numpy() for field, view in kind.views(self._staging.host).items()}
            for name, kind in self._kinds.items()
        }

        def replay_of(name: tuple[int, int]) -> Replay:
            kind = self._kinds[name]
            token_ids, batch = kind.inputs(self._staging.moved)

            def step() -> Tensor:
                if drafting.continues is None:
                    normed = decoder.hidden(token_ids, batch, kv, drafting.layers).normed
                else:
                    normed = drafting.continues(self._states[: kind.tokens], token_ids, batch)
                return self._normed[: kind.tokens].copy_(normed)

            self._staging.wait()
            kind.clear(self._host[name], 0, 0)
            self._staging.send(kind.nbytes)
            return capture(step)

        # The largest first: the others then find room in what it allocated.
        largest_first = sorted(self._kinds, key=lambda kind: self._kinds[kind].tokens, reverse=True)
        self._replays = {kind: replay_of(kind) for kind in largest_first}

    def takes(self, batch: RaggedBatch) -> bool:
        """Whether a step is one that was captured."""
        return batch.block_table.shape[1] <= self.max_blocks and self._key(batch) is not None

    def run(self, token_ids: Tensor, batch: RaggedBatch, logits_rows: Tensor) -> tuple[Tensor, Tensor]:
        """The normed states [tokens, hidden] of a step, given on the host, and logits at `logits_rows` [rows].

        The states are valid until the next one.
        """
        tokens, normed = batch.num_tokens, self.states(token_ids, batch)
        wanted = normed if logits_rows.shape[0] == tokens else normed[logits_rows.to(normed.device)]
        return normed, self._decoder.logits(wanted)

    def states(self, token_ids: Tensor, batch: RaggedBatch, states: Tensor | None = None) -> Tensor:
        """The normed states alone; `states` [tokens, hidden], which lie on the device, are those that are continued."""
        key = self._key(batch)
        assert key is not None, "takes said so"
        kind = self._kinds[key]
        self._staging.wait()
        kind.fill(self._host[key], token_ids, batch)
        self._staging.send(kind.nbytes)
        if states is not None:
            self._states[: batch.num_tokens] = states
        return self._replays[key]()[: batch.num_tokens]

    def _key(self, batch: RaggedBatch) -> tuple[int, int] | None:
        """The tokens a sequence and the sequences of the smallest captured step that this one fits."""
        count, most = batch.num_sequences, batch.most_queries
        if most is None:
            return None
        fitting = next((queries for queries in self.queries if queries >= most), None)
        bucket = next((bucket for bucket in self.buckets if bucket >= count), None)
        if fitting is None or bucket is None or (self.exact and bucket != count):
            return None
        return (fitting, bucket) if (fitting, bucket) in self._kinds else None


class Staging:
    """Memory on the host and on the device that holds the inputs of one step after the other."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.moved = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Until the last inputs have left the host: of a step that samples nothing nobody waits for the end."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, nbytes: int) -> None:
        """Brings the first bytes to the device by one copy, for what is computed from here on."""
        self.moved[:nbytes].copy_(self.host[:nbytes], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.moved.device))


class _Kind:
    """The steps of up to `bucket` sequences of up to `queries` tokens: where their inputs lie in a piece of memory."""

    def __init__(self, queries: int, bucket: int, max_blocks: int) -> None:
        self.queries = queries
        self.bucket = bucket
        self.tokens = tokens = bucket * queries
        fields: Shapes = dict.fromkeys(("token_ids", "positions", "slots"), (torch.int64, (tokens,)))
        fields |= {"seats": (torch.int64, (bucket,)), "query_start": (torch.int32, (bucket + 1,))}
        if queries > 1:
            fields |= {"tree": (torch.int64, (tokens,))}
        self._fields = fields | {
            "context_len": (torch.int32, (bucket,)),
            "block_table": (torch.int32, (bucket, max_blocks)),
        }
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self._fields.values()]
        self._ends = list(accumulate(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes))
        self.nbytes = self._ends[-1]

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The fields by their names."""
        views, start = {}, 0
        for (name, (dtype, shape)), end in zip(self._fields.items(), self._ends, strict=True):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            views[name] = memory[start : start + nbytes].view(dtype).view(shape)
            start = end
        return views

    def inputs(self, memory: Tensor) -> tuple[Tensor, RaggedBatch]:
        """Token ids [tokens] and the batch of a step whose inputs lie there."""
        views = self.views(memory)
        return views.pop("token_ids"), RaggedBatch(most_queries=self.queries, **views)

    def fill(self, host: Fields, token_ids: Tensor, batch: RaggedBatch) -> None:
        """Writes a step's inputs and, behind them, padding."""
        (count, width), tokens = batch.block_table.shape, batch.num_tokens
        host["token_ids"][:tokens] = token_ids.numpy()
        host["positions"][:tokens] = batch.positions.numpy()
        host["slots"][:tokens] = batch.slots.numpy()
        host["context_len"][:count] = batch.context_len.numpy()
        host["block_table"][:count, :width] = batch.block_table.numpy()
        host["seats"][:count] = np.arange(count) if batch.seats is None else batch.seats.numpy()
        host["query_start"][: count + 1] = batch.query_start.numpy()
        if "tree" in host:
            tree = chain_of(batch.query_start, tokens) if batch.tree is None else batch.tree
            host["tree"][:tokens] = tree.numpy()
        self.clear(host, count, tokens)

    def clear(self, host: Fields, count: int, tokens: int) -> None:
        """Makes the sequences from `count` on and the tokens from `tokens` on padding.

        Blocks of contexts that are empty are never looked up, so that theirs may be any.
        """
        for name, nothing in NOTHING.items():
            if name in host:
                host[name][count if name in ("context_len", "seats") else tokens :] = nothing
        # A row that is padding is a sequence of one token where each brings one, else a sequence of none.
        host["query_start"][count:] = np.arange(count, self.bucket + 1) if self.queries == 1 else tokens


class CudaCapture:
    """Captures graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        with torch.cuda.device(device):
            # Of one stream alone: memory that a warm-up took is kept for the stream on which it was taken.
            self._stream = torch.cuda.Stream()

    def __call__(self, run: Replay) -> Replay:
        with torch.cuda.device(self._device):
            warmed_up(run, self._stream)
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # Threads that fetch experts or blocks may allocate meanwhile, which is none of this capture's business.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = run()
            finally:
                torch.cuda.set_stream(current)  # else what follows a capture that fails would run on its stream
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return outputs

        return replay


def decode_graphs(
    decoder: Decoder,
    kv: KvCache,
    max_blocks: int,
    max_num_seqs: int,
    guesses: int = 0,
    drafting: DraftStep | None = None,
) -> tuple[DecodeGraphs | None, str | None]:
    """The graphs of a run's decode steps, which verify up to `guesses` drafts a sequence, and in words what was done.

    With `drafting` those of its drafter. On a CPU there are neither.
    """
    if decoder.device.type != "cuda":
        return None, None
    what = "decode" if drafting is None else "drafts"
    if problem := decoder.graph_problem:
        return None, f"{what} without CUDA graphs: {problem}"
    if any(getattr(layer, "on_host", False) for layer in kv):
        return None, f"{what} without CUDA graphs: the host decides which tokens the KV cache keeps or reads"
    if decoder.kernels.name != "triton":
        return None, f"{what} without CUDA graphs: the {decoder.kernels.name} kernels wait for lengths on the host"
    exact, queries = not decoder.ignores_padding, captured_queries(decoder, kv, guesses)
    if drafting is not None:
        several = len(captured_queries(decoder, kv, max(drafting.tokens))) > 1
        queries = tuple(sorted({min(count, MOST_IN_TREE) for count in drafting.tokens})) if several else (1,)
    try:
        buckets = batch_buckets(max_num_seqs, exact=exact)
        graphs = DecodeGraphs(decoder, kv, max_blocks, buckets, queries=queries, exact=exact, drafting=drafting)
    except RuntimeError as error:
        torch.cuda.empty_cache()
        return None, f"{what} without CUDA graphs: the capture failed ({str(error).splitlines()[0]})"
    for statistics in decoder.router_statistics.values():
        statistics.reset()  # of the captures' warm-up
    sizes = f"{len(buckets)} sizes up to {buckets[-1]}" if len(buckets) > FEW else ", ".join(map(str, buckets))
    note = f"{what} by CUDA graphs for batches of {sizes}"
    if len(queries) > 1:
        most = f"{queries[-1] - 1} drafts" if drafting is None else f"{queries[-1]} tokens"
        note = f"{note}, each also with up to {most} a sequence"
    if buckets[-1] * queries[-1] > LARGEST_STEP:
        note = f"{note}, in steps of up to {LARGEST_STEP} tokens"
    return graphs, note


def captured_queries(decoder: Decoder, kv: KvCache, guesses: int) -> tuple[int, ...]:
    """The most tokens that a sequence may bring to each kind of captured step, where it has up to `guesses` drafts.

    Drafts of all numbers share a step as trees, which no cache in KIVI's codes knows.
    """
    trees = decoder.ignores_padding and not any(isinstance(part, KiviKv) for part in kv)
    return (1, 1 + min(guesses, MOST_IN_TREE - 1)) if guesses and trees else (1,)
