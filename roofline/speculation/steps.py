"""What does a step with guesses yield, what does it cost, and how many guesses are worth it?

`chain` has the paper's closed forms, which take the cost of verification as 1. Here what guesses cost and what their
verification costs come from the roofline, so that they grow with the batch, and with the distinct experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from membound.roofline.applicable import check_applicable
from membound.roofline.cost import StepCost, step_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.operators import elementwise
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import acceptance_of, found_of
from membound.roofline.shape import Count, StepShape
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.roofline.speculation.by_depth import shares_by_depth
from membound.roofline.speculation.drafters import DrafterCost, DraftModel, drafter_of, glue_s
from membound.roofline.speculation.published import Acceptance, acceptance_for
from membound.roofline.speculation.token_tree import TokenTree
from membound.roofline.techniques import Drafts, EngineSetup, Size, Speculative
from membound.roofline.times.operator import Times

# Logits of a guess are written in fp32, and read for its probabilities and for the choice (assumed).
_ACCEPT_BYTES = 12.0


class Best(NamedTuple):
    """The length of drafts with the largest gain, and that gain; elementwise for arrays."""

    gamma: Count
    speedup: Count


@dataclass(frozen=True)
class Speculation:
    """The drafts of a set-up at work for a model: what a step yields, and what it costs on a device.

    `profile` is the content's acceptance, which holds for other trees and depths as `by_depth.py` says. Without it that
    of the drafts holds. `counted` is what others counted where nobody gave an alpha. Shapes are those of a plain step,
    in which each decoding sequence has one new token.
    """

    model: ModelSpec
    setup: EngineSetup
    profile: AcceptanceProfile | None = None
    counted: Acceptance | None = None

    @property
    def drafts(self) -> Drafts:
        """What drafts; raises MemboundError for a set-up without speculation."""
        if self.setup.drafts is None:
            raise MemboundError("this set-up does not speculate; add a technique such as ngram_speculation or eagle")
        return self.setup.drafts

    @cached_property
    def plain(self) -> EngineSetup:
        """The set-up without speculation: what is verified is costed with it."""
        return replace(self.setup, drafts=None)

    @cached_property
    def tree(self) -> TokenTree:
        """The guesses of a step that has any."""
        return self.drafts.tree

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """The chance that a step with guesses accepts at least 1, 2 .. gamma of them."""
        tree, drafts = self.tree, self.drafts
        if self.profile is None or not tree.nodes:
            return tree.acceptance_by_depth
        shares = shares_by_depth(drafts)
        return tuple(map(float, self.profile.acceptance_by_position(tree.depth, drafts.hit_rate, shares)))

    @property
    def expected_tokens(self) -> float:
        """Tokens that a step emits for each sequence: one, and the accepted guesses of those that have any."""
        return 1.0 + self.drafts.hit_rate * sum(self.acceptance_by_depth)

    @property
    def acceptance_error(self) -> float:
        """The relative interval of a step's tokens, from that of an alpha that others counted; 0 of a given one."""
        if self.counted is None or not self.tree.nodes:
            return 0.0
        plain, drafts = replace(self, profile=None, counted=None), self.drafts
        low, middle, high = (
            replace(plain, setup=replace(self.setup, drafts=replace(drafts, alpha=alpha))).expected_tokens
            for alpha in (self.counted.low, self.counted.alpha, self.counted.high)
        )
        return max(high / middle, middle / low) - 1.0

    @property
    def verified_tokens(self) -> float:
        """Guesses that a step verifies for each sequence, on average over those without any."""
        return self.drafts.hit_rate * self.tree.nodes

    def plain_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of the step without guesses."""
        return step_cost(self.model, self.plain, times, shape).time_s

    def verify_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of the model's own step over the guesses."""
        return step_cost(self.model, self.plain, times, shape.with_guesses(self.verified_tokens)).time_s

    def verify_each_s(self, times: Times, shape: StepShape, guesses: Count) -> Count:
        """The same for other numbers of guesses, one an element of the shape."""
        found = shape.with_guesses(self.drafts.hit_rate * np.asarray(guesses))
        seconds = step_cost(self.model, self.plain, times, found).time_s
        return np.broadcast_to(seconds, np.shape(guesses))

    def draft_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds in which the drafter proposes, and its guesses are sampled and accepted or not.

        It reads the step's prompts too, in order to have them cached. What the engine's own tokens take to be sampled
        is in its profile; on a CPU the host's operator counts all rows.
        """
        if not self.tree.nodes:
            return 0.0
        return self._drafter.seconds(times, shape, self.tree) + self._accept_s(times, shape)

    def draft_table(self, times: Times, shape: StepShape) -> Callable[[Speculation], float]:
        """`draft_s` of this step for speculation of other sizes, from one table of the drafter's passes."""
        passes_s = self._drafter.table(times, shape)

        def draft_s(other: Speculation) -> float:
            if passes_s is None:
                return float(other.draft_s(times, shape))
            return passes_s(other.tree) + float(other._accept_s(times, shape))

        return draft_s

    def reading(self, times: Times, shape: StepShape) -> tuple[StepCost, Count]:
        """The first pass of a drafter that reads, over prompts too, and seconds beside those of its operators."""
        assert isinstance(self._drafter, DraftModel), "only a model reads"
        return self._drafter.reading(times, shape)

    def _accept_s(self, times: Times, shape: StepShape) -> Count:
        if times.hardware.kind == "cpu":
            return 0.0
        logits = self.verified_tokens * shape.decode_part.sequences * self.model.vocab
        moved = elementwise("accept", "scores", 1, logits, _ACCEPT_BYTES * logits)
        decodes = np.asarray(logits) > 0
        return np.where(decodes, times.of(moved, 0.0).time_s + glue_s(times, self.setup), 0.0)[()]

    def step_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of a step: drafting, then verification."""
        return self.draft_s(times, shape) + self.verify_s(times, shape)

    def speedup(self, times: Times, shape: StepShape) -> Count:
        """How many times as fast as plain decoding; below 1 where the guesses cost more than they save."""
        return self.expected_tokens * self.plain_s(times, shape) / self.step_s(times, shape)

    def cost_ratio(self, times: Times, shape: StepShape) -> Count:
        """c: what a guess at one position costs, against a plain step."""
        return self.draft_s(times, shape) / max(self.drafts.gamma, 1) / self.plain_s(times, shape)

    def with_gamma(self, gamma: int) -> Speculation:
        """The same drafter with another length of drafts; a tree keeps its nodes, 0 switches speculation off."""
        return replace(self, setup=replace(self.setup, drafts=replace(self.drafts, gamma=gamma)))

    def with_size(self, size: Size) -> Speculation:
        """The same drafter with another length, or another tree."""
        drafts = replace(self.drafts, gamma=size.depth, nodes=size.nodes)
        return replace(self, setup=replace(self.setup, drafts=drafts))

    def best_gamma(self, times: Times, shape: StepShape, most: int = 16) -> Best:
        """The length of drafts with the largest gain at this step (or each of many), 0 where plain decoding wins."""
        gains = [np.asarray(self.with_gamma(gamma).speedup(times, shape)) for gamma in range(most + 1)]
        table = np.stack(np.broadcast_arrays(*gains))
        best, gain = table.argmax(axis=0), table.max(axis=0)
        return Best(best.astype(float), gain) if best.ndim else Best(int(best), float(gain))

    @property
    def drafter_weights_bytes(self) -> float:
        """Bytes that the drafter adds to the weights of one device."""
        return self._drafter.weights_bytes()

    @property
    def drafter_reads(self) -> bool:
        """Whether the drafter reads prompts into a cache of its own before it guesses."""
        return self._drafter.reads

    @cached_property
    def _drafter(self) -> DrafterCost:
        return drafter_of(self.model, self.drafts, self.plain)


def speculation_of(scenario: Scenario, model: ModelSpec | None = None) -> Speculation | None:
    """The speculation of a scenario with its workload's acceptance; None where it has none."""
    model = model or resolve_model(scenario.model)
    counted = counted_for(scenario, model)
    setup, workload = with_counted_alpha(scenario, model).setup, scenario.workload
    if setup.drafts is None:
        return None
    kind = setup.drafts.kind
    found = found_of(workload, kind)
    if found is not None:
        setup = replace(setup, drafts=replace(setup.drafts, hit_rate=found))
    return Speculation(model, setup, acceptance_of(workload, kind), counted)


