"""How do several engines serve side by side on one machine? In turn, by clocks that stand while others serve.

A virtual machine's memory and cores give more in one minute and less in the next. Engines that run one after another
meet different minutes; those that take turns of a few steps all meet the same, and their ratios are of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

from membound.roofline.hardware.calibration import one_state
from membound.roofline.results.result import MemoryRates, RunResult
from membound.runtime.assembly import Assembly
from membound.runtime.calibration.memory_watch import MemoryWatch
from membound.runtime.clock import RunClock, WallClock
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.loop import Executor, serve
from membound.simulator.scheduling.request import Outcome, Sequence, Step

TURNS = 12


class Serving:
    """An engine amid its requests, whose clock goes while it has its turn.

    `watch` reads what memory gives before and after each turn, of the `calibrated` bytes/s that predictions count on.
    `executor` replaces the engine's own.
    """

    def __init__(
        self,
        assembly: Assembly,
        clock: RunClock,
        executor: Executor | None = None,
        watch: MemoryWatch | None = None,
        calibrated: float = 0.0,
    ) -> None:
        self.assembly = assembly
        self.emitted = 0
        self._clock = clock
        self._executor = executor or assembly.executor
        self._watch = watch
        self._calibrated = calibrated
        self._rates: list[tuple[float, float]] = []
        client = client_for(assembly.scenario.workload.arrivals, assembly.requests)
        if isinstance(clock, WallClock):
            clock.begin()
            clock.hold()
        assembly.begin()
        self._waits = serve(assembly.scheduler, client, self, clock, assembly.recorder)

    @property
    def expected(self) -> int:
        """Tokens that its requests ask for."""
        return sum(turn.output_tokens for request in self.assembly.requests for turn in request.turns())

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        """The loop's step."""
        outcome = self._executor.run(step, sequences)
        self.emitted += sum(map(len, (outcome.emitted or {}).values()))
        return outcome

    def turn(self, until_emitted: float = math.inf) -> None:
        """Serves until so many tokens have been emitted since the first turn, or everybody has been served."""
        before = self._watch.rate() if self._watch else 0.0
        with self.assembly.counted():
            if isinstance(self._clock, WallClock):
                self._clock.go()
            for until_s in self._waits:
                self._clock.wait_until(until_s)
                if self.emitted >= until_emitted:
                    break
            if isinstance(self._clock, WallClock):
                self._clock.hold()
        if self._watch:
            self._rates.append((before, self._watch.rate()))

    def result(self) -> RunResult:
        """What came of it, after the last turn."""
        self.assembly.scheduler.check_integrity()
        return self.assembly.result(self.assembly.scenario, self.assembly.recorder, memory=self._memory())

    def _memory(self) -> MemoryRates | None:
        if not self._rates:
            return None
        before, after = zip(*self._rates, strict=True)
        elsewhere = [not all(one_state(rate, self._calibrated) for rate in rates) for rates in self._rates]
        return MemoryRates(
            before=median(before),
            after=median(after),
            calibrated=self._calibrated,
            elsewhere=sum(elsewhere) / len(elsewhere),
        )


def in_turn(engines: Iterable[Serving], before_turn: Callable[[], None]) -> list[RunResult]:
    """Serves all engines' requests, in each turn a `TURNS`th of an engine's tokens: all begin and end together."""
    all_engines = list(engines)
    for number in range(1, TURNS + 1):
        for engine in all_engines:
            before_turn()
            engine.turn(engine.expected * number / TURNS if number < TURNS else math.inf)
    return [engine.result() for engine in all_engines]
