"""How many tokens do layers with a window see of the decoding sequences in the fast loop, and how is that recorded?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from membound.roofline.within import Within, sums_within
from membound.simulator.lockstep_tables import Table, table_of
from membound.simulator.scheduling.reach import ENDLESS, reaches_of
from membound.simulator.step_times import StepTimes

# What is noted of each row of steps and each window: what its layers see of those who decode in the first step and how
# much more in each later one, and what they see of prompts.
_NOTED = 4


class LockstepWindows:
    """Sees through all windows of a model, and prices steps that it sees."""

    def __init__(self, windows: tuple[int, ...], step_times: StepTimes) -> None:
        self.windows = windows
        self.reaches = reaches_of(windows)
        self._equal_steps = step_times.decode_within
        self._rows: list[Any] = []

    def with_prompts(self, parts: Sequence[tuple[int, int, int]], decoding: int, clock: int) -> tuple[Within, ...]:
        """What is seen in a step with these parts of prompts, beside those who decode if any do."""
        seen = [reach.tokens(clock) for reach in self.reaches] if decoding else ()
        within = sums_within(parts, self.windows, seen)
        for _, decode_tokens, prefill_tokens, prefill_attended in within:
            self._rows += (decode_tokens, 0.0, prefill_tokens, prefill_attended)
        return within

    def equal_steps(self, decoding: int, tokens: int, clock: int) -> tuple[float, float, int]:
        """Seconds of a step of decode, how much longer the next is, and how many are alike."""
        seen: list[int] = []
        growing: list[int] = []
        even = ENDLESS
        for reach in self.reaches:
            seen.append(reach.tokens(clock))
            growing.append(reach.short)
            self._rows += (seen[-1], reach.short, 0.0, 0.0)
            even = min(even, reach.even_steps(clock))
        first_s, slope_s, alike = self._equal_steps(decoding, tokens, seen, growing)
        return first_s, slope_s, min(alike, even)

    def take_table(self, steps: Table) -> Table:
        """The columns of `Within` of each window, side by side, of the mean steps of all rows that were noted since it
        was last taken; each row has so many `steps`."""
        noted = table_of(self._rows, _NOTED).reshape(len(steps), len(self.windows), _NOTED)
        self._rows.clear()
        first, growing, *of_prompts = np.moveaxis(noted, 2, 0)
        columns = (first + growing * ((steps - 1) / 2)[:, None], *of_prompts)
        return np.stack(columns, axis=2).reshape(len(steps), len(columns) * len(self.windows))
