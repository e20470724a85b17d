"""What is an engine made of before it serves: requests, memory, a scheduler, and what executes its steps?"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import torch

from membound.kernels.base import Kernels
from membound.kernels.dispatch import why_not_cpp, why_not_triton
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.parallel import SINGLE
from membound.roofline.results.result import MemoryRates, Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.times.known import Times, times_for
from membound.runtime.clock import WallClock
from membound.runtime.cuda_graphs import decode_graphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.decoders import DeviceModels
from membound.runtime.device_room import cache_room
from membound.runtime.executor import TorchExecutor
from membound.runtime.kv.block_moves import BlockMover
from membound.runtime.nvml import EnergyMeter
from membound.runtime.offload.experts import OffloadedExperts
from membound.runtime.parallel.leader import DividedDecoder
from membound.runtime.plain import generate_plain
from membound.runtime.rehearsal import compiles_when_called, rehearsal_of, rehearse, rehearsed
from membound.runtime.speculation.build import DraftHost, proposer_for, sampler_of, undividable_drafts
from membound.simulator.scheduling.build import bounds_of, build_scheduler, run_result
from membound.simulator.scheduling.kv_memory import KvMemory, kv_memory
from membound.simulator.scheduling.loop import Clock
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.scheduler import Scheduler
from membound.simulator.scheduling.workload import requests_for

WARM_UP_STEPS = 3
EMULATED_WEIGHTS = (
    "the weights are emulated: their quality is that of the format and the method, time and speed mean nothing"
)
EMULATED_STORE = "the KV cache is emulated: its quality is that of the format, its time and speed mean nothing"


@dataclass
class Assembly:
    """All parts of an engine that is warm and has served nobody; `begin` comes before the first request."""

    scenario: Scenario
    hardware: HardwareSpec
    decoders: DeviceModels
    decoder: Decoder | DividedDecoder
    requests: list[Request]
    memory: KvMemory
    times: Times
    kv: KvCache
    scheduler: Scheduler
    mover: BlockMover | None
    executor: TorchExecutor
    recorder: Recorder
    notes: list[str]
    stalls: int = 0
    compilations: int = 0
    meter: EnergyMeter = field(init=False)
    offload: OffloadedExperts | None = field(init=False)

    def __post_init__(self) -> None:
        self.meter = EnergyMeter.of(self.decoders.device, self.scenario.setup.parallel.tp)
        self.offload = self.decoders.offload(self.scenario)

    def begin(self) -> None:
        """The run's clock begins: energy and experts that are fetched count from here on."""
        if self.offload is not None:
            self.offload.reset()
        self.meter.begin()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Stalls and compilations within it are this engine's."""
        kernels = self.decoders.kernels
        stalls, compilations = kernels.stalls(), kernels.compilations()
        yield
        self.stalls += kernels.stalls() - stalls
        self.compilations += kernels.compilations() - compilations

    def result(
        self,
        asked: Scenario,
        recorder: Recorder,
        notes: list[str] | None = None,
        devices: int | None = None,
        memory: MemoryRates | None = None,
    ) -> RunResult:
        """The result of the run that `recorder` has recorded for the scenario `asked`, on `devices` devices.

        Raises MemboundError where no request could be served.
        """
        if recorder.rejections and not recorder.outputs:
            id, reason = next(iter(recorder.rejections.items()))
            raise MemboundError(f"every request was turned away; request {id}, because {reason}")
        emulated = [EMULATED_STORE] if any(getattr(layer, "emulated", False) for layer in self.kv) else []
        emulated += [EMULATED_WEIGHTS] if self.decoder.emulated else []
        output_tokens = sum(map(len, recorder.outputs.values()))
        provenance = Provenance(
            producer="runtime",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            hardware=self.hardware.name,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            stalls=self.stalls,
            memory=memory,
            emulated=bool(emulated),
            notes=[
                *_conditions(self.decoders.kernels, self.stalls),
                *_memory_changed(memory),
                self.decoders.model(asked).weights.origin,
                "the bounds of steps are attributed by the roofline of their shapes",
                *emulated,
                *self._compiled(),
                *self.notes,
                *([self.offload.note()] if self.offload is not None else []),
                *self.executor.rollback.notes(),
                *(self.decoder.routing_notes if isinstance(self.decoder, Decoder) else []),
                *(notes or []),
                *self.meter.notes(output_tokens),
            ],
        )
        blocks = self.memory.num_blocks
        return run_result(asked, self.decoder.spec, self.times, blocks, recorder, provenance, devices)

    def _compiled(self) -> list[str]:
        """In words, how many kernels were compiled on the way, which is time that no step takes again."""
        said = "kernels were compiled while requests waited for them; another run in this process is free of that"
        return [f"{self.compilations} {said}"] if self.compilations else []


