"""How long does a step take, answered a million times?

Steps of the same sequences grow by the same number of attended tokens each, so their time is tabulated over those
tokens for each number of sequences and is linear between two entries: equal steps are then one sum in closed form.
A step with prompts is the sum of what its operators take, and each operator depends on a part of the step alone: on
all tokens, on the rows of logits, on the sequences that decode, or on the prompts. So a table of each part is enough.
Where operators depend on the whole step (a calibrated CPU, whose caches hold what the step touches; a batch in two
halves, one of which hides the other's messages; ranks of dp, of which few prompts have few), it is costed as a whole. A
pipeline has tables for each number of micro-batches that a step may be in. Steps with guesses have tables of their own
(`guess_times.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from membound.roofline.cost import StepCost, filling_passes, micro_batch, pipelined_cost, step_cost
from membound.roofline.models import ModelSpec
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.operator import Times

if TYPE_CHECKING:
    from membound.simulator.guess_times import GuessTimes

Column = NDArray[np.float64]
# Seconds of the device, and of waiting for the host, of a step or of each of many.
Split = Callable[[StepShape], tuple[Column, Any]]
# Attended tokens from which on and up to which a time is linear, seconds there, and how many more each token takes.
Piece = tuple[float, float, float, float]
_NOWHERE: Piece = (0.0, 0.0, 0.0, 0.0)

# Tokens of one sequence at which steps of decode are tabulated: four to an octave.
CONTEXTS = np.unique(np.round(2.0 ** np.arange(0, 23.01, 0.25)))
# Numbers of sequences that are tabulated together.
NEAR = 16
# Tokens of a step: all small numbers, since kernels work in tiles, then every 64.
DENSE_TOKENS = 4096
PROMPTS = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256]
# Tokens of a prompt, on both sides of each tile's edge.
_TILES = range(64, 2049, 64)
PROMPT_TOKENS = sorted({1, 16, 34, 48, *_TILES, *(edge + 1 for edge in _TILES)})
PROMPT_TOKENS += [2560, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072, 1048576]
CACHED_TOKENS = [0, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 8388608]
_KEPT_PROMPTS = 1 << 14


class StepTimes:
    """Seconds of steps of one engine of up to `most_sequences` sequences and `most_tokens` tokens a step."""

    def __init__(
        self,
        model: ModelSpec,
        setup: EngineSetup,
        times: Times,
        most_sequences: int,
        most_tokens: int,
    ) -> None:
        self.model = model
        self.setup = setup
        self.times = times
        self.most_sequences = most_sequences
        self.most_tokens = most_tokens
        self._decode: dict[int, _Decode] = {}
        self._last: dict[int, Piece] = {}  # of each number of sequences, since the next step is near the last
        self._stages = setup.parallel.pp
        self._whole = times.needs_working_set or setup.overlap is not None or setup.parallel.dp > 1
        self._parts: dict[float, Parts] = {}  # of each number of micro-batches

    def decode(self, sequences: int, kv_tokens: int) -> tuple[float, float, int]:
        """Seconds of a step of decode that attends to `kv_tokens`, how much longer the next is, and how many alike."""
        begin, end, low, slope = self._last.get(sequences, _NOWHERE)
        if not begin <= kv_tokens < end:
            if sequences not in self._decode:
                self._tabulate(sequences)
            begin, end, low, slope = self._last[sequences] = self._decode[sequences].piece_at(kv_tokens)
        return low + slope * (kv_tokens - begin), slope * sequences, 1 + int((end - kv_tokens) // sequences)

    def _tabulate(self, sequences: int) -> None:
        """Tables of this number of sequences and of those near it, which cost hardly more than one."""
        if self.times.needs_working_set:  # caches matter: each entry is costed alone, when it is needed
            self._decode[sequences] = _Decode(self, sequences, [None] * len(CONTEXTS))
            return
        near, shape = decode_grid(sequences)
        seconds = np.broadcast_to(self.exact(shape), np.shape(shape.tokens)).reshape(len(near), -1)
        for n, row in zip(near, seconds.tolist(), strict=True):
            self._decode[n] = _Decode(self, n, row)

    def seconds(self, sums: tuple[float, ...]) -> float:
        """Seconds of any step without guesses, given the fields of its `StepShape`."""
        decoding = sums[1] - sums[6]
        if not sums[6] and sums[0] == decoding:
            return self.decode(int(decoding), int(sums[2]))[0]
        several = sums[0] - sums[5] != decoding  # the short last chunk of a prompt
        if several or self._whole:
            return float(self.exact(StepShape(*sums)))
        micro = float(self.setup.parallel.micro_batches_of(sums[1])) if self._stages > 1 else 1.0
        if micro > 1:
            shape = StepShape(*sums).uneven(min(micro, float(self._stages)), 1)  # ranks of dp are costed as a whole
            sums = tuple(float(amount) for amount in shape.columns().values())
        return self.parts(micro).seconds(sums)

    def filling_s(self, sums: tuple[float, ...]) -> float:
        """Seconds that a step takes longer where a pipeline is empty before it."""
        if self._stages == 1:
            return 0.0
        parallel = self.setup.parallel
        shape = StepShape(*sums)
        passes = micro_batch(parallel, shape)[1]
        return float(filling_passes(parallel, shape.sequences) / passes) * self.seconds(sums)

    def parts(self, micro_batches: float) -> Parts:
        """The parts of steps in so many micro-batches."""
        if micro_batches not in self._parts:
            most = self.most_tokens * int(micro_batches)  # as if each had a prompt, since all wait for one that has
            split = partial(self.split, micro_batches=micro_batches)
            self._parts[micro_batches] = Parts(split, most, self.most_sequences, self.verified, self.setup.parallel.cp)
        return self._parts[micro_batches]

    @property
    def verified(self) -> int:
        """Guesses that a sequence verifies at most."""
        return 0 if self.setup.drafts is None else self.setup.drafts.tokens

    @cached_property
    def guesses(self) -> GuessTimes:
        """Of steps with guesses."""
        from membound.simulator.guess_times import GuessTimes

        return GuessTimes(self)

    def exact(self, shape: StepShape) -> Any:
        """Seconds by the roofline itself."""
        return pipelined_cost(self.model, self.setup, self.times, shape).time_s

    def split(self, shape: StepShape, micro_batches: float) -> tuple[Column, Any]:
        """Seconds of the device alone, and of waiting for the host, of a step in so many micro-batches."""
        cost = step_cost(self.model, self.setup, self.times, shape.divided(micro_batches))
        turns = max(micro_batches / self.setup.parallel.pp, 1.0)
        waiting_s = waiting_of(cost)
        return np.asarray((cost.time_s - waiting_s) * turns, dtype=np.float64), waiting_s * turns


class _Decode:
    """Steps of decode of one number of sequences, over the tokens they attend to together."""

    def __init__(self, times: StepTimes, sequences: int, seconds: list[float | None]) -> None:
        self.kv_tokens: list[float] = (CONTEXTS * sequences).tolist()
        self._times = times
        self._sequences = sequences
        self._seconds = seconds

    def piece_at(self, kv_tokens: float) -> Piece:
        """Between the two entries around `kv_tokens`, or beyond the last two."""
        index = below(self.kv_tokens, kv_tokens)
        return piece_of(self.kv_tokens[index], self.kv_tokens[index + 1], self._at(index), self._at(index + 1))

    def _at(self, index: int) -> float:
        seconds = self._seconds[index]
        if seconds is None:
            shape = StepShape.decode(self._sequences, self.kv_tokens[index] / self._sequences)
            seconds = self._seconds[index] = float(self._times.exact(shape))
        return seconds


class Parts:
    """Seconds of steps with prompts as a sum of parts, each of which depends on a part of the step alone.

    `split` gives the seconds of the device and those of waiting for the host, of up to `most_tokens` of prompts beside
    `most_sequences` that each verify up to `verified` guesses. With context parallelism of degree `cp` a decoding token
    is as much work on a device as so many of prompts.
    """

    def __init__(self, split: Split, most_tokens: int, most_sequences: int, verified: int = 0, cp: int = 1) -> None:
        self._split = split
        self._cp = cp
        most = max(most_tokens + most_sequences * (cp + verified), DENSE_TOKENS)
        nodes = np.arange(0.0, DENSE_TOKENS + 1)
        if most > DENSE_TOKENS:
            nodes = np.concatenate((nodes, np.unique(np.geomspace(DENSE_TOKENS + 64, most + 64, 512).round())))
        self._token_nodes: list[float] = nodes.tolist()
        zero = np.zeros(len(nodes))
        tokens = self._device(StepShape(nodes, zero, zero, zero, zero, nodes, zero, zero, zero))
        self._of_tokens: list[float] = tokens.tolist()
        rows = np.arange(0.0, most_sequences * (1 + verified) + 2)
        zero = np.zeros(len(rows))
        of_rows = np.broadcast_to(self._device(StepShape(zero, zero, zero, zero, rows)), rows.shape)
        self._of_rows: list[float] = (of_rows - of_rows[0]).tolist()
        self._attention: dict[int, tuple[list[float], list[float]]] = {}
        self._last: dict[int, Piece] = {}
        self._prompts = self._prompt_grid()
        self._prompt_s = lru_cache(_KEPT_PROMPTS)(self._prompt)  # most steps have one prompt, of a length seen before
        self._wait_s, self._launch_s = self._waiting()

    def seconds(self, sums: tuple[float, ...]) -> float:
        tokens, sequences, kv_tokens, _, rows, prompt_tokens, prompts, prompt_kv_tokens, pairs, *_ = sums
        if self._cp > 1:
            tokens = prompt_tokens + self._cp * (tokens - prompt_tokens)
        decoding, attention_s = int(sequences - prompts), 0.0
        if decoding:
            decode_kv_tokens = kv_tokens - prompt_kv_tokens
            begin, end, low, slope = self._last.get(decoding, _NOWHERE)
            if not begin <= decode_kv_tokens < end:
                begin, end, low, slope = self._decoding(decoding, decode_kv_tokens)
            attention_s = low + slope * (decode_kv_tokens - begin)
        return self.total(tokens, rows, attention_s, prompt_tokens, prompts, pairs)

    def total(
        self, tokens: float, rows: float, attention_s: float, prompt_tokens: float, prompts: float, pairs: float
    ) -> float:
        """Seconds of a step whose sequences that decode take `attention_s` beside what tokens and rows take."""
        device_s = self.common(tokens, rows) + attention_s
        if prompts:
            device_s += self._prompt_s(prompt_tokens, prompts, pairs)
        return device_s + self._wait_s + max(self._launch_s - device_s, 0.0)

    def common(self, tokens: float, rows: float) -> float:
        """Seconds of the device that follow from a step's tokens and its rows of logits."""
        of_tokens = self._of_tokens[int(tokens)] if tokens <= DENSE_TOKENS else self._beyond(tokens)
        return of_tokens + self._of_rows[int(rows)]

    def knows(self, rows: float) -> bool:
        """Whether so many rows of logits are tabulated."""
        return rows < len(self._of_rows)

    def _beyond(self, tokens: float) -> float:
        """Seconds of so many tokens, more than are tabulated one by one."""
        index = below(self._token_nodes, tokens)
        begin, _, low, slope = piece_of(*self._token_nodes[index : index + 2], *self._of_tokens[index : index + 2])
        return low + slope * (tokens - begin)

    def _decoding(self, sequences: int, kv_tokens: float) -> Piece:
        """What sequences that decode add to the time of their tokens and rows, around so many tokens."""
        found = self._attention.get(sequences)
        if found is None:
            near, shape = decode_grid(sequences)
            device_s = np.broadcast_to(self._device(shape), np.shape(shape.tokens)).reshape(len(near), -1)
            for n, row in zip(near, device_s, strict=True):
                tokens = n * self._cp
                tokens_s = self._of_tokens[tokens] if tokens <= DENSE_TOKENS else self._beyond(tokens)
                rest = row - tokens_s - self._of_rows[min(n, len(self._of_rows) - 1)]
                self._attention[n] = ((CONTEXTS * n).tolist(), rest.tolist())
            found = self._attention[sequences]
        nodes, seconds = found
        index = below(nodes, kv_tokens)
        piece = self._last[sequences] = piece_of(*nodes[index : index + 2], *seconds[index : index + 2])
        return piece

    def _prompt_grid(self) -> NDArray[np.float64]:
        """What some equal prompts of so many tokens behind so many cached ones add: [prompts, tokens, cached]."""
        axes = np.meshgrid(PROMPTS, PROMPT_TOKENS, CACHED_TOKENS, indexing="ij")
        count, tokens, cached = (axis.ravel().astype(np.float64) for axis in axes)
        all_tokens, kv_tokens = count * tokens, count * (tokens + cached)
        pairs = count * (tokens * cached + tokens * (tokens + 1) / 2)
        shape = StepShape(all_tokens, count, kv_tokens, pairs, count, all_tokens, count, kv_tokens, pairs)
        zero = np.zeros(len(count))
        alone = StepShape(all_tokens, zero, zero, zero, count, all_tokens, zero, zero, zero)
        added = self._device(shape) - self._device(alone)
        return added.reshape(len(PROMPTS), len(PROMPT_TOKENS), len(CACHED_TOKENS))

    def _prompt(self, tokens: float, prompts: float, attended: float) -> float:
        """Of prompts that are not equal the mean counts: as long, and behind as many tokens as gives their pairs."""
        mean = tokens / prompts
        cached = max(0.0, attended / tokens - (mean + 1) / 2)
        (i, x), (j, y), (k, z) = _place(PROMPTS, prompts), _place(PROMPT_TOKENS, mean), _place(CACHED_TOKENS, cached)
        near, far = self._prompts_list[i], self._prompts_list[i + 1]
        first = near[j][k] * (1 - z) + near[j][k + 1] * z
        second = near[j + 1][k] * (1 - z) + near[j + 1][k + 1] * z
        at_near = first * (1 - y) + second * y
        if not x:
            return at_near
        first = far[j][k] * (1 - z) + far[j][k + 1] * z
        second = far[j + 1][k] * (1 - z) + far[j + 1][k + 1] * z
        return at_near * (1 - x) + (first * (1 - y) + second * y) * x

    @cached_property
    def _prompts_list(self) -> list[list[list[float]]]:
        return self._prompts.tolist()

    def _waiting(self) -> tuple[float, float]:
        """Seconds that a step with prompts always waits, and seconds of launches that the device's must exceed."""
        _, wait_s = self._split(StepShape.prefill(1.0, 1e6))
        device_s, small_wait_s = self._split(StepShape.prefill(1.0, 1.0))
        return float(wait_s), float(device_s) + float(small_wait_s - wait_s)

    def _device(self, shape: StepShape) -> Column:
        return self._split(shape)[0]


def waiting_of(cost: StepCost) -> Any:
    """Seconds in which the device waits for the host, of a step or of each of many."""
    host = cost.operators[-1]
    return host.total_s - cost.times.of(host.operator, 0.0).time_s * host.operator.calls


def decode_grid(sequences: int) -> tuple[list[int], StepShape]:
    """Numbers of sequences near one, and steps of decode of each at all contexts, one row of them after the other."""
    first = (sequences - 1) // NEAR * NEAR + 1
    near = list(range(first, first + NEAR))
    n = np.repeat(np.array(near, dtype=np.float64), len(CONTEXTS))
    kv_tokens = n * np.tile(CONTEXTS, len(near))
    return near, StepShape(n, n, kv_tokens, kv_tokens, n)


def _place(axis: list[int], value: float) -> tuple[int, float]:
    """The index below `value`, and how far it is from there to the next."""
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def below(nodes: list[float], at: float) -> int:
    """The entry below `at`, with another behind it."""
    return min(max(bisect_right(nodes, at) - 1, 0), len(nodes) - 2)


def piece_of(begin: float, end: float, first: float, last: float) -> Piece:
    return begin, end, first, (last - first) / (end - begin)
