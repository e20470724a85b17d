"""How do closed forms see one engine of a scenario? As a deployment whose steps may verify guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from membound.roofline.cost import StepCost, micro_batch, step_cost
from membound.roofline.engine_memory import EngineLimits
from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import Scenario
from membound.roofline.serving import Deployment, chunks
from membound.roofline.shape import Count, StepShape
from membound.roofline.speculation.steps import Speculation, checked_speculation
from membound.simulator.load import Lengths
from membound.simulator.scheduling.build import batching_of
from membound.simulator.scheduling.policies import BATCHINGS, Batching

# The share of a step's time that a drafter takes stands beside the bounds of verification.
DRAFTING = "drafting"


@dataclass(frozen=True)
class SpeculatingDeployment(Deployment):
    """A deployment of up to `seats` sequences whose decode steps may carry guesses, and whose steps `batching` fills.

    Its seconds a token are those of tokens, not of steps.
    """

    speculation: Speculation | None = None
    seats: float = math.inf
    batching: Batching = BATCHINGS["chunked_prefill"]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode step emits for each sequence."""
        return 1.0 if self.speculation is None else self.speculation.expected_tokens

    def pass_s(self, shape: StepShape) -> Count:
        return super().pass_s(shape) if self.speculation is None else self.speculation.step_s(self.times, shape)

    def token_s(self, batch: Count, context: float) -> Count:
        return super().token_s(batch, context) / self.tokens_per_step

    def joining_s(
        self, batch: Count, prompt_tokens: float, output_tokens: float, together: Count | None = None
    ) -> Count:
        if not self.batching.prompts_alone:
            return super().joining_s(batch, prompt_tokens, output_tokens, together)
        together = self.together(batch, prompt_tokens, output_tokens) if together is None else together
        steps = chunks(prompt_tokens, float(self.chunk_tokens))
        alone = (times * self.steps_s(StepShape.prefill(together, chunk, cached)) for chunk, cached, times in steps)
        return sum(alone, np.zeros(np.shape(batch))[()]) / together

    def group_s(self, others: float, group: float, prompt_tokens: float, context: float) -> float:
        """Seconds of the steps in which a group's prompts are computed beside a token of each of the others."""
        beside = StepShape.decode(others, context)
        steps = chunks(prompt_tokens, float(self.chunk_tokens))
        return sum(n * self.step_s(beside + StepShape.prefill(group, chunk, cached)) for chunk, cached, n in steps)

    def joined_s(self, batch: float, context: float) -> float:
        return 0.0 if self.batching.prompts_alone else super().joined_s(batch, context)

    @cached_property
    def footprint(self) -> Footprint:
        """With the drafter that speculates here, or with none."""
        drafts = None if self.speculation is None else self.speculation.drafts
        return Footprint.of(self.model, replace(self.setup, drafts=drafts), self.limits)

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.seats / self.setup.parallel.dp, float(self.chunk_tokens))

    def with_batch_that_fits(self, batch: float, context: float) -> float:
        return min(super().with_batch_that_fits(batch, context), self.seats)

    def decode_shape(self, batch: float, context: float) -> StepShape:
        """A decode step without guesses, of one of a pipeline's micro-batches."""
        return micro_batch(self.setup.parallel, StepShape.decode(batch, context))[0]

    def verify_cost(self, batch: float, context: float) -> StepCost:
        """The model's own part of a decode step: of the tokens, and of the guesses where there are any."""
        shape = self.decode_shape(batch, context)
        if self.speculation is None:
            return step_cost(self.model, self.setup, self.times, shape)
        guesses = self.speculation.verified_tokens
        return step_cost(self.model, self.speculation.plain, self.times, shape.with_guesses(guesses))

    def shares(self, batch: float, context: float) -> dict[str, float]:
        """The share of each bound in the time of a decode step, drafting apart."""
        cost = self.verify_cost(batch, context)
        verify_s, shares = float(cost.time_s), cost.shares()
        drafting_s = 0.0
        if self.speculation is not None:
            drafting_s = float(self.speculation.draft_s(self.times, self.decode_shape(batch, context)))
        whole = verify_s + drafting_s
        return {bound: float(shares[bound]) * verify_s / whole for bound in BOUNDS} | {DRAFTING: drafting_s / whole}


def deployment_of(scenario: Scenario, model: ModelSpec, hardware: HardwareSpec) -> SpeculatingDeployment:
    """One replica as the scenario sets it up.

    Raises MemboundError where the model cannot be divided or drafted so, or the engine contradicts its techniques.
    """
    setup, engine = scenario.setup, scenario.engine
    batching = batching_of(engine, setup)
    return SpeculatingDeployment(
        model,
        hardware,
        replace(setup, policy="static" if batching.name == "static" else "continuous"),
        chunk_tokens=scenario.step_tokens,
        speculation=checked_speculation(scenario, model),
        seats=float(scenario.seats),
        batching=batching,
    )


def with_room_for(scenario: Scenario, lengths: Lengths) -> Scenario:
    """The scenario with steps that hold the longest request of other lengths than its own, where prompts are whole."""
    engine, longest = scenario.engine, math.ceil(lengths.longest)
    if longest <= scenario.step_tokens or not batching_of(engine, scenario.setup).whole_prompts:
        return scenario
    return scenario.with_value("engine.max_batched_tokens", longest)


def check_context(model: ModelSpec, lengths: Lengths) -> None:
    """Raises MemboundError where requests of mean lengths are longer than the model was made for."""
    whole = lengths.prompt_tokens + lengths.output_tokens
    if whole > model.max_context:
        raise MemboundError(
            f"a request of {whole:.0f} tokens, prompt and output, is more than the {model.max_context} tokens of "
            f"'{model.name}'; give a smaller context, shorter workload.prompts, or fewer workload.output_tokens"
        )
