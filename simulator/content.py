"""Which drafted tokens would have been accepted?"""

from __future__ import annotations

import random
from collections.abc import Sequence as Several
from typing import Protocol

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import acceptance_of
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.simulator.scheduling.request import Sequence, Work
from membound.simulator.scheduling.workload.acceptance import AcceptanceSampler


class Content(Protocol):
    """Knows, or models, what the model would write."""

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that `sequence` emits in a step: the accepted drafts and one more."""


class RecordedContent:
    """The continuation was recorded: a draft is accepted when it is what the model wrote."""

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        outputs = sequence.request.output_ids
        assert outputs is not None, "recorded content needs the output tokens"
        ahead = outputs[sequence.emitted : sequence.emitted + len(work.drafts) + 1]
        accepted = 0
        while accepted < len(work.drafts) and work.drafts[accepted] == ahead[accepted]:
            accepted += 1
        return ahead[: accepted + 1]


class ModelledContent:
    """Nobody knows the text: drafts are accepted as its profile says, until one is not."""

    def __init__(self, profile: AcceptanceProfile, seed: int) -> None:
        self.sampler = AcceptanceSampler(profile, seed)

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        if not work.drafts:
            return (0,)
        wanted = sequence.request.output_tokens
        accepted = self.sampler.accepted(sequence.id, wanted, sequence.emitted, len(work.drafts))
        if sequence.emitted + accepted + 1 >= wanted:
            self.sampler.ended(sequence.id)
        return (0,) * (accepted + 1)


class GuessedContent:
    """Nobody knows the text: the best path of a step's guesses is right to a depth that is drawn, each with its chance.

    The draws follow from (seed, request, position) alone, so that a request meets the same content in any schedule.
    """

    def __init__(self, chances: Several[float], seed: int) -> None:
        self.chances = chances
        self.seed = seed

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        draw = random.Random(f"{self.seed}/{sequence.id}/{sequence.emitted}/accepted").random()
        return (0,) * (1 + sum(draw < chance for chance in self.chances[: len(work.drafts)]))


def content_for(scenario: Scenario, recorded: bool) -> Content:
    """Recorded text, or content like that of the workload's profile or task, else of the technique's alpha."""
    if recorded:
        return RecordedContent()
    drafts = scenario.setup.drafts
    if drafts is None:
        return ModelledContent(AcceptanceProfile.constant(0.0), scenario.workload.seed)
    profile = acceptance_of(scenario.workload, drafts.content)
    if profile is not None:
        return ModelledContent(profile, scenario.workload.seed)
    if drafts.nodes is None and drafts.decay == 1.0:
        return ModelledContent(AcceptanceProfile.constant(drafts.alpha), scenario.workload.seed)
    return GuessedContent(drafts.tree.acceptance_by_depth, scenario.workload.seed)
