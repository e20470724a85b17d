"""How often is a guess right, by its place in the draft and by the task of its prompt?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import TextPrompts
from membound.simulator.scheduling.request import Outcome, Step, draft_depth
from membound.simulator.scheduling.workload import requests_for
from membound.simulator.scheduling.workload.prompts import load_prompts


class AcceptanceCount:
    """Told of every step, counts at each place of a draft how often it was reached and how often it was right.

    A tree counts by its depth: how many tokens of its best path were kept.
    """

    def __init__(self, tasks: Mapping[int, str] | None = None) -> None:
        self.tasks = tasks or {}
        self.reached: Counter[tuple[str, int]] = Counter()
        self.right: Counter[tuple[str, int]] = Counter()
        self.steps: Counter[str] = Counter()
        self.emitted: Counter[str] = Counter()

    def __call__(self, step: Step, outcome: Outcome, end_s: float) -> None:
        for work in step.work:
            if not work.emits or outcome.emitted is None or work.tokens != 1 + len(work.drafts):
                continue
            task, kept = self.tasks.get(work.sequence, ""), len(outcome.emitted[work.sequence]) - 1
            self.steps[task] += 1
            self.emitted[task] += kept + 1
            for place in range(1, draft_depth(work) + 1):
                if kept < place - 1:
                    break
                self.reached[task, place] += 1
                self.right[task, place] += kept >= place

    def places(self, task: str | None = None) -> list[float]:
        """The share of guesses that were right at each place that was reached; all tasks without one."""
        found: list[float] = []
        for place in range(1, 1 + max((place for _, place in self.reached), default=0)):
            reached, right = (self._sum(counts, task, place) for counts in (self.reached, self.right))
            if reached:
                found.append(right / reached)
        return found

    def tokens_per_step(self, task: str | None = None) -> float:
        """Tokens that a step of decode emits for a sequence."""
        chosen = list(self.steps) if task is None else [task]
        steps = sum(self.steps[one] for one in chosen)
        return sum(self.emitted[one] for one in chosen) / steps if steps else float("nan")

    @staticmethod
    def _sum(counts: Counter[tuple[str, int]], task: str | None, place: int) -> int:
        return sum(count for (of, at), count in counts.items() if at == place and task in (None, of))


def tasks_of(scenario: Scenario) -> dict[int, str]:
    """The task of each request's prompt."""
    prompts = scenario.workload.prompts
    assert isinstance(prompts, TextPrompts), "recorded prompts have tasks"
    by_tokens = {prompt.prompt_ids: prompt.task for prompt in load_prompts(prompts.file)}
    return {request.id: by_tokens[request.prompt_ids or ()] for request in requests_for(scenario)}
