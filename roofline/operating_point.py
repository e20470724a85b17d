"""Where does one step stand under the roofs, and what would the next larger batches be bound by?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from membound.roofline.applicable import check_applicable
from membound.roofline.cost import StepCost, pipelined_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.engine_memory import EngineLimits, padding_bytes
from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.memory import MemoryBreakdown, MemoryTerms, activation_terms, weights_by_part
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.operator_groups import OperatorGroup, grouped
from membound.roofline.point_json import point_json
from membound.roofline.precision.chosen import Formats
from membound.roofline.precision.plan import compute_dtype
from membound.roofline.remedies import remedies
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.known import times_for
from membound.roofline.times.operator import Times
from membound.roofline.times.origin import Origin, origin_of

if TYPE_CHECKING:
    from membound.roofline.speculation.steps import Speculation

Phase = Literal["decode", "prefill", "verify"]
PHASES: tuple[Phase, ...] = get_args(Phase)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 32768, 131072)
# Sequences that nobody puts into one step: where the search for the largest batch ends.
MOST_SEQUENCES = 1_000_000

# Guesses that a verify step checks where nothing says how many.
USUAL_GUESSES = 4


@dataclass(frozen=True)
class Ridge:
    """Where the roofs of memory and of the matrix unit meet for the dtype that computes the layers' linears."""

    dtype: str
    flops_per_s: float
    bytes_per_s: float
    intensity: float

    @property
    def flops_per_byte(self) -> float:
        return self.flops_per_s / self.bytes_per_s

    @property
    def distance(self) -> float:
        """The step's arithmetic intensity in ridges: below 1 memory is the nearer roof, above 1 compute."""
        return self.intensity / self.flops_per_byte


