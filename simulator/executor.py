"""How long does a planned step take by the roofline, and which tokens does it emit?"""

from __future__ import annotations

from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import Link
from membound.roofline.hardware.links import host_copies_bytes_per_s
from membound.roofline.shape import StepShape
from membound.simulator.content import Content, ModelledContent, RecordedContent
from membound.simulator.scheduling.kv_memory import KvMemory
from membound.simulator.scheduling.request import Outcome, Sequence, Step, step_sums
from membound.simulator.step_times import StepTimes, seen_of


class RooflineExecutor:
    """Takes a step's time from the roofline and its tokens from the content.

    Blocks that move to the host and back take their time on `link` before the step begins, as in engines that swap.
    A drafter reads the prompts of steps without guesses when it next guesses, as that of the runtime does.
    """

    def __init__(
        self,
        times: StepTimes,
        content: Content,
        memory: KvMemory,
        link: Link | None = None,
        step_by_step: bool = False,
    ) -> None:
        self.times = times
        self.content = content
        self.block_bytes = memory.block_bytes
        self.link = link
        self.step_by_step = step_by_step
        self._unread: StepShape | None = None
        self._drafter_reads = times.setup.drafts is not None and times.guesses.reads

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        moved_s = self._moved_s(step.moved_by_one) if step.moved_by_one else 0.0
        if step.guesses:
            assert isinstance(self.content, ModelledContent), "drafts that are known are listed"
            return Outcome(self._working_s(step) + moved_s, accepted=self.content.accepted(step.guesses))
        if step.work:
            content = self.content
            assert isinstance(content, RecordedContent), "guesses that nobody knows are counted"
            emitted = {
                work.sequence: content.emitted(work, sequences[work.sequence]) for work in step.work if work.emits
            }
            return Outcome(self._working_s(step) + moved_s, emitted)
        if step.prompts:
            return Outcome(self._working_s(step) + moved_s)
        if step.growing:
            seen = seen_of(step.sums)
            first_s, slope_s, alike = self.times.decode_within(step.decoding, step.kv_tokens, seen, step.growing)
        else:
            first_s, slope_s, alike = self.times.decode(step.decoding, step.kv_tokens)
        steps = 1 if moved_s or self.step_by_step else min(step.steady, alike)
        return Outcome(steps * (first_s + slope_s * (steps - 1) / 2) + moved_s, None, steps, slope_s)

    def _working_s(self, step: Step) -> float:
        """Seconds of a step, with what a drafter has left to read."""
        windows = self.times.windows
        if drafted := step.drafted:
            unread, self._unread = self._unread, None
            prompts = StepShape(*step_sums(0, 0, step.prompts, windows)) if step.prompts else None
            seen: tuple[Any, ...] = seen_of(step.sums) if windows else ()
            if prompts is not None:  # the short end of one is counted with those who decode
                seen = tuple(all - own.decode_tokens for all, own in zip(seen, prompts.within, strict=True))
            return self.times.guesses.seconds(step.decoding, step.kv_tokens, drafted, prompts, unread, seen)
        if step.prompts and self._drafter_reads:
            shape = StepShape(*step_sums(0, 0, step.prompts, windows)).as_prompts()
            self._unread = shape if self._unread is None else self._unread + shape
        return self.times.seconds(step.sums) + (self.times.filling_s(step.sums) if step.filling else 0.0)

    def _moved_s(self, blocks: int) -> float:
        if self.link is None:
            raise MemboundError(
                f"hardware '{self.times.times.hardware.name}' gives no link to its host, over which KV blocks would "
                "move; give one, or leave engine.host_kv_gib at 0"
            )
        return blocks * self.block_bytes / host_copies_bytes_per_s(self.link) + self.link.latency_s
