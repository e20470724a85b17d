"""Which drafted tokens would have been accepted?"""

from __future__ import annotations

from collections.abc import Sequence as Several

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import acceptance_of
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.roofline.speculation.by_depth import shares_by_depth
from membound.simulator.scheduling.request import Guess, Sequence, Work
from membound.simulator.scheduling.workload.acceptance import AcceptanceSampler


class RecordedContent:
    """The continuation was recorded: a draft is accepted when it is what the model wrote."""

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that `sequence` emits in a step: the accepted drafts and one more."""
        outputs = sequence.request.output_ids
        assert outputs is not None, "recorded content needs the output tokens"
        ahead = outputs[sequence.emitted : sequence.emitted + len(work.drafts) + 1]
        accepted = 0
        while accepted < len(work.drafts) and work.drafts[accepted] == ahead[accepted]:
            accepted += 1
        return ahead[: accepted + 1]


class ModelledContent:
    """Nobody knows the text: guesses are accepted as a profile says, those of each depth `shares` times as often."""

    def __init__(self, profile: AcceptanceProfile, seed: int, shares: Several[float] = ()) -> None:
        self.sampler = AcceptanceSampler(profile, seed, shares)

    def accepted(self, guesses: Several[Guess]) -> tuple[int, ...]:
        """How many of each sequence's guesses."""
        clock = guesses[0][0].clock
        assert clock is not None, "who guesses decodes"
        steps, accepted = clock.steps, self.sampler.accepted
        return tuple(
            [
                accepted(asked.id, asked.output_tokens, sequence.standing + steps - asked.prompt_tokens, count)
                for sequence, count in guesses
                for asked in (sequence.request,)
            ]
        )


Content = RecordedContent | ModelledContent


def content_for(scenario: Scenario, recorded: bool) -> Content:
    """Recorded text, or content like that of the workload's profile or task, else of the technique's alpha."""
    if recorded:
        return RecordedContent()
    drafts, seed = scenario.setup.drafts, scenario.workload.seed
    if drafts is None:
        return ModelledContent(AcceptanceProfile.constant(0.0), seed)
    profile = acceptance_of(scenario.workload, drafts.kind)
    if profile is not None:
        return ModelledContent(profile, seed, shares_by_depth(drafts))
    first, *others = drafts.tree.conditional_by_depth
    return ModelledContent(
        AcceptanceProfile.constant(first), seed, (1.0, *(c / first if first else 0.0 for c in others))
    )
