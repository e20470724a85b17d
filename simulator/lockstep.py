"""How does an engine serve a long workload, with nothing computed twice?

The general loop (`scheduling/loop.py`) asks a scheduler, an executor, a clock and a recorder, and makes an object of
each request, step and outcome. Where one engine serves single requests in the order in which they came, and nobody
looks at single steps, hardly any of that is read again. Here the same decisions are made on plain numbers, and what
happened is kept as columns, which numpy makes into the recorder's tables some ten thousand rows at a time.

First come, first served makes it simple. Whoever runs came before whoever waits, also after preemption, so the queue
is a queue and at most one prompt is begun and not finished. Those who decode are a heap of the steps at which they end.

Nothing is decided here that the scheduler would not decide: `tests/simulator/test_lockstep.py` holds every record equal
to the general loop's in random scenarios.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from membound.roofline.scenario.tasks import resolve
from membound.roofline.scenario.workload import ClosedLoop, SessionPrompts, SyntheticPrompts, TextPrompts, Workload
from membound.roofline.shape import shape_sums
from membound.roofline.tiles import tiles_of
from membound.simulator.lockstep_tables import NOTED, NOTED_OF_PROMPTS, Table, ramps_of, stacked, step_table, table_of
from membound.simulator.lockstep_windows import LockstepWindows
from membound.simulator.scheduling.recorder import REQUEST_COLUMNS, Recorder
from membound.simulator.scheduling.request import Request, Sums, steps_before
from membound.simulator.scheduling.scheduler import EVERYBODY, FIRST_COME, Scheduler
from membound.simulator.scheduling.workload import RequestColumns
from membound.simulator.step_times import StepTimes

_ROWS = 1 << 15  # that are made into tables together
_MOST_TOTAL = 1 << 40

# A prompt to be computed: the id of its request, its tokens (emitted ones too, where it was preempted), and how many
# tokens are still to be emitted. A part of it: from which token on, and how many.
Prompt = tuple[int, int, int]
Part = tuple[Prompt, int, int]
# Is told the virtual time now and then, and may raise to end the run.
Watch = Callable[[float], None]


def is_ordinary(scheduler: Scheduler, workload: Workload) -> bool:
    """Whether `scheduler` serves single requests in order of arrival, so that `Lockstep` makes its decisions."""
    prompts = resolve(workload).prompts
    if isinstance(workload.arrivals, ClosedLoop) or isinstance(prompts, TextPrompts | SessionPrompts):
        return False
    if scheduler.pool.cache is not None and not isinstance(prompts, SyntheticPrompts):
        return False  # rows of a trace may name blocks that they share
    everybody_alike = scheduler.order == FIRST_COME and scheduler.admission == EVERYBODY and scheduler.classify is None
    paged = not scheduler.swap and scheduler.reserved_tokens is None and len(scheduler.pools) == 1
    paged = paged and scheduler.micro_batches == 1
    return everybody_alike and paged and not scheduler.itemized and scheduler.drafter is None


class Lockstep:
    """Makes the decisions of an ordinary `scheduler` (which stays as it is) and writes what `recorder` would.

    A sequence that decodes has `standing` tokens at step 0 of the clock and one more with each step, as in `Decoders`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_times: StepTimes,
        columns: Iterable[RequestColumns],
        recorder: Recorder,
        watch: Watch | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.step_times = step_times
        self.columns = columns
        self.recorder = recorder
        self.watch = watch
        self.num_blocks = scheduler.pool.num_blocks
        self.block_size = scheduler.pool.block_size
        self.blocks_for = scheduler.pool.blocks_for
        self.most_total = self._most_total()

        self.waiting: deque[Prompt] = deque()
        self.begun: Prompt | None = None
        self.begun_tokens = 0  # of it are computed
        self.prompt_tokens = 0  # of the prompts that are being computed
        self.newest = -1  # id of the newest request that has been admitted
        self.ends: list[tuple[int, int, int]] = []  # a heap of (clock, id, standing) of those who decode
        # How many of them need a block at each step, by the clock modulo the block size; twice, to be read in one go.
        self.growth = [0] * (2 * self.block_size)
        self.windows = LockstepWindows(scheduler.decoders.windows, step_times)
        # Times of last tokens: of those who have not decoded since they joined, and of the preempted.
        self.joined: dict[int, float] = {}
        self.paused: dict[int, float] = {}

        self.asked: list[RequestColumns] = []
        self.admitted_s = array("d")
        self.first_token_s = array("d")
        self.ended_ids = array("q")
        self.ended_s = array("d")
        self.preemptions: dict[int, int] = {}
        self.rows: list[float] = []
        self.rows_of_prompts: list[float] = []
        self.later_growth: list[int] = []  # `growth` from the second step of each row on, up to a block's length
        self.gaps: list[float] = []  # ramps of `Samples` beside those that follow from rows

    def serve(self) -> None:
        """Serves every request.

        One long function on local variables: every row of steps comes through here, and a call costs as much as what
        it decides. What is rare, or a matter of prompts alone, has a function of its own.
        """
        batching, size, blocks_for = self.scheduler.batching, self.block_size, self.blocks_for
        alone, most_tokens, num_blocks = batching.prompts_alone, self.scheduler.max_batched_tokens, self.num_blocks
        decode_times, seconds_of = self.step_times.decode, self.step_times.seconds
        waiting, ends, growth, paused = self.waiting, self.ends, self.growth, self.paused
        rows, enough = self.rows, _ROWS * len(NOTED)
        windows, reaches = self.windows, self.windows.reaches
        now_s = decoded_s = 0.0  # the time, and when those who decode had their last token
        clock = standing = 0  # steps of decode so far, and tokens at step 0 of all who decode
        free = num_blocks
        batch_begun = False  # whether the batch has decoded since it was last empty
        coming = self._arrivals()
        arrival_s, arrival = next(coming)

        while True:
            start_s = now_s
            while arrival_s <= start_s:
                if arrival[1] + arrival[2] <= self.most_total:
                    waiting.append(arrival)
                else:
                    self._refuse(arrival_s, arrival)
                arrival_s, arrival = next(coming)

            # Who computes: those who decode, then prompts; or prompts alone, and those who decode where there are none.
            parts: list[Part] = []
            decoding, preempted = len(ends), False
            if alone and (waiting or self.begun is not None):
                batch_begun = batch_begun and decoding > 0
                parts, free = self._plan_prompts(most_tokens, free, start_s, batching.admits(batch_begun))
                if parts:
                    decoding = 0
            if decoding:
                batch_begun = True
                if growth[clock % size] > free:
                    free, standing = self._make_room(clock, free, standing, decoded_s if alone else start_s)
                    decoding, preempted = len(ends), True
                free -= growth[clock % size]
            if not alone and (waiting or self.begun is not None):
                parts, free = self._plan_prompts(most_tokens - decoding, free, start_s, not preempted)

            # How long it takes: a step with prompts, or equal steps of decode up to where something changes.
            tokens = standing + len(ends) * clock
            held, used = tokens + self.prompt_tokens, num_blocks - free
            if parts:
                shapes = [(first, count, first + count == prompt[1]) for prompt, first, count in parts]
                sums: Sums = shape_sums(shapes, decoding, tokens if decoding else 0)
                steps, slope_s, ended = 1, 0.0, sum([emits for _, _, emits in shapes])
                self.rows_of_prompts += (len(rows) // len(NOTED), ended, *sums)
                if reaches:
                    sums += (windows.with_prompts(shapes, decoding, clock), tiles_of(shapes, windows.windows))
                elif len(parts) > 1:
                    sums += ((), tiles_of(shapes, ()))
                time_s = first_s = seconds_of(sums)
            elif decoding:
                if reaches:
                    first_s, slope_s, alike = windows.equal_steps(decoding, tokens, clock)
                else:
                    first_s, slope_s, alike = decode_times(decoding, tokens)
                steps = 1 if preempted else min(ends[0][0] - clock, alike)
                if steps > 1:
                    if free < decoding * (1 + steps // size):
                        steps = self._steps_with_blocks(clock, free, decoding, steps)
                    time_s = steps * (first_s + slope_s * (steps - 1) / 2)
                    if time_s > arrival_s - start_s:
                        steps = steps_before(arrival_s - start_s, first_s, slope_s, steps)
                time_s = steps * (first_s + slope_s * (steps - 1) / 2)
                if steps > 1:
                    after = (clock + 1) % size
                    later = growth[after : after + min(steps - 1, size)]
                    self.later_growth += later
                    rounds, rest = divmod(steps - 1, size)
                    free -= rounds * decoding + sum(later[:rest])
            elif arrival_s < math.inf:
                self.recorder.idle(arrival_s - start_s)
                now_s = arrival_s
                continue
            else:
                break
            now_s = start_s + time_s
            since_start = decoding
            if decoding:
                if alone:
                    first_end_s = now_s if steps == 1 else start_s + first_s
                    since_start = self._since_start(decoding, start_s, first_end_s, decoded_s)
                clock += steps
                decoded_s = now_s
                for reach in reaches:
                    reach.advance(clock)
            rows += (start_s, steps, first_s, slope_s, decoding, since_start, tokens, held, used)

            # What came of it: some leave with their last token, some have the first and decode.
            while ends and ends[0][0] == clock:
                _, id, own = heappop(ends)
                slot = (1 - own) % size
                growth[slot] -= 1
                growth[slot + size] -= 1
                standing -= own
                for reach in reaches:
                    reach.remove(own, clock)
                free += blocks_for(own + clock - 1)
                self.ended_ids.append(id)
                self.ended_s.append(now_s)
            for prompt, first, count in parts:
                id, length, left = prompt
                if first + count < length:
                    self.begun, self.begun_tokens = prompt, first + count
                    break
                self.begun = None
                self.prompt_tokens -= length
                last_s = paused.pop(id, None)
                if last_s is None:
                    self.first_token_s.append(now_s)
                else:
                    self.gaps += (now_s - last_s, 0.0, 1, 1)
                if left > 1:
                    own = length + 1 - clock
                    slot = (1 - own) % size
                    growth[slot] += 1
                    growth[slot + size] += 1
                    standing += own
                    for reach in reaches:
                        reach.add(own, clock)
                    heappush(ends, (clock + left - 1, id, own))
                    if alone:
                        self.joined[id] = now_s
                else:
                    free += blocks_for(length)
                    self.ended_ids.append(id)
                    self.ended_s.append(now_s)
            if len(rows) == enough:
                self._write_steps()
                if self.watch is not None:
                    self.watch(now_s)

        self._write_steps()
        self.recorder.add_requests(self._requests())
        assert free == num_blocks, "a block was lost"
        assert not (waiting or standing or self.prompt_tokens or any(growth)), "somebody is left"

    # -- arrivals

    def _arrivals(self) -> Iterator[tuple[float, Prompt]]:
        """Each request with its time, then nothing for ever."""
        last_s = 0.0
        for chunk in self.columns:
            self.asked.append(chunk)
            times_s = chunk.arrival_s
            assert times_s[0] >= last_s and np.all(np.diff(times_s) >= 0), "requests must be in order of arrival"
            last_s = times_s[-1]
            ids = range(chunk.first_id, chunk.first_id + len(chunk))
            prompts = zip(ids, chunk.prompt_tokens.tolist(), chunk.output_tokens.tolist(), strict=True)
            yield from zip(times_s.tolist(), prompts, strict=True)
        while True:
            yield math.inf, (-1, 0, 0)

    def _refuse(self, arrival_s: float, prompt: Prompt) -> None:
        id, prompt_tokens, output_tokens = prompt
        reason = self.scheduler.refusal(Request(id, arrival_s, prompt_tokens, output_tokens))
        self.recorder.refused(id, reason)

    def _most_total(self) -> int:
        """Tokens of the longest request that is not refused: whoever has more is refused, too."""
        refused = bisect_left(
            range(_MOST_TOTAL), True, key=lambda total: self.scheduler.refusal(Request(0, 0.0, total, 0)) is not None
        )
        return refused - 1

    # -- what is rare, or a matter of prompts alone

    def _plan_prompts(self, budget: int, free: int, start_s: float, join: bool) -> tuple[list[Part], int]:
        """Parts of prompts of up to `budget` tokens, and the blocks left: of the one begun, then of those that join."""
        parts: list[Part] = []
        running, whole = len(self.ends), self.scheduler.batching.whole_prompts
        if self.begun is not None:
            if budget <= 0:
                return parts, free
            left = self.begun[1] - self.begun_tokens
            parts.append((self.begun, self.begun_tokens, min(left, budget)))
            budget -= left
            running += 1
        while join and self.waiting and budget > 0 and running < self.scheduler.max_num_seqs:
            prompt = self.waiting[0]
            id, tokens, _ = prompt
            blocks = self.blocks_for(tokens)
            if blocks > free or (whole and tokens > budget < self.scheduler.max_batched_tokens):
                break
            self.waiting.popleft()
            free -= blocks
            self.prompt_tokens += tokens
            if id > self.newest:
                self.newest = id
                self.admitted_s.append(start_s)
            parts.append((prompt, 0, min(tokens, budget)))
            budget -= tokens
            running += 1
        return parts, free

    def _make_room(self, clock: int, free: int, standing: int, decoded_s: float) -> tuple[int, int]:
        """Preempts whoever came last until everybody else who decodes finds a block; the blocks and `standing` left."""
        while self.growth[clock % self.block_size] > free:
            if self.begun is not None:
                prompt, self.begun = self.begun, None
                self.prompt_tokens -= prompt[1]
                free += self.blocks_for(prompt[1])
            else:
                last = max(self.ends, key=lambda end: end[1])
                self.ends.remove(last)
                heapify(self.ends)
                ends_at, id, own = last
                prompt = (id, own + clock, ends_at - clock)
                slot = (1 - own) % self.block_size
                self.growth[slot] -= 1
                self.growth[slot + self.block_size] -= 1
                standing -= own
                for reach in self.windows.reaches:
                    reach.remove(own, clock)
                free += self.blocks_for(own + clock - 1)
                self.paused[id] = self.joined.pop(id, decoded_s)
            self.preemptions[prompt[0]] = self.preemptions.get(prompt[0], 0) + 1
            self.waiting.appendleft(prompt)
        return free, standing

    def _steps_with_blocks(self, clock: int, free: int, decoding: int, most: int) -> int:
        """How many steps, up to `most`, there are free blocks for, beside those of the first."""
        rounds, left = divmod(free, decoding)
        steps = 1 + rounds * self.block_size
        while steps < most and (needed := self.growth[(clock + steps) % self.block_size]) <= left:
            left -= needed
            steps += 1
        return min(steps, most)

    def _since_start(self, decoding: int, start_s: float, first_end_s: float, decoded_s: float) -> int:
        """Of those who decode, how many had their last token when the step began; the gaps of the others are noted.

        Only where prompts go alone others have to wait: else everybody decodes in each step.
        """
        others = decoding - len(self.joined)
        since_start = 0
        if decoded_s == start_s:
            since_start = others
        elif others:
            self.gaps += (first_end_s - decoded_s, 0.0, 1, others)
        for last_s in self.joined.values():
            if last_s == start_s:
                since_start += 1
            else:
                self.gaps += (first_end_s - last_s, 0.0, 1, 1)
        self.joined.clear()
        return since_start

    # -- records

    def _write_steps(self) -> None:
        """Makes what was noted of steps into the recorder's rows and samples."""
        rows, of_prompts = table_of(self.rows, len(NOTED)), table_of(self.rows_of_prompts, len(NOTED_OF_PROMPTS))
        noted = dict(zip(NOTED, np.ascontiguousarray(rows.T), strict=True))
        noted["time_s"] = noted["steps"] * (noted["first_s"] + noted["slope_s"] * (noted["steps"] - 1) / 2)
        noted["end_s"] = noted["start_s"] + noted["time_s"]
        table = step_table(noted, of_prompts, table_of(self.later_growth, 1)[:, 0], self.block_size)
        if self.windows.reaches:
            table = np.concatenate((table, self.windows.take_table(noted["steps"])), axis=1)
        self.recorder.add_steps(table, self.windows.windows)
        self.recorder.itl_s.add_ramps(ramps_of(noted))
        self.recorder.itl_s.add_ramps(table_of(self.gaps, 4))
        if len(rows):
            self.recorder.end_s = float(noted["end_s"][-1])
        for written in (self.rows, self.rows_of_prompts, self.later_growth, self.gaps):
            written.clear()

    def _requests(self) -> Table:
        """The recorder's table of requests. Those that are served are admitted, and begin to answer, in their order."""
        prompt_tokens, output_tokens, arrival_s = (
            np.concatenate([getattr(chunk, name) for chunk in self.asked] or [np.zeros(0)])
            for name in ("prompt_tokens", "output_tokens", "arrival_s")
        )
        served = prompt_tokens + output_tokens <= self.most_total
        columns = {
            "id": np.arange(len(served)),
            "arrival_s": arrival_s,
            "prompt_tokens": prompt_tokens,
            "output_tokens": np.where(served, output_tokens, 0),
            "completed": served,
        }
        for name in ("admitted_s", "first_token_s", "finished_s"):
            columns[name] = np.full(len(served), np.nan)
        columns["admitted_s"][served] = self.admitted_s
        columns["first_token_s"][served] = self.first_token_s
        columns["finished_s"][self.ended_ids] = self.ended_s
        columns["preemptions"] = np.zeros(len(served))
        columns["preemptions"][list(self.preemptions)] = list(self.preemptions.values())
        return stacked(columns, REQUEST_COLUMNS, len(served))
