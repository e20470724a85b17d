"""How many guesses are worth it in the next step, none included?

Decided anew in each step from what was measured so far: how often each sequence's guesses were accepted, and how long
steps took with how many guesses. All sequences of a step draft equally far, since a drafter's passes serve all of
them: a step of sequences with acceptance a_i and g guesses each emits the sum of E(a_i, g) in t0 + s g seconds. Of a
step with prompts those who decode take the share of their tokens: in a full one a guess takes the place of a prompt's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from statistics import median

from membound.roofline.speculation.token_tree import expected_tokens
from membound.roofline.techniques import Drafts
from membound.simulator.scheduling.request import Outcome, Sequence, Step, drafts_of

PRIOR_TRIALS = 4.0  # guesses that the drafter's stated acceptance counts as, until a sequence has its own
MEMORY_TRIALS = 40.0  # guesses after which a sequence's older ones no longer count
RECENT_STEPS = 9  # steps of each length, the latest, that costs are measured on
FIRST_STEPS = 6  # steps of a batch size that go with and without guesses in turn, before anything is known
PROBE_EVERY = 64  # steps after which one goes the other way, as texts and machines change


def best_length(alphas: Several[float], base_s: float, guess_s: float, most: int) -> int:
    """The length up to `most` that emits the most tokens a second, where a step takes base_s + guess_s * length."""

    def rate(length: int) -> float:
        return sum(expected_tokens(alpha, length) for alpha in alphas) / (base_s + max(guess_s, 0.0) * length)

    return max(range(most + 1), key=rate)


@dataclass
class _Acceptance:
    """A running share of accepted guesses; a guess behind a rejected one was not tried."""

    accepted: float
    tried: float

    @property
    def alpha(self) -> float:
        return self.accepted / self.tried

    def add(self, accepted: int, tried: int) -> None:
        kept = min(1.0, MEMORY_TRIALS / (self.tried + tried))
        self.accepted = (self.accepted + accepted) * kept
        self.tried = (self.tried + tried) * kept


class StepSeconds:
    """A line through the seconds of steps over their mean length: least squares through the medians of each length.

    Medians, since one step that the machine interrupted may take as long as a hundred others.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._recent: dict[int, deque[float]] = {}

    def add(self, length: float, seconds: float) -> None:
        self._recent.setdefault(round(length), deque(maxlen=RECENT_STEPS)).append(seconds)
        self.steps += 1

    @property
    def line(self) -> tuple[float, float] | None:
        """Seconds without guesses, and more for each; None before steps with different lengths were seen."""
        if self.steps < FIRST_STEPS or len(self._recent) < 2:
            return None
        points = [(length, median(seconds), len(seconds)) for length, seconds in self._recent.items()]
        weight = sum(count for _, _, count in points)
        mean_length = sum(length * count for length, _, count in points) / weight
        mean_s = sum(seconds * count for _, seconds, count in points) / weight
        spread = sum(count * (length - mean_length) ** 2 for length, _, count in points)
        rise = sum(count * (length - mean_length) * (seconds - mean_s) for length, seconds, count in points)
        slope = rise / spread
        base = mean_s - slope * mean_length
        return (base, slope) if base > 0 else None


class AdaptiveLength:
    """Chooses the length of an engine's drafts, and learns from every step of decode."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._acceptance: dict[int, _Acceptance] = {}
        self._costs: dict[tuple[int, bool], StepSeconds] = {}
        self._steps = 0
        self._prompts = False  # whether the last step had any, as the next one may

    def choose(self, sequences: list[Sequence]) -> int:
        """The length of the drafts in the step that comes."""
        most = self.drafts.gamma
        cost = self._cost(len(sequences), self._prompts)
        line = cost.line
        self._steps += 1
        if line is None:
            return most if cost.steps % 2 == 0 else 0
        length = best_length([self._of(sequence.id).alpha for sequence in sequences], *line, most)
        if self._steps % PROBE_EVERY == 0:
            return 0 if length else most
        return length

    def guesses(self, length: int) -> int:
        """Guesses of a draft of this length: as many as it is long, or the same share of the tree."""
        return length if self.drafts.nodes is None else -(-self.drafts.tokens * length // self.drafts.gamma)

    def observe(self, step: Step, outcome: Outcome, seconds: float) -> None:
        """A step took so long, drafting included; its outcome says what was accepted."""
        self._prompts = bool(step.prompts)
        if not step.decoding:
            return
        lengths = 0
        for sequence, length, accepted in drafts_of(step, outcome):
            lengths += length
            self._of(sequence).add(accepted, min(length, accepted + 1))
        tokens = step.decoding + lengths
        share = tokens / (tokens + sum(work.tokens for work in step.prompts))
        self._cost(step.decoding, self._prompts).add(lengths / step.decoding, share * seconds)

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._acceptance.pop(sequence, None)

    def _cost(self, batch: int, prompts: bool) -> StepSeconds:
        """Of steps of batches that are alike, which are powers of two, with prompts or without."""
        return self._costs.setdefault((batch.bit_length(), prompts), StepSeconds())

    def _of(self, sequence: int) -> _Acceptance:
        if sequence not in self._acceptance:
            self._acceptance[sequence] = _Acceptance(self.drafts.alpha * PRIOR_TRIALS, PRIOR_TRIALS)
        return self._acceptance[sequence]
