"""How many tokens do layers with a window see of sequences that decode, and how long does that grow evenly?"""

from __future__ import annotations

from heapq import heappop, heappush

# More steps than any run of equal ones has.
ENDLESS = 1 << 60


class Reach:
    """The sum of min(tokens, window) over sequences, of which each has one token more at each step of a clock.

    A sequence is short until it fills the window. The sum grows with each step by the number of short ones, so nothing
    is done for a single one but when it joins, fills the window, or leaves. A sequence is known by its `standing`
    tokens, those that it would have had at step 0 of the clock.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.short = 0  # sequences
        self._standing = 0  # of the short ones
        self._full = 0  # sequences
        self._filling: dict[int, int] = {}  # short ones by the clock at which they fill the window
        self._moments: list[int] = []  # a heap of these clocks

    def add(self, standing: int, clock: int) -> None:
        """A sequence joins."""
        fills_at = self.window - standing
        if fills_at <= clock:
            self._full += 1
            return
        self.short += 1
        self._standing += standing
        if fills_at not in self._filling:
            self._filling[fills_at] = 0
            heappush(self._moments, fills_at)
        self._filling[fills_at] += 1

    def remove(self, standing: int, clock: int) -> None:
        """A sequence that joined leaves, at a clock that `advance` was told."""
        fills_at = self.window - standing
        if fills_at <= clock:
            self._full -= 1
            return
        self.short -= 1
        self._standing -= standing
        self._filling[fills_at] -= 1

    def advance(self, clock: int) -> None:
        """The clock has gone on; those who have filled the window by now are no longer short."""
        moments = self._moments
        while moments and moments[0] <= clock:
            fills_at = heappop(moments)
            filled = self._filling.pop(fills_at)
            self.short -= filled
            self._standing -= filled * (self.window - fills_at)
            self._full += filled

    def tokens(self, clock: int) -> int:
        """What the layers see of all sequences in the next step."""
        return self._standing + self.short * clock + self.window * self._full

    def even_steps(self, clock: int) -> int:
        """Steps from the next one on through which the sum grows by as many tokens each."""
        moments, filling = self._moments, self._filling
        while moments and not filling[moments[0]]:
            del filling[heappop(moments)]
        return moments[0] - clock + 1 if moments else ENDLESS


def reaches_of(windows: tuple[int, ...]) -> tuple[Reach, ...]:
    """One for each window, without sequences."""
    return tuple(map(Reach, windows))
