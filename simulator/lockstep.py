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
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from membound.roofline.shape import shape_sums
from membound.roofline.tasks import resolve
from membound.roofline.workload import ClosedLoop, SessionPrompts, SyntheticPrompts, TextPrompts, Workload
from membound.simulator.scheduling.recorder import COUNTED_COLUMNS, REQUEST_COLUMNS, SHAPE_COLUMNS, Recorder
from membound.simulator.scheduling.request import Outcome, Request
from membound.simulator.scheduling.scheduler import EVERYBODY, FIRST_COME, Scheduler
from membound.simulator.scheduling.workload import RequestColumns
from membound.simulator.step_times import StepTimes

Table = NDArray[np.float64]

# What is noted of each row of steps. `since_start` of those who decode had their last token when it began.
_NOTED = (
    "start_s",
    "end_s",
    "time_s",
    "steps",
    "first_s",
    "slope_s",
    "decoding",
    "since_start",
    "kv_tokens",
    "held_tokens",
    "blocks_used",
    "growth_block_s",
)
# Of rows with prompts also which row it is, how many prompts ended, and the sums of its shape.
_NOTED_OF_PROMPTS = ("row", "ended", *SHAPE_COLUMNS)
_ROWS = 1 << 15
_SHORT = 256  # steps that are faster looked at one by one than by numpy
_MOST_TOTAL = 1 << 40

# A prompt to be computed: the id of its request, its tokens (emitted ones too, where it was preempted), and how many
# tokens are still to be emitted. A part of it: from which token on, and how many.
Prompt = tuple[int, int, int]
Part = tuple[Prompt, int, int]


def is_ordinary(scheduler: Scheduler, workload: Workload) -> bool:
    """Whether `scheduler` serves single requests in order of arrival, so that `Lockstep` makes its decisions."""
    prompts = resolve(workload).prompts
    if isinstance(workload.arrivals, ClosedLoop) or isinstance(prompts, TextPrompts | SessionPrompts):
        return False
    if scheduler.pool.cache is not None and not isinstance(prompts, SyntheticPrompts):
        return False  # rows of a trace may name blocks that they share
    everybody_alike = scheduler.order == FIRST_COME and scheduler.admission == EVERYBODY and scheduler.classify is None
    paged = not scheduler.swap and scheduler.reserved_tokens is None
    return everybody_alike and paged and not scheduler.itemized


