"""Which clock does a real run go by?"""

from __future__ import annotations

import time
from typing import Protocol


class RunClock(Protocol):
    """A clock that can also be waited for."""

    def now_s(self) -> float: ...

    def wait_until(self, until_s: float) -> None: ...


class WallClock:
    """Seconds since it was made, less those during which it was held."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._held_s: float | None = None

    def begin(self, began: float | None = None) -> None:
        """Starts again now, or when another process began: on one machine all see the same counter."""
        self.began = time.perf_counter() if began is None else began
        self._held_s = None

    def hold(self) -> None:
        """Stands still until `go`."""
        self._held_s = self.now_s()

    def go(self) -> None:
        """Goes on from where it was held."""
        if self._held_s is not None:
            self.begin(time.perf_counter() - self._held_s)

    def now_s(self) -> float:
        return time.perf_counter() - self.began if self._held_s is None else self._held_s

    def wait_until(self, until_s: float) -> None:
        """Sleeps until then; returns at once where that has passed."""
        remaining = until_s - self.now_s()
        if remaining > 0:
            time.sleep(remaining)
