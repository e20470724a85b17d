"""What is a request, and what does the engine know of it while it is served?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from membound.roofline.shape import shape_sums
from membound.roofline.tiles import tiles_of
from membound.roofline.within import sums_within
from membound.simulator.scheduling.prefix import PrefixChain, Span

Status = Literal["waiting", "running", "completed", "rejected", "failed"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks: a prompt, and how many tokens it wants back.

    `prompt_ids` and `output_ids` are the content where it is known: the runtime needs the first, the simulator
    replays the second (recorded earlier) to know which drafts would have been accepted. `prefix` says which tokens
    are those of other requests, where any are. `follow_up` is the next turn of a conversation. `think_s` passes
    between the answer to the turn before and this request; a first turn in a closed loop waits for it too.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    prefix: PrefixChain | None = None
    think_s: float = 0.0
    follow_up: Request | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens

    def turns(self) -> Iterator[Request]:
        """This request and those that follow it in its conversation."""
        turn: Request | None = self
        while turn is not None:
            yield turn
            turn = turn.follow_up


class StepCounter(Protocol):
    """Counts the steps of sequences that decode together."""

    steps: int


class Sequence:
    """A request in the engine.

    Of its `tokens` tokens (prompt and emitted) the first `computed` have their K and V in blocks. A sequence that
    decodes has exactly one that is not computed, the newest, and gets one more with each step of the `clock` that it
    shares with all others that decode: a step costs nothing for each of them. `token_ids` follows `tokens` where
    content is known. `number` counts arrivals, `key` is its place in the engine's order.
    """

    __slots__ = (
        "admitted_s",
        "blocks",
        "cached",
        "cached_tokens",
        "clock",
        "deadline_s",
        "ends_at",
        "first_token_s",
        "key",
        "last_token_s",
        "loaded",
        "number",
        "preemptions",
        "priority",
        "rank",
        "reason",
        "request",
        "reserved_blocks",
        "service_class",
        "standing",
        "standing_computed",
        "status",
        "swapped_blocks",
        "token_ids",
    )

    def __init__(self, request: Request, token_ids: list[int] | None = None) -> None:
        self.request = request
        self.token_ids = token_ids
        self.standing = request.prompt_tokens  # tokens at step 0 of the clock, all tokens where it has none
        self.standing_computed = 0
        self.clock: StepCounter | None = None
        self.status: Status = "waiting"
        self.reason: str | None = None  # why it was rejected, or failed
        self.number = request.id
        self.key = 0.0
        self.service_class = 0
        self.priority = 0
        self.deadline_s = math.inf
        self.blocks: list[int] = []  # ids, where somebody needs them
        self.cached: list[Span] = []  # blocks that it shares with the prefix cache
        self.cached_tokens: int | None = None  # of its prompt, found there when it first joined
        self.rank = 0  # the data-parallel rank that holds its K and V
        self.swapped_blocks = 0  # on the host
        self.reserved_blocks = 0  # taken before its K and V came
        self.loaded = False  # its K and V exist elsewhere and come without being computed
        self.ends_at = 0
        self.preemptions = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A sequence that has its prompt and nothing else."""
        return cls(request, None if request.prompt_ids is None else list(request.prompt_ids))

    @classmethod
    def continued(cls, request: Request, token_ids: list[int] | None) -> Sequence:
        """A sequence whose prompt was computed, and first token emitted, elsewhere, from where its K and V come."""
        sequence = cls(request, token_ids)
        sequence.standing = request.prompt_tokens + 1
        sequence.standing_computed = request.prompt_tokens
        sequence.loaded = True
        return sequence

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def tokens(self) -> int:
        return self.standing if self.clock is None else self.standing + self.clock.steps

    @property
    def computed(self) -> int:
        return self.standing_computed if self.clock is None else self.standing + self.clock.steps - 1

    @property
    def left_to_compute(self) -> int:
        """Tokens of one that does not decode that have no K and V yet."""
        return self.standing - self.standing_computed

    @property
    def emitted(self) -> int:
        return self.tokens - self.request.prompt_tokens

    @property
    def remaining(self) -> int:
        return self.request.output_tokens - self.emitted

    @property
    def finished(self) -> bool:
        return self.remaining <= 0