class Lockstep:
    """Makes the decisions of an ordinary `scheduler` (which stays as it is) and writes what `recorder` would.

    A sequence that decodes has `standing` tokens at step 0 of the clock and one more with each step, as in `Decoders`.
    """

    def __init__(
        self, scheduler: Scheduler, step_times: StepTimes, columns: Iterable[RequestColumns], recorder: Recorder
    ) -> None:
        self.scheduler = scheduler
        self.step_times = step_times
        self.recorder = recorder
        self.batching = scheduler.batching
        self.num_blocks = scheduler.pool.num_blocks
        self.block_size = scheduler.pool.block_size
        self.blocks_for = scheduler.pool.blocks_for
        self.most_total = self._most_total()

        self.now_s = 0.0
        self.clock = 0  # steps of decode so far
        self.free = self.num_blocks
        self.waiting: deque[Prompt] = deque()
        self.begun: Prompt | None = None
        self.begun_tokens = 0  # of it are computed
        self.prompt_tokens = 0  # of the prompts that are being computed
        self.ends: list[tuple[int, int, int]] = []  # (clock, id, standing) of those who decode
        self.standing = 0  # of all of them
        # How many of them need a block at each step, by the clock modulo the block size; twice, to be read in one go.
        self.growth = [0] * (2 * self.block_size)
        self.batch_begun = False  # whether the batch has decoded since it was last empty
        # Times of last tokens: of those who have not decoded since they joined, of the others, and of the preempted.
        self.joined: dict[int, float] = {}
        self.decoded_s = 0.0
        self.paused: dict[int, float] = {}

        self.asked: list[RequestColumns] = []
        self.newest = -1  # id of the newest request that has been admitted
        self.admitted_s = array("d")
        self.first_token_s = array("d")
        self.ended_ids = array("q")
        self.ended_s = array("d")
        self.preemptions: dict[int, int] = {}
        self.rows: list[float] = []
        self.rows_of_prompts: list[float] = []
        self.gaps: list[float] = []  # ramps of `Samples` beside those that follow from rows

        self.coming = self._arrivals(columns)
        self.next_arrival = next(self.coming)
        self.arrival_s = self.next_arrival[0]

    def serve(self) -> None:
        """Serves every request."""
        alone, most_tokens = self.batching.prompts_alone, self.scheduler.max_batched_tokens
        while True:
            if self.arrival_s <= self.now_s:
                self._queue_arrived()
            decoding = len(self.ends)
            if not decoding and self.begun is None:
                self.batch_begun = False
            parts: list[Part] = []
            if alone and (self.waiting or self.begun is not None):
                parts = self._plan_prompts(most_tokens)
            if parts:
                decoding = 0
            preempted = False
            if decoding:
                self.batch_begun = True
                if self.growth[self.clock % self.block_size] > self.free:
                    self._make_room()
                    preempted, decoding = True, len(self.ends)
                self.free -= self.growth[self.clock % self.block_size]
            if not alone and (self.waiting or self.begun is not None):
                parts = self._plan_prompts(most_tokens - decoding, join=not preempted)

            if parts:
                self._step_with_prompts(decoding, parts)
            elif decoding:
                self._decode(decoding, preempted)
            elif self.arrival_s < math.inf:
                self.recorder.idle(self.arrival_s - self.now_s)
                self.now_s = self.arrival_s
            else:
                break
        self._write_steps()
        self.recorder.add_requests(self._requests())
        assert self.free == self.num_blocks, "a block was lost"
        assert not (self.waiting or self.standing or self.prompt_tokens or any(self.growth)), "somebody is left"

    # -- arrivals

    def _arrivals(self, columns: Iterable[RequestColumns]) -> Iterator[tuple[float, Prompt]]:
        """Each request with its time, then nothing for ever."""
        for chunk in columns:
            self.asked.append(chunk)
            ids = range(chunk.first_id, chunk.first_id + len(chunk))
            yield from zip(
                chunk.arrival_s.tolist(),
                zip(ids, chunk.prompt_tokens.tolist(), chunk.output_tokens.tolist(), strict=True),
                strict=True,
            )
        while True:
            yield math.inf, (-1, 0, 0)

    def _queue_arrived(self) -> None:
        arrival_s, prompt = self.next_arrival
        while arrival_s <= self.now_s:
            id, prompt_tokens, output_tokens = prompt
            if prompt_tokens + output_tokens <= self.most_total:
                self.waiting.append(prompt)
            else:
                reason = self.scheduler.refusal(Request(id, arrival_s, prompt_tokens, output_tokens))
                self.recorder.refused(id, reason)
            arrived_s = arrival_s
            arrival_s, prompt = self.next_arrival = next(self.coming)
            assert arrival_s >= arrived_s, "requests must be in order of arrival"
        self.arrival_s = arrival_s

    def _most_total(self) -> int:
        """Tokens of the longest request that is not refused: whoever has more is refused, too."""
        refused = bisect_left(
            range(_MOST_TOTAL), True, key=lambda total: self.scheduler.refusal(Request(0, 0.0, total, 0)) is not None
        )
        return refused - 1

    # -- prompts

    def _plan_prompts(self, budget: int, join: bool = True) -> list[Part]:
        """Parts of prompts of up to `budget` tokens: of the one that was begun, then of those that join."""
        parts: list[Part] = []
        running = len(self.ends)
        if self.begun is not None:
            if budget <= 0:
                return parts
            left = self.begun[1] - self.begun_tokens
            parts.append((self.begun, self.begun_tokens, min(left, budget)))
            budget -= left
            running += 1
        if not (join and self.batching.admits(self.batch_begun)):
            return parts
        while self.waiting and budget > 0 and running < self.scheduler.max_num_seqs:
            prompt = self.waiting[0]
            id, tokens, _ = prompt
            blocks = self.blocks_for(tokens)
            if blocks > self.free or (tokens > budget and self.batching.whole_prompts):
                break
            self.waiting.popleft()
            self.free -= blocks
            self.prompt_tokens += tokens
            if id > self.newest:
                self.newest = id
                self.admitted_s.append(self.now_s)
            parts.append((prompt, 0, min(tokens, budget)))
            budget -= tokens
            running += 1
        return parts

    def _step_with_prompts(self, decoding: int, parts: list[Part]) -> None:
        start_s, tokens = self.now_s, self.standing + len(self.ends) * self.clock
        kv_tokens = tokens if decoding else 0
        ended = 0
        listed = []
        for (_, prompt_tokens, _), first, count in parts:
            ends = first + count == prompt_tokens
            ended += ends
            listed.append((first, count, ends))
        sums = _with_decoding(decoding, kv_tokens, shape_sums(listed))
        time_s = self.step_times.seconds(sums)
        end_s = self.now_s = start_s + time_s
        since_start = self._since_start(decoding, start_s, end_s) if decoding else 0
        self.rows_of_prompts += (len(self.rows) // len(_NOTED), ended, *sums)
        held, used = tokens + self.prompt_tokens, self.num_blocks - self.free
        self._note((start_s, end_s, time_s, 1, time_s, 0.0, decoding, since_start, kv_tokens, held, used, 0.0))
        if decoding:
            self.clock += 1
            self._end_due()
        for prompt, first, count in parts:
            self._advance(prompt, first + count)

    def _advance(self, prompt: Prompt, computed: int) -> None:
        """So many tokens of `prompt` are computed; with the last its sequence emits a token and decodes."""
        id, tokens, left = prompt
        if computed < tokens:
            self.begun, self.begun_tokens = prompt, computed
            return
        self.begun = None
        self.prompt_tokens -= tokens
        last_s = self.paused.pop(id, None)
        if last_s is None:
            self.first_token_s.append(self.now_s)
        else:
            self.gaps += (self.now_s - last_s, 0.0, 1, 1)
        if left == 1:
            self.free += self.blocks_for(tokens)
            self._ended(id)
            return
        standing = tokens + 1 - self.clock
        self._count(standing, 1)
        heappush(self.ends, (self.clock + left - 1, id, standing))
        self.joined[id] = self.now_s

    # -- sequences that decode

    def _decode(self, decoding: int, preempted: bool) -> None:
        """Everybody's next token, and more of them up to the step at which something changes."""
        start_s, kv_tokens = self.now_s, self.standing + decoding * self.clock
        first_s, slope_s, alike = self.step_times.decode(decoding, kv_tokens)
        steps = 1 if preempted else min(self.ends[0][0] - self.clock, alike)
        if steps > 1 and self.free < decoding * (1 + steps // self.block_size):
            steps = self._steps_with_blocks(decoding, steps)
        time_s = steps * (first_s + slope_s * (steps - 1) / 2)
        if steps > 1 and time_s > self.arrival_s - start_s:
            time_s, _, steps, _ = Outcome(time_s, None, steps, slope_s).until(self.arrival_s - start_s)
        end_s = self.now_s = start_s + time_s
        used, growth_block_s = self.num_blocks - self.free, 0.0
        first_end_s = end_s
        if steps > 1:
            growth_block_s = self._grow(steps, first_s, slope_s, time_s)
            first_end_s = start_s + first_s
        since_start = self._since_start(decoding, start_s, first_end_s)
        held = kv_tokens + self.prompt_tokens
        row = (start_s, end_s, time_s, steps, first_s, slope_s, decoding, since_start, kv_tokens, held)
        self._note((*row, used, growth_block_s))
        self.clock += steps
        self._end_due()

    def _grow(self, steps: int, first_s: float, slope_s: float, time_s: float) -> float:
        """Takes the blocks of all steps but the first of a row of `time_s`; the block-seconds that they are in use."""
        after = (self.clock + 1) % self.block_size
        growth = self.growth[after : after + min(steps - 1, self.block_size)]
        linear_s, square_s = first_s - slope_s / 2, slope_s / 2
        if steps > _SHORT:
            at, every = np.arange(1, steps), np.resize(growth, steps - 1)
            self.free -= int(every.sum())
            return float(every @ (time_s - at * (linear_s + square_s * at)))
        if steps > self.block_size + 1:
            growth = (growth * (steps // self.block_size + 1))[: steps - 1]
        self.free -= sum(growth)
        growth_block_s = 0.0
        for step, blocks in enumerate(growth, start=1):
            if blocks:
                growth_block_s += blocks * (time_s - step * (linear_s + square_s * step))
        return growth_block_s

    def _steps_with_blocks(self, decoding: int, most: int) -> int:
        """How many steps, up to `most`, there are free blocks for, beside those of the first."""
        rounds, left = divmod(self.free, decoding)
        steps = 1 + rounds * self.block_size
        while steps < most and (needed := self.growth[(self.clock + steps) % self.block_size]) <= left:
            left -= needed
            steps += 1
        return min(steps, most)

    def _end_due(self) -> None:
        """Those whose last token was emitted leave with their blocks."""
        ends = self.ends
        while ends and ends[0][0] == self.clock:
            _, id, standing = heappop(ends)
            self._count(standing, -1)
            self.free += self.blocks_for(standing + self.clock - 1)
            self._ended(id)

    def _count(self, standing: int, one: int) -> None:
        """A sequence of so many tokens at step 0 joins those who decode (1), or leaves them (-1)."""
        slot = (1 - standing) % self.block_size
        self.growth[slot] += one
        self.growth[slot + self.block_size] += one
        self.standing += one * standing

    def _make_room(self) -> None:
        """Preempts whoever came last until everybody else who decodes finds a block."""
        while self.growth[self.clock % self.block_size] > self.free:
            if self.begun is not None:
                prompt = self.begun
                self.begun = None
                self.prompt_tokens -= prompt[1]
                self.free += self.blocks_for(prompt[1])
            else:
                last = max(self.ends, key=lambda end: end[1])
                self.ends.remove(last)
                heapify(self.ends)
                ends_at, id, standing = last
                tokens = standing + self.clock
                self._count(standing, -1)
                self.free += self.blocks_for(tokens - 1)
                self.paused[id] = self.joined.pop(id, self.decoded_s)
                prompt = (id, tokens, ends_at - self.clock)
            self.preemptions[prompt[0]] = self.preemptions.get(prompt[0], 0) + 1
            self.waiting.appendleft(prompt)

    def _ended(self, id: int) -> None:
        self.ended_ids.append(id)
        self.ended_s.append(self.now_s)

    # -- records

    def _since_start(self, decoding: int, start_s: float, first_end_s: float) -> int:
        """Of those who decode, how many had their last token when the step began; the gaps of the others are noted."""
        decoded_s, self.decoded_s = self.decoded_s, self.now_s
        if decoded_s == start_s and not self.joined:
            return decoding
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

    def _note(self, row: tuple[float, ...]) -> None:
        self.rows += row
        if len(self.rows) == _ROWS * len(_NOTED):
            self._write_steps()

    def _write_steps(self) -> None:
        """Makes what was noted of steps into the recorder's rows and samples."""
        rows = np.array(self.rows, dtype=np.float64).reshape(-1, len(_NOTED))
        of_prompts = np.array(self.rows_of_prompts, dtype=np.float64).reshape(-1, len(_NOTED_OF_PROMPTS))
        self.recorder.add_steps(_step_table(rows, of_prompts))
        self.recorder.itl_s.add_ramps(_ramps(rows))
        self.recorder.itl_s.add_ramps(np.array(self.gaps, dtype=np.float64).reshape(-1, 4))
        self.recorder.end_s = float(rows[-1, 1]) if len(rows) else self.recorder.end_s
        for noted in (self.rows, self.rows_of_prompts, self.gaps):
            noted.clear()

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
        return _stacked(columns, REQUEST_COLUMNS, len(served))


def _with_decoding(decoding: int, kv_tokens: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    """The sums of a step with prompts and sequences that decode a token each, see `step_sums`."""
    tokens, sequences, kv, attended, rows, *prefill = sums
    return (tokens + decoding, sequences + decoding, kv + kv_tokens, attended + kv_tokens, rows + decoding, *prefill)


def _step_table(rows: Table, of_prompts: Table) -> Table:
    """Rows of COUNTED_COLUMNS: counts as they were noted, shapes as means over steps, the rest as means over time."""
    noted = dict(zip(_NOTED, rows.T, strict=True))
    n, k, time_s, first_s, slope_s = (noted[name] for name in ("decoding", "steps", "time_s", "first_s", "slope_s"))
    later_s = first_s * k * (k - 1) / 2 + slope_s * (k - 1) * k * (2 * k - 1) / 6
    per_s = np.divide(1, time_s, out=np.zeros(len(rows)), where=time_s > 0)
    grown = n * (k - 1) / 2  # the mean step attends to so many tokens more than the first
    columns = {
        "start_s": noted["start_s"],
        "time_s": noted["end_s"] - noted["start_s"],
        "steps": k,
        "emitted": n * k,
        "blocks_used": (noted["blocks_used"] * time_s + noted["growth_block_s"]) * per_s,
        "held_tokens": (noted["held_tokens"] * time_s + n * later_s) * per_s,
        "tokens": n,
        "sequences": n,
        "kv_tokens": noted["kv_tokens"] + grown,
        "attended": noted["kv_tokens"] + grown,
        "logits_rows": n,
    }
    table = _stacked(columns, COUNTED_COLUMNS, len(rows))
    index = of_prompts[:, 0].astype(np.int64)
    table[index, COUNTED_COLUMNS.index("emitted")] += of_prompts[:, 1]
    table[index, -len(SHAPE_COLUMNS) :] = of_prompts[:, 2:]
    return table


def _ramps(rows: Table) -> Table:
    """The ramps of `Samples` that the gaps within rows, and those since they began, come to."""
    noted = dict(zip(_NOTED, rows.T, strict=True))
    n, since_start, k = noted["decoding"], noted["since_start"], noted["steps"]
    several, all_since = k > 1, since_start == n
    span_s = np.where(several, noted["first_s"], noted["end_s"] - noted["start_s"])
    slope_s = np.where(several, noted["slope_s"], 0.0)
    whole = np.stack((span_s, slope_s, k, n), axis=1)[all_since & (n > 0)]
    first = np.stack((span_s, np.zeros(len(rows)), np.ones(len(rows)), since_start), axis=1)
    rest = np.stack((span_s + slope_s, slope_s, k - 1, n), axis=1)
    return np.concatenate((whole, first[~all_since & (since_start > 0)], rest[~all_since & several]))


def _stacked(columns: dict[str, NDArray[np.generic]], names: tuple[str, ...], rows: int) -> Table:
    """The columns side by side in the order of `names`; zeros where there is none."""
    table = np.zeros((rows, len(names)))
    for name, column in columns.items():
        table[:, names.index(name)] = column
    return table
