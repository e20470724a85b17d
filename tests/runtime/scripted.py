"""What time is it in a run whose steps take what a test says?"""

from __future__ import annotations


class ScriptedClock:
    """Moves only when it is told to wait."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, until_s: float) -> None:
        self.time_s = max(self.time_s, until_s)