class Draft(NamedTuple):
    """Guesses for one sequence: a chain, or with `parents` a tree.

    `parents[i]` is the guess that guess i follows, -1 for the newest token of the sequence; it comes before i.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    def first(self, count: int) -> Draft:
        """At most `count` of the guesses: what comes first follows from nothing behind it."""
        if len(self.tokens) <= count:
            return self
        return Draft(self.tokens[:count], None if self.parents is None else self.parents[:count])


class Work(NamedTuple):
    """A sequence's part of a step: tokens `start : start + tokens` are computed, the last `len(drafts)` are guesses.

    The guesses are a chain, or with `parents` the tree of a `Draft`; each takes a token's place in the blocks. A chunk
    that does not reach the end of its prompt emits nothing.
    """

    sequence: int
    start: int
    tokens: int
    drafts: tuple[int, ...] = ()
    emits: bool = True
    parents: tuple[int, ...] | None = None

    @property
    def context(self) -> int:
        return self.start + self.tokens

    @property
    def logits_rows(self) -> int:
        return 1 + len(self.drafts) if self.emits else 0


def draft_depth(work: Work) -> int:
    """Guesses of the longest path: what can be accepted at most."""
    if work.parents is None:
        return len(work.drafts)
    depths: list[int] = []
    for parent in work.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


# The fields of `StepShape`, or the first of them where others follow from those.
Sums = tuple[Any, ...]
# A sequence with guesses, and how many, where nobody knows what they say.
Guess = tuple[Sequence, int]


class Step(NamedTuple):
    """One decision of the scheduler: what the engine computes next, and whom it admitted and preempted for that.

    `decoding` sequences each compute their newest token and together attend to `kv_tokens` tokens; `prompts` are whole
    prompts or chunks of them. The same step may be repeated up to `steady` times, each with one token more a sequence.
    `work` lists all parts where the scheduler was asked for it, else it is empty; `guesses` are those of which only the
    number is known. `resumed` sequences go on with K and V that exist elsewhere; `moved_blocks` cross links to the
    host, in either direction, `moved_by_one` of them that of the data-parallel rank with most. `cached_tokens` were
    found, not computed; who was preempted may find its own. `held_tokens` is what the blocks in use really hold. `sums`
    are the fields of `StepShape`, which decide the step's cost; `filling` says that nobody was under way before it.
    `growing` tokens more are seen by layers with each of the windows when the step is repeated.
    """

    decoding: int
    kv_tokens: int
    prompts: tuple[Work, ...]
    work: tuple[Work, ...]
    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    preempted: tuple[int, ...]
    moved_blocks: int
    cached_tokens: int
    blocks_used: int
    held_tokens: int
    num_blocks: int
    steady: int
    sums: Sums
    guesses: tuple[Guess, ...] = ()
    moved_by_one: int = 0
    filling: bool = False
    growing: tuple[int, ...] = ()

    @property
    def sequences(self) -> int:
        return self.decoding + len(self.prompts)

    @property
    def drafted(self) -> int:
        """Drafted tokens of all sequences."""
        if self.guesses:
            return sum([count for _, count in self.guesses])
        return sum(len(work.drafts) for work in self.work)


def drafts_of(step: Step, outcome: Outcome) -> Iterator[tuple[int, int, int]]:
    """Of each sequence with guesses its id, how long they are, and how many of them were accepted."""
    for (sequence, count), accepted in zip(step.guesses, outcome.accepted, strict=True):
        yield sequence.id, count, accepted
    if outcome.emitted is not None:
        for work in step.work:
            if work.drafts:
                yield work.sequence, draft_depth(work), len(outcome.emitted[work.sequence]) - 1


def step_sums(
    decoding: int,
    kv_tokens: int,
    listed: tuple[Work, ...],
    windows: tuple[int, ...] = (),
    seen: tuple[int, ...] = (),
) -> Sums:
    """The fields of `StepShape` of sequences that decode a token each, and of the `listed` work.

    Of those who decode layers with each of the `windows` see so many tokens.
    """
    if not listed:
        n = float(decoding)
        sums = (n, n, kv_tokens, kv_tokens, n, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return (*sums, sums_within((), windows, seen), ()) if windows else sums
    parts = [(work.start, work.tokens, work.logits_rows) for work in listed]
    sums = shape_sums(parts, decoding, kv_tokens)
    tiles = tiles_of(parts, windows)
    return (*sums, sums_within(parts, windows, seen), tiles) if windows or tiles else sums


class Outcome(NamedTuple):
    """What a step came to: its seconds, and the tokens that each sequence emitted (accepted drafts and one).

    `emitted` is None where nobody knows the tokens: each sequence then has emitted one a step, and as many more as
    `accepted` says of each of the step's `guesses`. `steps` equal steps may be one outcome, each `slope_s` longer than
    the one before.
    """

    time_s: float
    emitted: dict[int, tuple[int, ...]] | None = None
    steps: int = 1
    slope_s: float = 0.0
    accepted: tuple[int, ...] = ()

    @property
    def first_s(self) -> float:
        """Seconds of the first step."""
        return self.time_s / self.steps - self.slope_s * (self.steps - 1) / 2

    def time_of(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        return steps * (self.first_s + self.slope_s * (steps - 1) / 2)

    def until(self, seconds: float) -> Outcome:
        """Only the steps that begin before `seconds`: the engine looks up after each, and then sees what arrived."""
        if self.time_s <= seconds or self.steps == 1:
            return self
        steps = steps_before(seconds, self.first_s, self.slope_s, self.steps)
        return Outcome(self.time_of(steps), None, steps, self.slope_s)


def steps_before(seconds: float, first_s: float, slope_s: float, most: int) -> int:
    """How many of `most` steps, the first of `first_s` and each `slope_s` longer than the last, begin in `seconds`."""
    # steps * first + slope * steps * (steps - 1) / 2 = seconds
    half_s = slope_s / 2
    linear_s = first_s - half_s
    guess = 2 * seconds / (linear_s + math.sqrt(max(0.0, linear_s * linear_s + 2 * slope_s * seconds)))
    steps = min(max(1, math.ceil(guess)), most)
    while steps > 1 and (steps - 1) * (first_s + half_s * (steps - 2)) >= seconds:
        steps -= 1
    while steps < most and steps * (first_s + half_s * (steps - 1)) < seconds:
        steps += 1
    return steps
