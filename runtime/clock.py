"""Which clock does a real run go by?"""

from __future__ import annotations

import time


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def begin(self, began: float | None = None) -> None:
        """Starts again now, or when another process began: on one machine all see the same counter."""
        self.began = time.perf_counter() if began is None else began

    def now_s(self) -> float:
        return time.perf_counter() - self.began

    def wait_until(self, until_s: float) -> None:
        """Sleeps until then; returns at once where that has passed."""
        remaining = until_s - self.now_s()
        if remaining > 0:
            time.sleep(remaining)
