"""What is a request, and what does the engine know of it while it is served?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from membound.simulator.scheduling.prefix import PrefixChain

Status = Literal["waiting", "running", "completed", "rejected"]


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


@dataclass
class Sequence:
    """A request in the engine.

    Of its `tokens` tokens (prompt and emitted), the first `computed` have their K and V in `blocks`. A sequence in
    decode has exactly one that is not computed: the newest. `token_ids` follows `tokens` where content is known.
    """

    request: Request
    token_ids: list[int] | None
    tokens: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: Status = "waiting"
    preemptions: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A sequence that has its prompt and nothing else."""
        ids = None if request.prompt_ids is None else list(request.prompt_ids)
        return cls(request, ids, request.prompt_tokens)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def emitted(self) -> int:
        return self.tokens - self.request.prompt_tokens

    @property
    def remaining(self) -> int:
        return self.request.output_tokens - self.emitted

    @property
    def finished(self) -> bool:
        return self.remaining <= 0


@dataclass(frozen=True)
class Work:
    """A sequence's part of a step: tokens `start : start + tokens` are computed, the last `len(drafts)` are guesses."""

    sequence: int
    start: int
    tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class Step:
    """One decision of the scheduler: what the engine computes next, and whom it admitted and preempted for that."""

    work: tuple[Work, ...]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    blocks_used: int
    num_blocks: int


@dataclass(frozen=True)
class Outcome:
    """What a step came to: how long it took, and the tokens that each sequence emitted (accepted drafts and one)."""

    time_s: float
    emitted: dict[int, tuple[int, ...]]
