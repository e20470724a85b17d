"""How long does a step take, answered a million times?

Steps of the same sequences grow by the same number of attended tokens each, so their time is tabulated over those
tokens for each number of sequences and is linear between two entries: equal steps are then one sum in closed form.
A step with prompts is the sum of what its operators take, and each operator depends on a part of the step alone: on
all tokens, on the rows of logits, on the sequences that decode, or on the prompts. So a table of each part is enough.
Where operators depend on the whole step (a calibrated CPU, whose caches hold what the step touches; a batch in two
halves, one of which hides the other's messages; ranks of dp, of which few prompts have few), it is costed as a whole. A
pipeline has tables for each number of micro-batches that a step may be in. Steps with guesses have tables of their own
(`guess_times.py`), and so have layers that do not see the whole of a sequence (`windowed_times.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from membound.roofline.cost import StepCost, filling_passes, in_turns, micro_batch, pipelined_cost, step_cost
from membound.roofline.models import ModelSpec
from membound.roofline.shape import AMOUNTS, StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.operator import Times
from membound.roofline.windows import windows_of
from membound.simulator.prompt_times import PromptTimes
from membound.simulator.scheduling.request import Sums
from membound.simulator.tables import CONTEXTS, NOWHERE, Column, Piece, Split, below, decode_grid, piece_of
from membound.simulator.windowed_times import CoupledTimes, WindowedTimes

if TYPE_CHECKING:
    from membound.simulator.guess_times import GuessTimes

# Tokens of a step: all small numbers, since kernels work in tiles, then every 64.
DENSE_TOKENS = 4096
# Sums of a step without windows, with at most one prompt.
_PLAIN = len(AMOUNTS)


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
        self._coupled = times.needs_working_set or setup.overlap is not None
        self._whole = self._coupled or setup.parallel.dp > 1
        self.windows = windows_of(model, setup)
        # The same as `decode` of a model with windows, within each of which layers see so many tokens, and so many more
        # in each step.
        self._windowed = WindowedTimes(self._decode_split, self.windows)
        parts = CoupledTimes(self.exact, self.windows) if self._coupled else self._windowed
        self.decode_within = parts.equal_steps
        self._parts: dict[float, Parts] = {}  # of each number of micro-batches

    def decode(self, sequences: int, kv_tokens: int) -> tuple[float, float, int]:
        """Seconds of a step of decode that attends to `kv_tokens`, how much longer the next is, and how many alike."""
        begin, end, low, slope = self._last.get(sequences, NOWHERE)
        if not begin <= kv_tokens < end:
            if sequences not in self._decode:
                self._tabulate(sequences)
            begin, end, low, slope = self._last[sequences] = self._decode[sequences].piece_at(kv_tokens)
        return low + slope * (kv_tokens - begin), slope * sequences, 1 + int((end - kv_tokens) // sequences)

    def _decode_split(self, shape: StepShape) -> tuple[Column, Any]:
        """Seconds of the device alone, and of waiting for the host, in as many micro-batches as a step is in."""
        one, passes = micro_batch(self.setup.parallel, shape)
        micro = self.setup.parallel.micro_batches_of(shape.sequences)
        return self._split(step_cost(self.model, self.setup, self.times, one), micro, passes)

    def _split(self, cost: StepCost, micro_batches: Any, passes: Any) -> tuple[Column, Any]:
        waiting_s = waiting_of(cost)
        turns_s = in_turns(cost, self.model, self.setup.parallel, micro_batches).time_s
        return np.asarray((turns_s - waiting_s) * passes, dtype=np.float64), waiting_s * passes

    def _tabulate(self, sequences: int) -> None:
        """Tables of this number of sequences and of those near it, which cost hardly more than one."""
        if self.times.needs_working_set:  # caches matter: each entry is costed alone, when it is needed
            self._decode[sequences] = _Decode(self, sequences, [None] * len(CONTEXTS))
            return
        near, shape = decode_grid(sequences)
        seconds = np.broadcast_to(self.exact(shape), np.shape(shape.tokens)).reshape(len(near), -1)
        for n, row in zip(near, seconds.tolist(), strict=True):
            self._decode[n] = _Decode(self, n, row)

    def seconds(self, sums: Sums) -> float:
        """Seconds of any step without guesses, given the fields of its `StepShape`."""
        decoding = sums[1] - sums[6]
        if self.windows and len(sums) == _PLAIN:  # nobody said what they see: sequences are equally long
            shape = StepShape(*sums)
            sums = (*sums, tuple(shape.seen_within(window) for window in self.windows), shape.tiles)
        if not sums[6] and sums[0] == decoding:
            if self.windows:
                return self.decode_within(int(decoding), int(sums[2]), seen_of(sums), [0] * len(self.windows))[0]
            return self.decode(int(decoding), int(sums[2]))[0]
        several = sums[0] - sums[5] != decoding  # the short last chunk of a prompt
        if several or self._whole:
            return float(self.exact(StepShape(*sums)))
        micro = float(self.setup.parallel.micro_batches_of(sums[1])) if self._stages > 1 else 1.0
        if micro > 1:
            shape = StepShape(*sums).uneven(min(micro, float(self._stages)), 1)  # ranks of dp are costed as a whole
            sums = shape.mapped(float).sums
        return self.parts(micro).seconds(sums)

    def filling_s(self, sums: Sums) -> float:
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
            limits = most, self.most_sequences, self.verified, self.setup.parallel.cp
            windowed = None  # those of decode alone, where they are not in other micro-batches
            if self.windows:
                windowed = self._windowed if self._stages == 1 else WindowedTimes(split, self.windows)
            self._parts[micro_batches] = Parts(split, *limits, windows=self.windows, windowed=windowed)
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
        return self._split(cost, micro_batches, max(micro_batches / self.setup.parallel.pp, 1.0))


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

    def __init__(
        self,
        split: Split,
        most_tokens: int,
        most_sequences: int,
        verified: int = 0,
        cp: int = 1,
        windows: tuple[int, ...] = (),
        windowed: WindowedTimes | None = None,
    ) -> None:
        self._split = split
        self._windowed = windowed
        self._common_s: dict[int, float] = {}  # of those who decode, of a model with windows
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
        self._prompt_s = PromptTimes(split, windows).seconds
        self._wait_s, self._launch_s = self._waiting()

    def seconds(self, sums: Sums) -> float:
        tokens, sequences, kv_tokens, _, rows, prompt_tokens, prompts, prompt_kv_tokens, pairs, *_ = sums
        if self._cp > 1:
            tokens = prompt_tokens + self._cp * (tokens - prompt_tokens)
        decoding, attention_s = int(sequences - prompts), 0.0
        all_pairs = (pairs,) if len(sums) == _PLAIN else prompt_pairs(sums)
        if self._windowed is not None:
            if decoding:
                attention_s = self.attention_s(decoding, kv_tokens - prompt_kv_tokens, seen_of(sums))
        elif decoding:
            decode_kv_tokens = kv_tokens - prompt_kv_tokens
            begin, end, low, slope = self._last.get(decoding, NOWHERE)
            if not begin <= decode_kv_tokens < end:
                begin, end, low, slope = self._decoding(decoding, decode_kv_tokens)
            attention_s = low + slope * (decode_kv_tokens - begin)
        return self.total(tokens, rows, attention_s, prompt_tokens, prompts, all_pairs)

    def total(
        self,
        tokens: float,
        rows: float,
        attention_s: float,
        prompt_tokens: float,
        prompts: float,
        pairs: tuple[float, ...],
    ) -> float:
        """Seconds of a step whose sequences that decode take `attention_s` beside what tokens and rows take, and
        whose prompts have these `prompt_pairs`."""
        device_s = self.common(tokens, rows) + attention_s
        if prompts:
            device_s += self._prompt_s(prompt_tokens, prompts, *pairs)
        return device_s + self._wait_s + max(self._launch_s - device_s, 0.0)

    def attention_s(self, sequences: int, kv_tokens: float, seen: Sequence[float]) -> float:
        """What sequences that decode add to the time of their tokens and rows, of a model with windows."""
        assert self._windowed is not None, "the model has windows"
        common_s = self._common_s.get(sequences)
        if common_s is None:
            common_s = self._common_s[sequences] = self._common_of(sequences)
        return self._windowed.device_s(sequences, kv_tokens, seen) - common_s

    def _common_of(self, sequences: int) -> float:
        """Seconds of the device that follow from the tokens and rows of so many who decode."""
        return self.common(float(sequences * self._cp), min(sequences, len(self._of_rows) - 1))

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
                rest = row - self._common_of(n)
                self._attention[n] = ((CONTEXTS * n).tolist(), rest.tolist())
            found = self._attention[sequences]
        nodes, seconds = found
        index = below(nodes, kv_tokens)
        piece = self._last[sequences] = piece_of(*nodes[index : index + 2], *seconds[index : index + 2])
        return piece

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


def seen_of(sums: Sums) -> tuple[float, ...]:
    """What layers with each window see of those who decode in a step with these sums."""
    return tuple([known.decode_tokens for known in sums[_PLAIN]])


def prompt_pairs(sums: Sums) -> tuple[float, ...]:
    """Query-key pairs of a step's prompts in layers that see all tokens, and in those with each window.

    Of several prompts those of equal ones, as many of as many tokens, for which kernels compute as much.
    """
    within, tiles = sums[_PLAIN:]
    if not tiles:
        return (sums[8], *[known.prefill_attended for known in within])
    tokens, prompts = sums[5], sums[6]
    if not within:
        return (tiles[0].as_equal(tokens, prompts),)
    return tuple([known.as_equal(tokens, prompts) for known in tiles])
