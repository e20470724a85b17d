"""Which blocks does a memory hold, as runs of neighbours, and which of them go first?"""

from __future__ import annotations

from collections.abc import Iterator

from membound.simulator.scheduling.prefix import Span


class Run:
    """Blocks `first` to `end - 1` of what an id stands for, all with as many `users`.

    One without users is in a queue between two others; of its own blocks the last goes first.
    """

    __slots__ = ("end", "first", "id", "newer", "older", "users")

    def __init__(self, id: int, first: int, end: int, users: int) -> None:
        self.id = id
        self.first = first
        self.end = end
        self.users = users
        self.older = self.newer = self

    def __len__(self) -> int:
        return self.end - self.first


class BlockRuns:
    """Disjoint runs by id and place, those without users also in a queue: what it costs does not grow with blocks.

    Neighbours with as many users are one run, as are those that follow each other in the queue.
    """

    def __init__(self) -> None:
        self._of_id: dict[int, list[Run]] = {}
        self._queue = Run(0, 0, 0, 0)  # its `newer` is the oldest run, its `older` the newest

    def __iter__(self) -> Iterator[Run]:
        for runs in self._of_id.values():
            yield from runs

    @property
    def queue(self) -> Iterator[Run]:
        """Runs without users, in the order in which they go."""
        run = self._queue.newer
        while run is not self._queue:
            yield run
            run = run.newer

    def has(self, id: int, index: int) -> bool:
        """Whether it holds a block."""
        return any(run.first <= index < run.end for run in self._of_id.get(id, ()))

    def leading(self, span: Span) -> tuple[int, int]:
        """How many of a span's blocks are held from its first on without a gap, and how many of these nobody uses."""
        at, idle = span.first, 0
        for run in self._of_id.get(span.id, ()):
            if run.end <= at:
                continue
            if run.first > at:
                break
            until = min(run.end, span.end)
            if not run.users:
                idle += until - at
            at = until
            if at == span.end:
                break
        return at - span.first, idle

    def within(self, span: Span) -> list[Run]:
        """The runs of a span's blocks, which end where it does: those that reach beyond it are cut in two."""
        runs = self._of_id.get(span.id)
        if runs is None:
            return []
        if len(runs) == 1 and span.first <= runs[0].first and runs[0].end <= span.end:
            return runs[:]
        for place in (span.first, span.end):
            for index, run in enumerate(runs):
                if run.first < place < run.end:
                    runs.insert(index + 1, self._cut(run, place))
                    break
        return [run for run in runs if span.first <= run.first and run.end <= span.end]

    def gaps(self, span: Span) -> list[Span]:
        """What it does not hold of a span."""
        gaps, at = [], span.first
        for run in self._of_id.get(span.id, ()):
            if run.end <= at:
                continue
            if run.first >= span.end:
                break
            if run.first > at:
                gaps.append(Span(span.id, at, run.first))
            at = run.end
        if at < span.end:
            gaps.append(Span(span.id, at, span.end))
        return gaps

    def insert(self, span: Span, users: int) -> None:
        """Takes a span of which it holds nothing; without users it goes last."""
        run = Run(*span, users)
        runs = self._of_id.setdefault(span.id, [])
        place = len(runs)
        while place and runs[place - 1].first > span.first:
            place -= 1
        runs.insert(place, run)
        if not users:
            self.enqueue(run)

    def join_used(self, id: int) -> None:
        """Makes neighbours in use with as many users one."""
        runs = self._of_id[id]
        index = len(runs) - 1
        while index > 0:
            left, right = runs[index - 1], runs[index]
            if left.end == right.first and left.users == right.users > 0:
                left.end = right.end
                del runs[index]
            index -= 1

    def enqueue(self, run: Run) -> None:
        """A run that nobody uses goes last."""
        newest = self._queue.older
        if newest.id == run.id and newest.first == run.end and newest is not self._queue:
            run.end = newest.end
            self.dequeue(newest)
            self._of_id[run.id].remove(newest)
            newest = self._queue.older
        run.older, run.newer = newest, self._queue
        newest.newer = self._queue.older = run

    def dequeue(self, run: Run) -> None:
        """A run that was without users is used."""
        run.older.newer, run.newer.older = run.newer, run.older
        run.older = run.newer = run

    def pop(self, blocks: int) -> Span:
        """Gives up at most so many blocks of the run that goes first."""
        run = self._queue.newer
        given = Span(run.id, max(run.first, run.end - blocks), run.end)
        run.end = given.first
        if not len(run):
            self.remove(run)
        return given

    def remove(self, run: Run) -> None:
        """Gives up a run."""
        if not run.users:
            self.dequeue(run)
        runs = self._of_id[run.id]
        runs.remove(run)
        if not runs:
            del self._of_id[run.id]

    def _cut(self, run: Run, place: int) -> Run:
        """Cuts a run in two, and returns the second, which goes before the first."""
        second = Run(run.id, place, run.end, run.users)
        run.end = place
        if not run.users:
            second.older, second.newer = run.older, run
            run.older.newer = run.older = second
        return second
