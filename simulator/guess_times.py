"""How long does a step with guesses take, with its drafter, answered a million times?

What the model verifies is tabulated as its other steps are, over the tokens that sequences attend to, for each number
of them and of guesses. A drafter is a small model whose first pass reads what the step's prompts bring; what follows
from the sequences that decode alone is tabulated too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np

from membound.roofline.cost import micro_batch
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import Speculation
from membound.roofline.techniques import Size
from membound.simulator.step_times import Parts, StepTimes, prompt_pairs, waiting_of
from membound.simulator.tables import CONTEXTS, Column, below, decode_grid, piece_of
from membound.simulator.windowed_times import contexts_of, decode_shape

# Of the tokens that sequences attend to those that layers with each window see; empty where they are equally long.
Seen = Sequence[float]


class GuessTimes:
    """Seconds of steps of an engine that speculates.

    The scheduler counts the guesses of the longest paths alone, since no more can be accepted; where they form trees
    all are verified.
    """

    def __init__(self, times: StepTimes) -> None:
        drafts = times.setup.drafts
        assert drafts is not None, "the engine speculates"
        self.times = times
        self.drafts = drafts
        self.nodes_per_guess = 1.0 if drafts.nodes is None else drafts.nodes / drafts.gamma
        self._speculations: dict[int, Speculation] = {}
        self.reads = self._speculation(drafts.gamma).drafter_reads
        self._steps: dict[int, _Steps] = {}
        self._drafting: dict[int, Column] = {}
        self._reading: Parts | None = None
        self._first: dict[int, Column] = {}
        parallel = times.setup.parallel
        # where a step's operators depend on parts of it alone, in one micro-batch
        self.divisible = parallel.pp == parallel.cp == parallel.dp == 1 and times.setup.overlap is None

    def seconds(
        self,
        decoding: int,
        kv_tokens: float,
        guesses: int,
        prompts: StepShape | None = None,
        unread: StepShape | None = None,
        seen: Seen = (),
    ) -> float:
        """Seconds of a step in which `decoding` sequences verify `guesses`, beside `prompts`, and of its drafter.

        The sequences attend to `kv_tokens` known ones together, the newest of each among them, of which layers with
        each window see so many. A drafter reads the prompts, and those that it has left `unread` before; with a window
        it takes the sequences to be equally long.
        """
        if self.times.times.needs_working_set:
            return self._exact(decoding, kv_tokens, guesses, prompts, unread, seen)
        if not (prompts or unread):
            return self._steps_of(decoding).seconds(guesses, float(kv_tokens), seen)
        return self._beside(decoding, kv_tokens, guesses, prompts, unread, seen)

    def draft_s(self, plain: StepShape, mean: float) -> float:
        """Seconds of the drafter in a step that is `plain` without guesses, of which a sequence has `mean`."""
        gamma = self.drafts.gamma
        return float(self._drafts_s(plain, min(gamma, ceil(mean)) if self.drafts.adaptive else gamma))

    def drafting(self, sequences: int) -> Column:
        """Seconds of the drafter in steps of so many sequences without prompts: [depth, entry of CONTEXTS].

        Of numbers of sequences that are near together, which costs hardly more than one.
        """
        if sequences not in self._drafting:
            gamma, adaptive = self.drafts.gamma, self.drafts.adaptive
            near, shape = decode_grid(sequences)
            found = np.zeros((len(near), gamma + 1, len(CONTEXTS)))
            for depth in range(1, gamma + 1):
                if depth == 1 or adaptive:  # else it always goes as deep as it may
                    seconds = self._drafts_s(shape, depth if adaptive else gamma)
                found[:, depth] = np.broadcast_to(seconds, np.shape(shape.tokens)).reshape(len(near), -1)
            self._drafting |= dict(zip(near, found, strict=True))
        return self._drafting[sequences]

    def first_pass(self, sequences: int) -> Column:
        """Of these the seconds of the drafter's first pass, which reads: [entry of CONTEXTS]."""
        if sequences not in self._first:
            near, shape = decode_grid(sequences)
            device_s, waiting_s = self._reading_split(shape)
            found = np.broadcast_to(device_s + waiting_s, np.shape(shape.tokens)).reshape(len(near), -1)
            self._first |= dict(zip(near, found, strict=True))
        return self._first[sequences]

    def verified(self, guesses: Any) -> Any:
        """Guesses that a step verifies where the longest paths have so many."""
        return guesses * self.nodes_per_guess

    # -- beside prompts

    def _beside(
        self,
        decoding: int,
        kv_tokens: float,
        guesses: int,
        prompts: StepShape | None,
        unread: StepShape | None,
        seen: Seen,
    ) -> float:
        """Seconds beside prompts, or with what was left to read."""
        rows = decoding + ceil(self.verified(guesses)) + (prompts.logits_rows if prompts else 0.0)
        # the short last chunk of a prompt counts as a sequence with guesses
        whole = prompts is None or prompts.sequences == prompts.prefill_sequences
        if not (self.divisible and whole and self.times.parts(1.0).knows(rows)):
            return self._exact(decoding, kv_tokens, guesses, prompts, unread, seen)
        steps = self._steps_of(decoding)
        if prompts is None:
            verify_s = steps.verify_s(guesses, kv_tokens, seen)
        else:
            verify_s = self.times.parts(1.0).total(
                prompts.tokens + decoding + ceil(self.verified(guesses)),
                rows,
                steps.attention_s(guesses, kv_tokens, seen),
                float(prompts.prefill_tokens),
                float(prompts.prefill_sequences),
                prompt_pairs(prompts.sums),
            )
        read = [shape.as_prompts() for shape in (prompts, unread) if shape is not None]
        return verify_s + self._drafts_beside_s(decoding, kv_tokens, guesses, read)

    def _drafts_beside_s(self, decoding: int, kv_tokens: float, guesses: int, read: list[StepShape]) -> float:
        n, steps = float(decoding), self._steps_of(decoding)
        plain = StepShape(n, n, kv_tokens, kv_tokens, n)
        for shape in read:
            plain = plain + shape
        if self._reading is None and self.reads:
            self._reading = Parts(self._reading_split, self.times.most_tokens, self.times.most_sequences)
        if self._reading is None or not self._reading.knows(float(plain.logits_rows)):
            return self.draft_s(plain, guesses / n)
        return steps.later_passes_s(guesses, kv_tokens) + self._reading.seconds(tuple(plain.columns().values()))

    def _exact(
        self,
        decoding: int,
        kv_tokens: float,
        guesses: int,
        prompts: StepShape | None,
        unread: StepShape | None,
        seen: Seen,
    ) -> float:
        n = float(decoding)
        plain, mean = decode_shape(n, self.times.windows if seen else (), kv_tokens, seen), guesses / n
        verified, read = plain.with_guesses(self.verified(mean)), plain
        if prompts is not None:
            verified, read = verified + prompts, read + prompts.as_prompts()
        return float(self.times.exact(verified)) + self.draft_s(read if unread is None else read + unread, mean)

    # -- the drafter

    def _steps_of(self, sequences: int) -> _Steps:
        if sequences not in self._steps:
            self._steps[sequences] = _Steps(self, sequences)
        return self._steps[sequences]

    def _drafts_s(self, plain: StepShape, depth: int) -> Any:
        """Seconds of a drafter that goes so deep, in a step or in each of many."""
        one, passes = micro_batch(self.times.setup.parallel, plain)
        return self._speculation(depth).draft_s(self.times.times, one) * passes

    def _reading_split(self, shape: StepShape) -> tuple[Column, Any]:
        cost, more_s = self._speculation(self.drafts.gamma).reading(self.times.times, shape)
        waiting_s = waiting_of(cost)
        return np.asarray(cost.time_s - waiting_s + more_s, dtype=np.float64), waiting_s

    def _speculation(self, depth: int) -> Speculation:
        """The drafter as far as a step went."""
        if depth not in self._speculations:
            whole, drafts = Speculation(self.times.model, self.times.setup), self.drafts
            nodes = None if drafts.nodes is None else ceil(drafts.nodes * depth / drafts.gamma)
            self._speculations[depth] = whole if depth == drafts.gamma else whole.with_size(Size(depth, nodes))
        return self._speculations[depth]


