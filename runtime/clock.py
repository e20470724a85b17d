"""What time is it in a real run?"""

from __future__ import annotations

import time


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._began

    def wait_until(self, until_s: float) -> None:
        """Sleeps until then; returns at once where that has passed."""
        remaining = until_s - self.now_s()
        if remaining > 0:
            time.sleep(remaining)
