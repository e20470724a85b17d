"""How is a scenario run for real?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from membound.kernels.base import Kernels
from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario
from membound.runtime.assembly import Assembly, assemble
from membound.runtime.calibration.memory_watch import MemoryWatch, watchable
from membound.runtime.clock import RunClock, WallClock
from membound.runtime.decoder import Decoder
from membound.runtime.decoders import DeviceModels
from membound.runtime.loading.loaded import LoadedModel
from membound.runtime.parallel.group import Group
from membound.runtime.refusals import unmeasured_scenario
from membound.runtime.turns import Serving, in_turn
from membound.simulator.scheduling.loop import Clock, Executor
from membound.simulator.scheduling.recorder import Observer, Recorder


class Runtime:
    """Runs scenarios on one device; models and their packed decoders stay loaded between runs."""

    def __init__(self, device: str = "cpu", threads: int | None = None, kernels: Kernels | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device
        self.kernels = kernels or kernels_for(device)
        self.decoders = DeviceModels(device, self.kernels)
        self._watch: MemoryWatch | None = None

    def model(self, scenario: Scenario) -> LoadedModel:
        """The scenario's model, loaded once."""
        return self.decoders.model(scenario)

    def decoder(self, scenario: Scenario) -> Decoder:
        """The scenario's whole decoder; see `DeviceModels.decoder`."""
        return self.decoders.decoder(scenario)

    def part(self, scenario: Scenario, group: Group) -> Decoder:
        """What this process of `group` holds of the scenario's model."""
        return self.decoders.part(scenario, group)

    def close(self) -> None:
        """Ends the processes of a divided model; without it they end with this object."""
        self.decoders.close()

    def assemble(
        self,
        scenario: Scenario,
        clock: Clock,
        hardware: HardwareSpec,
        recorder: Recorder,
        *,
        moves: bool = False,
        engines: int = 1,
    ) -> Assembly:
        """The scenario's engine, warm and before its first request; see `assemble`."""
        return assemble(self.decoders, scenario, hardware, clock, recorder, moves=moves, engines=engines)

    def run(
        self,
        scenario: Scenario,
        hardware: HardwareSpec | None = None,
        observer: Observer | None = None,
        clock: RunClock | None = None,
        wrap: Callable[[Executor], Executor] | None = None,
        recorder: Recorder | None = None,
    ) -> RunResult:
        """Serves the scenario's workload in real time, after a warm-up that is not recorded.

        `clock` and `wrap` replace the wall clock and the executor's outcome, for instance by scripted step times.
        `hardware` says what the bounds are attributed with. Raises MemboundError where the scenario cannot run.
        """
        if problem := unmeasured_scenario(scenario):
            raise MemboundError(problem)
        hardware = hardware or get_hardware(scenario.hardware)
        with _memory_enough(scenario):
            if scenario.engine.disaggregation is not None:
                from membound.runtime.disaggregated.run import run_disaggregated

                return run_disaggregated(self, scenario, hardware, observer)
            recorder = recorder or Recorder(observer)
            serving = self._serving(scenario, hardware, recorder, clock or WallClock(), wrap)
            serving.turn()
            return serving.result()

    def takes_turns(self, scenario: Scenario) -> bool:
        """Whether the scenario's engine can serve beside others: alone in this process, with all that it holds in
        memory that others leave room for."""
        own = scenario.engine.disaggregation is None and scenario.setup.parallel.devices == 1
        return own and scenario.setup.expert_storage is None and self.device.startswith("cpu")

    def run_in_turn(
        self,
        asked: Sequence[tuple[Scenario, Observer | None]],
        hardware: HardwareSpec,
        before_turn: Callable[[], None] = lambda: None,
    ) -> list[RunResult]:
        """Serves several scenarios side by side, a few steps of each in turn; see `turns.in_turn`.

        `before_turn` is called before each turn. Raises MemboundError where one cannot run.
        """
        engines = []
        for scenario, observer in asked:
            if problem := unmeasured_scenario(scenario):
                raise MemboundError(problem)
            with _memory_enough(scenario):
                engines.append(self._serving(scenario, hardware, Recorder(observer), WallClock()))
        with _memory_enough(asked[0][0]):
            return in_turn(engines, before_turn)

    def _serving(
        self,
        scenario: Scenario,
        hardware: HardwareSpec,
        recorder: Recorder,
        clock: RunClock,
        wrap: Callable[[Executor], Executor] | None = None,
    ) -> Serving:
        assembly = self.assemble(scenario, clock, hardware, recorder)
        executor = wrap(assembly.executor) if wrap else None
        return Serving(assembly, clock, executor, self._watch_of(hardware), _watched(hardware))

    def settle(self, hardware: HardwareSpec, patience_s: float) -> float:
        """Waits up to `patience_s` until memory is as when `hardware` was calibrated, where that is known.

        Returns the seconds that it waited.
        """
        watch = self._watch_of(hardware)
        return 0.0 if watch is None else watch.settled(_watched(hardware), patience_s)

    def _watch_of(self, hardware: HardwareSpec) -> MemoryWatch | None:
        if not _watched(hardware) or not (self._watch or watchable(self.device)):
            return None
        self._watch = self._watch or MemoryWatch()
        return self._watch


def _watched(hardware: HardwareSpec) -> float:
    """Bytes/s that memory gave while the hardware was calibrated; 0 where nobody knows."""
    return (hardware.calibration and hardware.calibration.watched_bytes_per_s) or 0.0


@contextmanager
def _memory_enough(scenario: Scenario) -> Iterator[None]:
    """Says in one sentence that the memory was not there: other programs may hold what the scenario counts on."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has a class of its own for a GPU's memory only.
        ours = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not ours:
            raise
        raise MemboundError(
            f"memory ran out while '{scenario.name}' ran: close other programs, or give fewer engine.num_blocks, "
            "shorter requests or a smaller engine.max_batched_tokens"
        ) from None
