"""Who waits for a place in the batch, and who is first?"""

from __future__ import annotations

from heapq import heappop, heappush

from membound.simulator.scheduling.request import Sequence


class WaitingLine:
    """Sequences by their key, of equal ones by their number: the smallest is first."""

    def __init__(self) -> None:
        self.members: dict[int, Sequence] = {}
        self._order: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def first(self) -> Sequence:
        return self.members[self._order[0][1]]

    def join(self, sequence: Sequence) -> None:
        sequence.status = "waiting"
        self.members[sequence.number] = sequence
        heappush(self._order, (sequence.key, sequence.number))

    def leave(self) -> None:
        """The first one leaves."""
        _, number = heappop(self._order)
        del self.members[number]

    def tokens_ahead(self, sequence: Sequence) -> int:
        """Tokens that those who would go before it have still to compute."""
        return sum(other.left_to_compute for other in self.members.values() if other.key <= sequence.key)

    def check_integrity(self) -> None:
        assert len(self._order) == len(self.members), "the queue and those who wait differ"