class _Steps:
    """Steps of so many sequences that verify guesses, over the tokens they attend to.

    Guesses are counted along the longest path, and of all of them together: each sequence has as many as the mean. What
    layers see that do not see all tokens is a part of its own, as in steps without guesses (`windowed_times.py`).
    """

    def __init__(self, guessing: GuessTimes, sequences: int) -> None:
        self._guessing = guessing
        self._sequences = sequences
        self._kv_tokens: list[float] = (CONTEXTS * sequences).tolist()
        self._windows = guessing.times.windows
        self._verify_s: dict[int, list[float]] = {}
        self._within_s: dict[tuple[int, int], list[float]] = {}
        self._attention_s: dict[int, list[float]] = {}
        self._draft_s: dict[int, list[float]] = {}

    def seconds(self, guesses: int, kv_tokens: float, seen: Seen = ()) -> float:
        """Seconds with so many guesses behind the tokens that are known, the newest of each sequence among them."""
        return self.verify_s(guesses, kv_tokens, seen) + self._between(self._drafts_at, guesses, kv_tokens)

    def verify_s(self, guesses: int, kv_tokens: float, seen: Seen = ()) -> float:
        """Of these the seconds of the model's own step."""
        return self._between(self._verified_at, guesses, kv_tokens) + self._seen_s(guesses, kv_tokens, seen)

    def attention_s(self, guesses: int, kv_tokens: float, seen: Seen = ()) -> float:
        """Of the device what does not follow from the step's tokens and rows of logits."""
        return self._between(self._attention_at, guesses, kv_tokens) + self._seen_s(guesses, kv_tokens, seen)

    def _seen_s(self, guesses: int, kv_tokens: float, seen: Seen) -> float:
        """What layers with a window add for what they see beyond a token of each sequence."""
        seconds = 0.0
        for at, window in enumerate(self._windows):
            each = seen[at] / self._sequences if seen else min(kv_tokens / self._sequences, float(window))
            contexts = contexts_of(window)
            index = min(max(int(np.searchsorted(contexts, each, side="right")) - 1, 0), len(contexts) - 2)
            beyond = (each - contexts[index]) / (contexts[index + 1] - contexts[index])
            near, far = self._within_at(at, index)[guesses], self._within_at(at, index + 1)[guesses]
            seconds += near + (far - near) * float(beyond)
        return seconds

    def _within_at(self, at: int, index: int) -> list[float]:
        """What the layers with one window add, of every number of guesses, at one entry of what they see."""
        if (at, index) not in self._within_s:
            seen = [float(self._sequences)] * len(self._windows)
            least_s = self._device_s(self._shape(self._kv_tokens[0], seen))
            seen[at] *= float(contexts_of(self._windows[at])[index])
            self._within_s[at, index] = (self._device_s(self._shape(self._kv_tokens[0], seen)) - least_s).tolist()
        return self._within_s[at, index]

    def _device_s(self, shape: StepShape) -> Column:
        if not self._guessing.divisible:
            return np.asarray(self._guessing.times.exact(shape), dtype=np.float64)
        return self._guessing.times.split(shape, 1.0)[0]

    def _shape(self, kv_tokens: float, seen: list[float]) -> StepShape:
        """Steps of every number of guesses, whose layers see so many of the tokens that are known."""
        verified = self._guessing.verified(np.arange(0.0, self._most + 1.0))
        n, each = float(self._sequences), np.ones_like(verified)
        plain = decode_shape(n * each, self._windows, kv_tokens * each, [tokens * each for tokens in seen])
        return plain.with_guesses(verified / n)

    def later_passes_s(self, guesses: int, kv_tokens: float) -> float:
        """Seconds of the drafter beyond its first pass."""
        first_s = self._guessing.first_pass(self._sequences)
        index = below(self._kv_tokens, kv_tokens)
        begin, _, low, slope = piece_of(*self._kv_tokens[index : index + 2], *first_s[index : index + 2])
        return self._between(self._drafts_at, guesses, kv_tokens) - float(low + slope * (kv_tokens - begin))

    def _between(self, at: Callable[[int], list[float]], guesses: int, kv_tokens: float) -> float:
        index = below(self._kv_tokens, kv_tokens)
        begin, end = self._kv_tokens[index], self._kv_tokens[index + 1]
        near, far = at(index)[guesses], at(index + 1)[guesses]
        return near + (far - near) * (kv_tokens - begin) / (end - begin)

    def _verified_at(self, index: int) -> list[float]:
        """Of every number of guesses, at one entry of the tokens."""
        if index not in self._verify_s:
            self._tabulate(index)
        return self._verify_s[index]

    def _attention_at(self, index: int) -> list[float]:
        if index not in self._attention_s:
            self._tabulate(index)
        return self._attention_s[index]

    def _drafts_at(self, index: int) -> list[float]:
        if index not in self._draft_s:
            depths = np.ceil(np.arange(self._most + 1) / self._sequences).astype(int)
            self._draft_s[index] = self._guessing.drafting(self._sequences)[depths, index].tolist()
        return self._draft_s[index]

    @property
    def _most(self) -> int:
        return self._sequences * self._guessing.drafts.gamma

    def _tabulate(self, index: int) -> None:
        guessing, n, kv_tokens = self._guessing, float(self._sequences), self._kv_tokens[index]
        verified = guessing.verified(np.arange(0.0, self._most + 1.0))
        shape = self._shape(kv_tokens, [n] * len(self._windows))
        if not guessing.divisible:
            self._verify_s[index] = guessing.times.exact(shape).tolist()
            return
        device_s, waiting_s = guessing.times.split(shape, 1.0)
        self._verify_s[index] = (device_s + waiting_s).tolist()
        parts = guessing.times.parts(1.0)
        tokens = n + np.ceil(verified)
        common_s = [parts.common(count, count) for count in tokens.tolist()]
        self._attention_s[index] = (device_s - np.array(common_s)).tolist()
