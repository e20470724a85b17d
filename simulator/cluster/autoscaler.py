"""How many replicas does a group want?"""

from __future__ import annotations

import math
from collections import deque

from membound.roofline.scenario.cluster import Autoscaling


class Autoscaler:
    """Looks at a group at regular times; it is told what the group has to do and answers how many should do it."""

    def __init__(self, settings: Autoscaling) -> None:
        self.settings = settings
        self._wanted: deque[tuple[float, int]] = deque()
        self._looked_s = 0.0
        self._busy_s = 0.0

    def wanted(self, now_s: float, unanswered: int, waiting: int, busy_s: float) -> tuple[int, int]:
        """The fewest replicas to have, and the most: below the first some start, above the second some leave.

        `unanswered` requests are at the replicas, `waiting` ones at the router because nobody takes them; `busy_s` is
        for how long replicas have been busy, all together and since the run began.
        """
        s = self.settings
        if s.target_queue is not None:
            needed = math.ceil((unanswered + waiting) / s.target_queue)
        else:
            assert s.target_utilization is not None, "there is a target"
            share = (busy_s - self._busy_s) / (now_s - self._looked_s)
            # A replica that was busy throughout adds up to a whole one only within rounding.
            needed = max(math.ceil(share / s.target_utilization - 1e-9), min(waiting, 1))
        self._looked_s, self._busy_s = now_s, busy_s
        needed = min(max(needed, s.min_replicas), s.max_replicas)
        while self._wanted and self._wanted[0][0] < now_s - s.scale_in_after_s:
            self._wanted.popleft()
        self._wanted.append((now_s, needed))
        # Before the window is full nobody knows that fewer suffice.
        lately = max(count for _, count in self._wanted)
        return needed, lately if now_s >= s.scale_in_after_s else s.max_replicas
