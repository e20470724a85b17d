"""How do recurrent layers forget guesses that were rejected?

A state has merged all tokens that it has seen. It is kept as it was before the guesses of a step, put back where some
are rejected, and reads those that were accepted again at the beginning of the sequence's next step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from membound.runtime.blocks.states import SeatStates
from membound.runtime.decoder import KvCache
from membound.runtime.speculation.base import Paths
from membound.simulator.scheduling.request import Step, Work


class Rollback:
    """What the states of a cache have not seen of each sequence, of the tokens that were computed."""

    def __init__(self, kv: KvCache) -> None:
        self._states = [layer for layer in kv if isinstance(layer, SeatStates)]
        self._first_unseen: dict[int, int] = {}
        self.read_again = 0

    @property
    def needed(self) -> bool:
        return bool(self._states)

    def forget(self, step: Step, live: Container[int]) -> None:
        """Sequences that have ended, or begin anew, have no states any more."""
        gone = [id for id in self._first_unseen if id not in live or id in step.preempted]
        for id in gone:
            del self._first_unseen[id]

    def start(self, work: Work) -> int:
        """The first token that a step computes of a sequence."""
        return self._first_unseen.get(work.sequence, work.start)

    def settle(self, step: Step, paths: Paths, seats: Mapping[int, int]) -> None:
        """A step is computed, and so many of its guesses are accepted as `paths` are long."""
        if not self.needed:  # a cache of tokens forgets by writing over them
            return
        rejected: list[int] = []
        for work in step.work:
            self.read_again += work.start - self.start(work)
            self._first_unseen.pop(work.sequence, None)
            if len(paths.get(work.sequence, ())) < len(work.drafts):
                rejected.append(seats[work.sequence])
                self._first_unseen[work.sequence] = work.context - len(work.drafts)
        if rejected:
            for states in self._states:
                states.restore(rejected)

    def notes(self) -> list[str]:
        """In words, what rejected guesses cost; nothing where there were none."""
        if not self.read_again:
            return []
        return [f"recurrent layers read {self.read_again} accepted tokens a second time, after rejected drafts"]