def assemble(
    decoders: DeviceModels,
    scenario: Scenario,
    hardware: HardwareSpec,
    clock: Clock,
    recorder: Recorder,
    *,
    moves: bool,
    engines: int,
) -> Assembly:
    """The engine of a scenario, after a warm-up, with its share of a device that so many `engines` use.

    With `moves` blocks come and go, else only where the engine asks. Raises MemboundError where the model or a request
    does not fit, or two parts of the scenario exclude each other.
    """
    decoders.collect()
    decoder, block_size = decoders.engine_decoder(scenario), scenario.engine.block_size
    requests = requests_for(scenario, vocab=decoder.spec.vocab)
    longest = _longest(scenario, requests, decoder.spec.max_context)
    # Processes on a CPU share it, its memory too, so that together they are one device; GPUs are devices each.
    shared = decoders.device.startswith("cpu")
    sharing = scenario.setup.parallel.tp if shared else 1
    turns = [turn.tokens for request in requests for turn in request.turns() if turn.tokens <= longest]
    room_of = partial(kv_memory, scenario, decoder.spec, longest=longest, turns=turns)
    memory = cache_room(decoders, scenario, hardware.memory_bytes / (sharing * engines), room_of)
    as_one = scenario.model_copy(update={"parallel": SINGLE}) if shared else scenario
    times = times_for(hardware)
    kv = decoder.new_cache(memory.num_blocks, block_size, memory.seats)
    proposer = None
    if problem := undividable_drafts(scenario):
        raise MemboundError(problem)
    if isinstance(decoder, Decoder):
        weights = decoders.model(scenario).weights
        host = DraftHost(decoder, weights, kv, memory.num_blocks, block_size, decoders.decoder)
        proposer = proposer_for(scenario, host)
    scheduler = build_scheduler(
        as_one, decoder.spec, times, memory, content_known=True, numbered_blocks=True, drafter=proposer
    )
    assert scheduler.tables is not None, "blocks are numbered"
    for _ in generate_plain(decoder, [1] * 16, WARM_UP_STEPS):
        pass
    drafts, most_blocks = scenario.setup.drafts, -(-longest // block_size) + memory.fixed_blocks
    sizes = most_blocks, scenario.seats, drafts.tokens if drafts else 0
    if isinstance(decoder, Decoder):
        graphs, capture_note = decode_graphs(decoder, kv, *sizes)
    else:  # which replays by itself
        graphs, capture_note = None, decoder.capture(kv, *sizes)
    drafts_note = proposer.capture(most_blocks, scenario.seats) if proposer is not None else None
    moves = moves or scenario.engine.prefix_caching or scenario.engine.preemption == "swap"
    mover = BlockMover(kv, scheduler.tables, decoders.kernels) if moves else None
    sampler = sampler_of(scenario, decoders.device, decoders.kernels)
    executor = TorchExecutor(decoder, kv, block_size, sampler, clock, graphs, proposer, mover)
    if compiles_when_called(decoder.device):
        warm = build_scheduler(
            rehearsed(as_one), decoder.spec, times, memory, content_known=True, numbered_blocks=True, drafter=proposer
        )
        again = sampler_of(scenario, decoders.device, decoders.kernels)
        limits = memory.seats, scenario.step_tokens, decoder.spec.max_context
        unheard = TorchExecutor(decoder, kv, block_size, again, WallClock(), graphs, proposer)
        rehearse(rehearsal_of(requests, *limits), warm, unheard)
    if isinstance(decoder, Decoder):
        for statistics in decoder.router_statistics.values():
            statistics.reset()
    recorder.bounds = recorder.bounds or bounds_of(decoder.spec, as_one.setup, times)
    return Assembly(
        scenario,
        hardware,
        decoders,
        decoder,
        requests,
        memory,
        times,
        kv,
        scheduler,
        mover,
        executor,
        recorder,
        [note for note in (capture_note, drafts_note) if note],
    )


def _longest(scenario: Scenario, requests: list[Request], max_context: int) -> int:
    """Tokens of the longest turn that the model's context holds; the scheduler turns those beyond it away.

    Raises MemboundError where all are beyond it.
    """
    within = [request for request in requests if request.tokens <= max_context]
    if not within:
        shortest = min(requests, key=lambda request: request.tokens)
        raise MemboundError(
            f"request {shortest.id}, the shortest, has {shortest.tokens} tokens, more than the {max_context} of "
            f"'{scenario.model}'; make the prompts or output_tokens shorter"
        )
    return max(turn.tokens for request in within for turn in request.turns())


def _conditions(kernels: Kernels, stalls: int) -> list[str]:
    """Which code ran, on how many threads, and how busy the machine was."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    notes = [
        f"kernels {kernels.name} ({kernels.describe()}), {torch.get_num_threads()} threads",
        f"load average {load:.1f} at the end, threads held up by other programs {stalls} times",
    ]
    on_cpu = kernels.activation_dtype is torch.float32
    if kernels.name == "torch" and (reason := why_not_cpp() if on_cpu else why_not_triton()):
        notes.append(f"plain PyTorch kernels: {reason}")
    return notes


def _memory_changed(memory: MemoryRates | None) -> list[str]:
    """In words, that memory was another than the predictions count on."""
    if memory is None or memory.as_calibrated:
        return []
    return [
        f"memory gave {memory.before / 1e9:.0f} GB/s before the run and {memory.after / 1e9:.0f} after it, "
        f"{memory.calibrated / 1e9:.0f} when this machine was calibrated: predictions are for that"
    ]
