"""What do the clients ask for: when requests arrive, how long they are, and what they share?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from membound.roofline.part import MAX_TOKENS, Part, Tokens
from membound.roofline.speculation.acceptance import AcceptanceProfile

# Below it the times of arrivals are so large that those of requests are lost in a float beside them.
_LEAST_RPS = 1e-4


def _is_seen(rate_rps: float) -> float:
    if rate_rps < _LEAST_RPS:
        raise ValueError(
            f"it is less than one request in three hours, of which nothing is seen; give {_LEAST_RPS} or more"
        )
    return rate_rps


Rate = Annotated[float, Field(gt=0, le=1e9, description="mean arrivals a second"), AfterValidator(_is_seen)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
TaskName = Literal["code", "chat", "retrieval", "reasoning", "agent"]
TraceFormatName = Literal["azure", "burstgpt", "vidur", "mooncake", "llmservingsim", "sharegpt"]


def _check_order(low: int, high: int) -> None:
    if high < low:
        raise ValueError(f"high is {high}, below low ({low})")


class TraceFile(Part):
    """Requests that somebody recorded; the format is known by its column or field names where it is not given."""

    file: str
    format: Literal["auto"] | TraceFormatName = "auto"
    start_s: Seconds = Field(0.0, description="seconds after the first row at which the window begins")
    duration_s: float | None = Field(None, gt=0, description="length of the window; to the end where it is not given")
    zero_tokens: Literal["refuse", "drop", "one"] = Field(
        "refuse", description="rows without input or output tokens (failed requests): refuse the file, or as one token"
    )
    chars_per_token: float | None = Field(None, gt=0, le=100, description="for text without token counts (sharegpt)")


class FixedLength(Part):
    kind: Literal["fixed"] = "fixed"
    tokens: Tokens


class UniformLength(Part):
    kind: Literal["uniform"] = "uniform"
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> UniformLength:
        _check_order(self.low, self.high)
        return self


class LognormalLength(Part):
    """exp(N(ln median, sigma)), rounded and clipped to [low, high] tokens."""

    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0, le=MAX_TOKENS)
    sigma: float = Field(ge=0, le=10)
    low: Tokens = 1
    high: Tokens = 1_000_000

    @model_validator(mode="after")
    def _ordered(self) -> LognormalLength:
        _check_order(self.low, self.high)
        return self


class QuantileLength(Part):
    """A share `shares[i]` of the lengths is at most `tokens[i]`; straight lines between."""

    kind: Literal["quantiles"] = "quantiles"
    shares: tuple[float, ...] = Field(min_length=2)
    tokens: tuple[Tokens, ...]

    @model_validator(mode="after")
    def _rising(self) -> QuantileLength:
        if len(self.tokens) != len(self.shares):
            raise ValueError(f"tokens has {len(self.tokens)} values for {len(self.shares)} shares; give one for each")
        if self.shares[0] != 0 or self.shares[-1] != 1 or list(self.shares) != sorted(set(self.shares)):
            raise ValueError("shares must rise from 0 to 1")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError("tokens must not fall")
        return self


class HistogramLength(Part):
    """`counts[i]` requests had `edges[i]` to `edges[i + 1] - 1` tokens, evenly spread."""

    kind: Literal["histogram"] = "histogram"
    edges: tuple[Tokens, ...] = Field(min_length=2)
    counts: tuple[Annotated[float, Field(ge=0)], ...]

    @model_validator(mode="after")
    def _rising(self) -> HistogramLength:
        if len(self.counts) != len(self.edges) - 1:
            raise ValueError(f"counts has {len(self.counts)} values for {len(self.edges)} edges; give one fewer")
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError("edges must rise")
        if not sum(self.counts) > 0:
            raise ValueError("counts are all zero")
        return self


class TraceLength(TraceFile):
    """Lengths drawn from one column of a trace, with replacement and without regard to the other column."""

    kind: Literal["trace"] = "trace"
    column: Literal["input", "output"]


Length = Annotated[
    FixedLength | UniformLength | LognormalLength | QuantileLength | HistogramLength | TraceLength,
    Field(discriminator="kind"),
]


class FixedDuration(Part):
    kind: Literal["fixed"] = "fixed"
    seconds: Seconds


class ExponentialDuration(Part):
    kind: Literal["exponential"] = "exponential"
    mean_s: float = Field(gt=0, le=1e9)


class LognormalDuration(Part):
    kind: Literal["lognormal"] = "lognormal"
    median_s: float = Field(gt=0, le=1e9)
    sigma: float = Field(ge=0, le=10)


Duration = Annotated[FixedDuration | ExponentialDuration | LognormalDuration, Field(discriminator="kind")]


class ConstantArrivals(Part):
    """One request every 1 / rate seconds, from time 0."""

    kind: Literal["constant"] = "constant"
    rate_rps: Rate


class PoissonArrivals(Part):
    kind: Literal["poisson"] = "poisson"
    rate_rps: Rate


class GammaArrivals(Part):
    """Independent gaps with a gamma distribution; `cv` is their standard deviation over their mean (1 is Poisson)."""

    kind: Literal["gamma"] = "gamma"
    rate_rps: Rate
    cv: float = Field(gt=0, le=100)


class MmppState(Part):
    rate_rps: float = Field(ge=0, le=1e9)
    dwell_s: float = Field(gt=0, le=1e9, description="mean stay; stays are exponential")


class MmppArrivals(Part):
    """Markov-modulated Poisson: the rate changes with a hidden state; each other state is equally likely next."""

    kind: Literal["mmpp"] = "mmpp"
    states: tuple[MmppState, ...] = Field(min_length=2, max_length=100)
    first: int | None = Field(None, ge=0, description="state in which the run begins; drawn by their shares without it")

    @model_validator(mode="after")
    def _some_arrive(self) -> MmppArrivals:
        if not any(state.rate_rps for state in self.states):
            raise ValueError("the rate_rps of all states is 0; nothing would arrive")
        if self.first is not None and self.first >= len(self.states):
            raise ValueError(
                f"first is {self.first}, but states has {len(self.states)}; give 0 to {len(self.states) - 1}"
            )
        arrivals_a_stay = sum(state.rate_rps * state.dwell_s for state in self.states) / len(self.states)
        if arrivals_a_stay < 0.01:
            raise ValueError(
                f"states bring {arrivals_a_stay:.2g} arrivals a stay; below 0.01 it is Poisson at the mean rate, "
                "so use that"
            )
        return self


class SineArrivals(Part):
    """Poisson with the rate mean * (1 + swing * cos(2 pi (t - peak) / period)): a day, by default."""

    kind: Literal["sine"] = "sine"
    rate_rps: Rate
    swing: float = Field(ge=0, le=1)
    period_s: float = Field(86_400.0, gt=0, le=1e9)
    peak_s: Seconds = Field(50_400.0, description="time of the highest rate; 14:00 by default")
    start_s: Seconds = Field(0.0, description="time at which the run begins; midnight by default")


class HourlyArrivals(Part):
    """Poisson with a rate that is constant in each of equal parts of a period and repeats; 24 hours by default."""

    kind: Literal["hourly"] = "hourly"
    rates_rps: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = Field(min_length=1, max_length=10_000)
    part_s: float = Field(3600.0, gt=0, le=1e9)
    start_s: Seconds = Field(0.0, description="time at which the run begins, counted from the first part")

    @model_validator(mode="after")
    def _some_arrive(self) -> HourlyArrivals:
        if not any(self.rates_rps):
            raise ValueError("rates_rps are all 0; nothing would arrive")
        return self


class TraceArrivals(TraceFile):
    """The times of a trace, `speed` times as fast; prompts and outputs are its rows' where none are given.

    Times count from the beginning of the window. `workload.requests` caps the rows.
    """

    kind: Literal["trace"] = "trace"
    speed: float = Field(1.0, gt=0, le=1e6, description="2 sends the same requests at twice the rate")


class ClosedLoop(Part):
    """`concurrency` users; each sends its next request `think` after the last one was answered (at once without).

    Users who think also think before their first request, so they do not all arrive at time 0.
    """

    kind: Literal["closed_loop"] = "closed_loop"
    concurrency: int = Field(ge=1, le=MAX_TOKENS)
    think: Duration | None = None


OpenArrivals = (
    ConstantArrivals | PoissonArrivals | GammaArrivals | MmppArrivals | SineArrivals | HourlyArrivals | TraceArrivals
)
Arrivals = Annotated[OpenArrivals | ClosedLoop, Field(discriminator="kind")]


class TextPrompts(Part):
    """Real prompts from a file in `data/prompts/` (or a path); their recorded continuations are the content."""

    kind: Literal["text"] = "text"
    file: str


class SyntheticPrompts(Part):
    """Random token ids of a given length: nothing repeats, so nothing can be looked up or shared."""

    kind: Literal["synthetic"] = "synthetic"
    tokens: Length


class TracePrompts(TraceFile):
    """The rows of a trace in order, again from the first after the last; their times are not used."""

    kind: Literal["trace"] = "trace"


class FixedTurns(Part):
    kind: Literal["fixed"] = "fixed"
    count: int = Field(ge=1, le=10_000)


class GeometricTurns(Part):
    """After each turn a conversation ends with the same chance; it has at most `most` turns."""

    kind: Literal["geometric"] = "geometric"
    mean: float = Field(ge=1, le=10_000, description="before `most` cuts it")
    most: int = Field(1000, ge=1, le=10_000)


class SessionPrompts(Part):
    """Conversations: an arrival begins one, and its next turn is sent `think` after the last one was answered.

    A turn's prompt is the system prompt, which all conversations of a group share, all earlier turns with their
    answers, and `tokens` new tokens. A conversation ends before a turn that would exceed `context_limit` tokens.
    """

    kind: Literal["sessions"] = "sessions"
    tokens: Length
    turns: Annotated[FixedTurns | GeometricTurns, Field(discriminator="kind")]
    think: Duration
    system_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    groups: int = Field(1, ge=1, le=1_000_000, description="different system prompts")
    popularity: float = Field(0.0, ge=0, le=10, description="Zipf exponent of the groups; 0 is equal shares")
    context_limit: Tokens | None = None

    @model_validator(mode="after")
    def _no_idle_option(self) -> SessionPrompts:
        if self.groups > 1 and not self.system_tokens:
            raise ValueError(f"groups is {self.groups} without system_tokens, so it changes nothing; give both")
        if self.popularity and self.groups == 1:
            raise ValueError(f"popularity is {self.popularity} with one group, so it changes nothing; give more groups")
        return self


Prompts = Annotated[TextPrompts | SyntheticPrompts | TracePrompts | SessionPrompts, Field(discriminator="kind")]


class Workload(Part):
    """The requests of a run. What is not given comes from the trace, and then from the task."""

    arrivals: Arrivals
    requests: int | None = Field(None, ge=1, le=MAX_TOKENS, description="requests in all; a trace's rows at most")
    task: TaskName | None = Field(None, description="a profile of data/tasks: lengths and acceptance of drafts")
    prompts: Prompts | None = None
    output_tokens: Length | None = None
    rank_correlation: float | None = Field(
        None, gt=-1, lt=1, description="Spearman correlation of new prompt tokens with output tokens"
    )
    acceptance: AcceptanceProfile | None = Field(None, description="of drafts, where the content is not recorded")
    seed: int = Field(0, ge=0, lt=2**63)

    @property
    def rows_of_trace(self) -> bool:
        """Whether the arrivals' trace also says how long the requests are."""
        return self.prompts is None and isinstance(self.arrivals, TraceArrivals)

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        trace = self.rows_of_trace or isinstance(self.prompts, TracePrompts)
        if self.requests is None and not isinstance(self.arrivals, TraceArrivals):
            raise ValueError("requests is missing; only arrivals of a trace end by themselves")
        if self.prompts is None and self.task is None and not self.rows_of_trace:
            raise ValueError("prompts is missing; give it, a task, or arrivals of a trace")
        if self.output_tokens is None and self.task is None and not trace:
            raise ValueError("output_tokens is missing; give it, a task, or a trace")
        if self.rank_correlation and (trace or isinstance(self.prompts, TextPrompts)):
            raise ValueError(
                f"rank_correlation is {self.rank_correlation}, but the prompts are recorded with their own lengths; "
                "remove it"
            )
        new_tokens = getattr(self.prompts, "tokens", None)
        if self.rank_correlation and any(isinstance(part, FixedLength) for part in (new_tokens, self.output_tokens)):
            raise ValueError(f"rank_correlation is {self.rank_correlation}, but a fixed length follows nothing")
        if self.acceptance and isinstance(self.prompts, TextPrompts):
            raise ValueError("acceptance has no effect on recorded text, whose drafts are replayed; remove it")
        return self