class EmittedToken(NamedTuple):
    """What a token of speculation takes: seconds of a step that drafts and verifies over the tokens that it emits.

    The interval is that of the times with that of how many guesses are accepted: both are independent, so that their
    logarithms add in squares.
    """

    per_step: float
    acceptance_error: float
    time_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class OperatingPoint:
    """A step of a model on a device. `context` is the prompt's length in prefill; `gamma` counts guesses in verify,
    `drafting` says why so many, and `speculation` who makes them.

    Of a deployment on several devices the operators, bytes and memory are those of one of them.
    """

    model: ModelSpec
    hardware: HardwareSpec
    setup: EngineSetup
    phase: Phase
    batch: int
    context: int
    gamma: int = USUAL_GUESSES
    drafting: str | None = None
    speculation: Speculation | None = None
    limits: EngineLimits | None = None

    def __repr__(self) -> str:
        """One line, as a notebook shows it: model and device alone are pages."""
        return (
            f"<OperatingPoint: {self.phase} step of {self.model.name}, batch {self.batch}, context {self.context}, on "
            f"{self.hardware.name}, {self.time_s:.3g} s, bound by {self.bottleneck}>"
        )

    @classmethod
    def of(cls, scenario: Scenario, *, batch: int, context: int, phase: str) -> OperatingPoint:
        """A step of the scenario's model, hardware and techniques.

        Raises MemboundError for an unknown phase, a batch or a context out of range, and where the scenario names
        something unknown or divides the model as it cannot be divided.
        """
        known = next((known for known in PHASES if known == phase), None)
        if known is None:
            raise MemboundError(f"phase is '{phase}'; give {', '.join(PHASES)}")
        for name, value in (("batch", batch), ("context", context)):
            if not isinstance(value, Integral) or value < 1:
                raise MemboundError(f"{name} is {value!r}; give a whole number, 1 or more")
        model, hardware = resolve_model(scenario.model), get_hardware(scenario.hardware)
        drafting = speculation = None
        if known == "verify":
            # What only a verify step needs is imported for it alone.
            from membound.roofline.speculation.draft_choice import with_drafts
            from membound.roofline.speculation.steps import speculation_of

            scenario, drafting = with_drafts(scenario, model, hardware, StepShape.decode(batch, context))
            speculation = speculation_of(scenario, model)
            drafting = drafting or f"{USUAL_GUESSES} guesses are verified, since the scenario names no speculation"
        setup = scenario.setup
        gamma = setup.drafts.tokens if setup.drafts else USUAL_GUESSES
        if context > model.max_context:
            raise MemboundError(f"context is {context}, more than the {model.max_context} tokens of '{model.name}'")
        if known == "verify" and context <= gamma:
            raise MemboundError(
                f"context is {context}, but a verify step of {gamma} guesses has {gamma + 1} new tokens; give "
                f"{gamma + 1} or more"
            )
        check_parallel(model, setup)
        check_applicable(model, setup)
        return cls(model, hardware, setup, known, batch, context, gamma, drafting, speculation, scenario.limits)

    @cached_property
    def times(self) -> Times:
        return times_for(self.hardware, self.setup.profile)

    @property
    def shape(self) -> StepShape:
        if self.phase == "prefill":
            return StepShape.prefill(self.batch, self.context)
        return StepShape.verify(self.batch, max(self.context, 1 + self.drafts), self.drafts)

    @property
    def drafts(self) -> int:
        return self.gamma if self.phase == "verify" else 0

    @property
    def most_tokens(self) -> int:
        """Tokens that a verify step yields for a sequence at most: of a tree of guesses one path is kept."""
        return 1 + min(self.gamma, self.setup.drafts.gamma if self.setup.drafts else self.gamma)

    @cached_property
    def cost(self) -> StepCost:
        return pipelined_cost(self.model, self.setup, self.times, self.shape)

    @cached_property
    def time_s(self) -> float:
        """Seconds of the step."""
        return float(self.cost.time_s)

    @property
    def calibrated(self) -> bool:
        return self.hardware.calibration is not None

    @cached_property
    def origin(self) -> Origin:
        """What the times rest on."""
        return origin_of(self.times, self.cost.operators, self.time_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that steps like this one process in a second."""
        return float(self.shape.tokens) / self.time_s

    @cached_property
    def bound_seconds(self) -> tuple[dict[str, float], ...]:
        """Each operator's seconds under the bound that holds it."""
        return tuple(
            {bound: float(seconds) for bound, seconds in cost.seconds_by_bound().items()}
            for cost in self.cost.operators
        )

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each bound in the step's time."""
        bounds = ("memory_weights", "memory_kv", "compute", "link", "overhead")
        shares = {bound: sum(seconds.get(bound, 0.0) for seconds in self.bound_seconds) for bound in bounds}
        return {bound: seconds / self.time_s for bound, seconds in shares.items()} | {"idle": 0.0}

    @property
    def bottleneck(self) -> str:
        """The bound with the largest share."""
        return max(self.shares, key=self.shares.__getitem__)

    def bounds(self) -> list[tuple[str, float]]:
        """Each bound with its share of the step's time, the largest first, those without a share left out."""
        return sorted(((b, share) for b, share in self.shares.items() if share > 0), key=lambda item: -item[1])

    @cached_property
    def groups(self) -> tuple[OperatorGroup, ...]:
        """The operators by what they serve; groups without operators are left out."""
        return grouped(self.model, self.cost.operators, self.bound_seconds)

    @property
    def ridge(self) -> Ridge:
        """The roofs' meeting point, and the step's place beside it."""
        plan, calibration = self.setup.precision, self.hardware.calibration
        intensity = float(self.cost.arithmetic_intensity)
        if calibration is not None:
            rate = calibration.matrix_flops(plan.weights.name)
            return Ridge(plan.weights.name, rate, calibration.memory_bandwidth, intensity)
        compute = compute_dtype(plan.weights, plan.activations, self.hardware)
        return Ridge(compute.dtype, compute.flops_per_s, self.hardware.bandwidth_bytes_per_s, intensity)

    @cached_property
    def formats(self) -> Formats:
        """The formats of weights, activations and cache, and who says so."""
        parts = tuple(weights_by_part(self.model, self.setup))
        return Formats.of(self.model, self.setup.precision, parts, self.times.activation_bytes)

    # --- memory ---

    @cached_property
    def _terms(self) -> MemoryTerms:
        activations = activation_terms(self.model, self.setup, self.times.activation_bytes)
        held = self._footprint
        return MemoryTerms(held.weights_bytes, held.cache, activations, held.ranks)

    @cached_property
    def _footprint(self) -> Footprint:
        return Footprint.of(self.model, self.setup, self.limits)

    @property
    def weights_by_part(self) -> dict[str, float]:
        """Bytes of weights on one device by part of the model, those of a drafter, and what experts are padded by."""
        parts, drafter = weights_by_part(self.model, self.setup), self._footprint.drafter_weights_bytes
        more = {"drafter": drafter, "padding": padding_bytes(self.model, self.setup)}
        return parts | {part: held for part, held in more.items() if held}

    def _memory(self, batch: int, context: int) -> MemoryBreakdown:
        new, rows = (context, 1) if self.phase == "prefill" else (1 + self.drafts, 1 + self.drafts)
        return self._terms.at(float(batch * context), float(batch * new), float(batch * rows), float(batch))

    @cached_property
    def memory(self) -> MemoryBreakdown:
        return self._memory(self.batch, self.context)

    @property
    def _batch_of_rank(self) -> int:
        """Sequences on the data-parallel rank that has most of them."""
        return -(-self.batch // self.setup.parallel.dp)

    @property
    def state_bytes(self) -> float:
        """The part of the cache that does not grow with the context: recurrent states."""
        return self._terms.cache.state_bytes * self._batch_of_rank

    @property
    def fits(self) -> bool:
        return self._beyond_bytes(self.batch, self.context) <= 0.0

    @property
    def usable_bytes(self) -> float:
        """What weights, caches and the step's activations may take of the device's memory, as in a run."""
        return self._usable_beside(self.memory)

    def _usable_beside(self, held: MemoryBreakdown) -> float:
        activations = held.activation_bytes
        return self._footprint.usable_bytes(self.hardware.memory_bytes, activations) + activations

    def _beyond_bytes(self, batch: int, context: int) -> float:
        """Bytes by which a step exceeds the memory; below 0 where it fits."""
        held = self._memory(batch, context)
        return held.total_bytes - self._usable_beside(held)

    def remedy(self) -> str:
        """What to give so that it fits; empty where it does, or nothing that is known helps."""
        if self.fits:
            return ""
        activations, fewer = self.memory.activation_bytes, self.largest_batch()
        memory_bytes = self.hardware.memory_bytes

        def beside(held: Footprint) -> float:
            more = held.usable_bytes(memory_bytes) - held.usable_bytes(memory_bytes, activations)
            return held.sequence_bytes(float(self.context)) * self._batch_of_rank + more

        more = remedies(self.model, self.setup, memory_bytes, beside, self.limits).removeprefix("; give ")
        return " or ".join(filter(None, (f"a batch of at most {fewer:,}" if fewer else "", more)))

    @property
    def free_bytes(self) -> float:
        return max(0.0, self.usable_bytes - self.memory.total_bytes)

    def largest_batch(self) -> int:
        """Sequences that fit at this context: 0 where not even one does."""
        return _largest(lambda batch: self._beyond_bytes(batch, self.context), MOST_SEQUENCES)

    def largest_context(self) -> int:
        """Tokens that fit in each sequence at this batch, of those that the model allows: 0 where not even one does."""
        return _largest(lambda context: self._beyond_bytes(self.batch, context), self.model.max_context)

    # --- other operating points ---

    def with_batch(self, batch: int) -> OperatingPoint:
        return replace(self, batch=batch)

    @cached_property
    def at_batches(self) -> tuple[OperatingPoint, ...]:
        """The same step over all batches, up to the first that does not fit (at least this one)."""
        batches = sorted({*BATCHES, self.batch})
        points = [self if batch == self.batch else self.with_batch(batch) for batch in batches]
        return tuple(point for point in points if point.fits or point.batch <= self.batch)

    def sweep(self) -> list[SweepPoint]:
        """What each of those steps takes."""
        return [SweepPoint.of(point) for point in self.at_batches]

    def next_bound(self) -> tuple[int, str] | None:
        """The first larger batch that fits at which another bound has the largest share."""
        for point in self.at_batches:
            if point.batch > self.batch and point.bottleneck != self.bottleneck:
                return point.batch, point.bottleneck
        return None

    def emitted_token(self) -> EmittedToken | None:
        """A sequence's token where the scenario speculates, and None where it does not."""
        if self.phase != "verify" or self.speculation is None:
            return None
        found, shape = self.speculation, StepShape.decode(self.batch, self.context)
        tokens, error = found.expected_tokens, found.acceptance_error
        guessed = shape.with_guesses(found.verified_tokens)
        verify_s = pipelined_cost(self.model, found.plain, self.times, guessed).time_s
        time_s = float(verify_s + found.draft_s(self.times, shape)) / tokens
        within = math.exp(math.hypot(math.log1p(float(self.cost.relative_error)), math.log1p(error)))
        return EmittedToken(tokens, error, time_s, time_s / within, time_s * within)

    def breakeven_tokens(self) -> float:
        """Tokens that a verify step must yield for each sequence to be worth its time against plain decoding.

        What drafting itself takes comes on top.
        """
        return self.time_s / replace(self, phase="decode").time_s

    def to_json(self) -> dict[str, Any]:
        """What `membound predict --json` prints; see `point_json`."""
        return point_json(self)


def _largest(beyond: Callable[[int], float], most: int) -> int:
    """The largest count up to `most` that is not beyond what there is, of bytes that grow with it.

    They are made of straight lines, so that a guess between two known points is nearly always right.
    """
    low, high = 0, most
    low_bytes, high_bytes = beyond(low), beyond(high)
    if high_bytes <= 0.0:
        return high
    if low_bytes > 0.0:
        return low
    while high - low > 1:
        guess = low - int(low_bytes / (high_bytes - low_bytes) * (high - low))
        middle = min(max(guess, low + 1), high - 1)
        middle_bytes = beyond(middle)
        if middle_bytes <= 0.0:
            low, low_bytes = middle, middle_bytes
        else:
            high, high_bytes = middle, middle_bytes
    return low


@dataclass(frozen=True)
class SweepPoint:
    """A step at one batch: seconds with their interval, tokens a second, and the most that the bare roofs allow."""

    batch: int
    time_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    memory_roof_tokens_per_s: float
    compute_roof_tokens_per_s: float
    bottleneck: str

    @classmethod
    def of(cls, point: OperatingPoint) -> SweepPoint:
        cost = point.cost
        tokens = float(point.shape.tokens)
        memory_s = sum(float(op.time.memory_s) * op.operator.calls for op in cost.operators)
        compute_s = sum(float(op.time.compute_s) * op.operator.calls for op in cost.operators)
        return cls(
            batch=point.batch,
            time_s=point.time_s,
            low_s=float(cost.low_s),
            high_s=float(cost.high_s),
            tokens_per_s=point.tokens_per_s,
            low_tokens_per_s=tokens / float(cost.high_s),
            high_tokens_per_s=tokens / float(cost.low_s),
            memory_roof_tokens_per_s=tokens / memory_s,
            compute_roof_tokens_per_s=tokens / compute_s,
            bottleneck=point.bottleneck,
        )