def counted_for(scenario: Scenario, model: ModelSpec) -> Acceptance | None:
    """What others counted of the scenario's drafter where neither its technique nor its workload says how often
    guesses are right; None where somebody does, or nobody counted."""
    drafts = scenario.setup.drafts
    if drafts is None or not drafts.assumed or scenario.workload.acceptance is not None:
        return None
    return acceptance_for(model, drafts, scenario.workload.task)


def with_counted_alpha(scenario: Scenario, model: ModelSpec) -> Scenario:
    """The scenario with the alpha that others counted for its model, where it gives none and its task has none."""
    counted, drafts = counted_for(scenario, model), scenario.setup.drafts
    if counted is None or drafts is None or not counted.pair:
        return scenario
    if acceptance_of(scenario.workload, drafts.kind) is not None:
        return scenario
    named = (
        one.model_copy(update={"alpha": counted.alpha}) if isinstance(one, Speculative) else one
        for one in scenario.techniques
    )
    return scenario.with_techniques(tuple(named))


def checked_speculation(scenario: Scenario, model: ModelSpec) -> Speculation | None:
    """The speculation of the scenario's replica; raises MemboundError where it cannot be divided or drafted so, or
    names something that its model lacks."""
    check_parallel(model, scenario.setup)
    check_applicable(model, scenario.setup)
    speculation = speculation_of(scenario, model)
    if speculation is not None:
        _ = speculation.drafter_weights_bytes  # a drafter that this model cannot have is refused here
    return speculation
