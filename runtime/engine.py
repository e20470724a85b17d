"""What does a scenario come to when it really runs?"""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from membound.kernels.base import Kernels
from membound.kernels.dispatch import kernels_for, why_not_cpp, why_not_triton
from membound.roofline.engine_settings import Engine
from membound.roofline.errors import MemboundError
from membound.roofline.gguf_file import GgufFile
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.memory import weights_bytes
from membound.roofline.model_files import resolve_model
from membound.roofline.models import ModelSpec
from membound.roofline.parallel import SINGLE
from membound.roofline.precision import Precision
from membound.roofline.result import Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import EngineSetup
from membound.roofline.times import times_for
from membound.roofline.workload import SyntheticPrompts
from membound.runtime.assets import fetch_smollm2
from membound.runtime.block_moves import BlockMover
from membound.runtime.clock import WallClock
from membound.runtime.cuda_graphs import decode_graphs
from membound.runtime.decoder import Decoder
from membound.runtime.executor import TorchExecutor
from membound.runtime.kv.build import is_plain, runs_in, store_for, store_problem
from membound.runtime.nvml import Nvml
from membound.runtime.parallel.group import Group
from membound.runtime.parallel.leader import DividedDecoder, divided
from membound.runtime.parallel.recipe import ShardRecipe
from membound.runtime.parallel.shards import shard_spec
from membound.runtime.plain import generate_plain
from membound.runtime.quantization.calibration import Calibrator
from membound.runtime.quantization.recipes import format_problem, recipe_for
from membound.runtime.recipe import Recipe
from membound.runtime.speculation.build import RUNNING, DraftHost, proposer_for, sampler_of
from membound.runtime.tokenizer import Tokenizer
from membound.runtime.weights import Weights, load_gguf, load_safetensors, random_weights
from membound.simulator.scheduling.build import bounds_of, build_scheduler, run_result
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.kv_memory import MEMORY_SHARE, kv_memory
from membound.simulator.scheduling.loop import Executor, serve
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.workload import requests_for

WARM_UP_STEPS = 3
EMULATED_WEIGHTS = (
    "the weights are emulated: their quality is that of the format and the method, time and speed mean nothing"
)
EMULATED_STORE = "the KV cache is emulated: its quality is that of the format, its time and speed mean nothing"


class RunClock(Protocol):
    """A clock that can also be waited for."""

    def now_s(self) -> float: ...

    def wait_until(self, until_s: float) -> None: ...


@dataclass
class LoadedModel:
    """A scenario's model in memory: its shape, its weights, and a tokenizer where it has text."""

    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer | None


def load_model(scenario: Scenario) -> LoadedModel:
    """Loads what `model` and `weights` of a scenario name; raises MemboundError with one sentence."""
    source = scenario.weights
    if source == "random":
        spec = resolve_model(scenario.model)
        needed, memory = weights_bytes(spec, scenario.setup), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > MEMORY_SHARE * memory:
            raise MemboundError(
                f"model '{spec.name}' does not fit: its weights take {needed / 2**30:.1f} GiB, "
                f"and this machine has {memory / 2**30:.1f} GiB"
            )
        return LoadedModel(spec, random_weights(spec, seed=scenario.workload.seed), None)
    if source == "pretrained":
        if scenario.model != "SmolLM2-135M":
            raise MemboundError(
                f"weights 'pretrained' are known for SmolLM2-135M only, not for '{scenario.model}'; "
                "give 'random', or the path of a GGUF or a safetensors folder"
            )
        source = str(fetch_smollm2())
    if not Path(source).exists():
        raise MemboundError(
            f"field 'weights' is '{scenario.weights}'; give 'random', 'pretrained', "
            "or the path of a GGUF or of a safetensors folder"
        )
    if Path(source).is_dir():
        spec, weights = load_safetensors(source)
        without_text = isinstance(scenario.workload.prompts, SyntheticPrompts)
        if without_text and not (Path(source) / "tokenizer.json").exists():
            return LoadedModel(spec, weights, None)
        return LoadedModel(spec, weights, Tokenizer.from_folder(source))
    spec, weights = load_gguf(source)
    return LoadedModel(spec, weights, Tokenizer.from_gguf_metadata(GgufFile(source).metadata))


class Runtime:
    """Runs scenarios on one device; models and their packed decoders stay loaded between runs."""

    def __init__(self, device: str = "cpu", threads: int | None = None, kernels: Kernels | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device
        self.kernels = kernels or kernels_for(device)
        self._models: dict[tuple[str, str], LoadedModel] = {}
        self._decoders: dict[tuple[str, str, str], Decoder] = {}
        self._calibrators: dict[tuple[str, str], Calibrator] = {}
        self._storing: dict[tuple[int, Precision], Decoder] = {}
        self._divided: tuple[tuple[str, str, str, int], DividedDecoder] | None = None
        self._processes = ExitStack()
        weakref.finalize(self, self._processes.close)

    def model(self, scenario: Scenario) -> LoadedModel:
        """The scenario's model, loaded once."""
        key = (scenario.model, scenario.weights)
        if key not in self._models:
            self._models[key] = load_model(scenario)
        return self._models[key]

    def decoder(self, scenario: Scenario) -> Decoder | DividedDecoder:
        """The scenario's decoder with its weights in the format that its techniques ask for, packed once.

        With `parallel.tp` it is divided among as many processes, which stay until another division is asked for.
        """
        if problem := unmeasured(scenario.setup):
            raise MemboundError(problem)
        plan = scenario.setup.precision
        chosen = [repr(technique) for technique in scenario.techniques if technique.layer == "weights"]
        key = (scenario.model, scenario.weights, f"{plan.weights.name} {plan.activations.name} {chosen}")
        if (tp := scenario.setup.parallel.tp) > 1:
            return self._divided_decoder(scenario, (*key, tp))
        if key not in self._decoders:
            loaded = self.model(scenario)
            recipe = self._recipe(scenario)
            self._decoders[key] = Decoder(loaded.spec, loaded.weights.to(self.device), self.kernels, recipe)
        return self._with_store(self._decoders[key], scenario)

    def _recipe(self, scenario: Scenario) -> Recipe:
        """What the scenario's techniques make of its weights; text to calibrate on where the model reads any."""
        key = (scenario.model, scenario.weights)
        tokenizer = self.model(scenario).tokenizer
        if tokenizer is not None and key not in self._calibrators:
            self._calibrators[key] = Calibrator.on_text(self.kernels, tokenizer)
        plan, divided = scenario.setup.precision, scenario.setup.parallel.tp > 1
        return recipe_for(scenario.techniques, plan, self.kernels, self._calibrators.get(key), divided=divided)

    def _with_store(self, decoder: Decoder, scenario: Scenario) -> Decoder:
        """The same decoder over the KV stores that the scenario asks for."""
        setup = scenario.setup
        if problem := store_problem(setup, scenario.engine, decoder.spec):
            raise MemboundError(problem)
        if is_plain(setup):
            return decoder
        key = (id(decoder), setup.kv)
        if key not in self._storing:
            self._storing[key] = decoder.storing(store_for(setup, self.kernels, decoder.device))
        return self._storing[key]

    def close(self) -> None:
        """Ends the processes of a divided model; without it they end with this object."""
        self._divided = None
        self._processes.close()

    def part(self, scenario: Scenario, group: Group) -> Decoder:
        """What this process of `group` holds of the scenario's model."""
        loaded, whole = self.model(scenario), self.model(scenario).spec
        recipe = ShardRecipe(self._recipe(scenario), group, whole)
        part = Decoder(shard_spec(whole, group.size), loaded.weights.to(self.device), self.kernels, recipe)
        return self._with_store(part, scenario)

    def _divided_decoder(self, scenario: Scenario, key: tuple[str, str, str, int]) -> DividedDecoder:
        if self._divided is None or self._divided[0] != key or not self._divided[1].followers.alive:
            self.close()
            spec = self.model(scenario).spec
            shard_spec(spec, key[-1])
            opened = divided(scenario, spec, self.device, lambda group: self.part(scenario, group))
            self._divided = key, self._processes.enter_context(opened)
        return self._divided[1]

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
        if scenario.cluster is not None:
            raise MemboundError("field 'cluster' is predicted, not measured yet: the runtime has one engine; remove it")
        if problem := unmeasured_engine(scenario.engine):
            raise MemboundError(problem)
        hardware = hardware or get_hardware(scenario.hardware)
        decoder = self.decoder(scenario)
        requests = requests_for(scenario, vocab=decoder.spec.vocab)
        for request in requests:
            total = request.prompt_tokens + request.output_tokens
            if total > decoder.spec.max_context:
                raise MemboundError(
                    f"request {request.id} has {total} tokens, more than the {decoder.spec.max_context} of "
                    f"'{scenario.model}'; make the prompts or output_tokens shorter"
                )
        longest = max(turn.tokens for request in requests for turn in request.turns())
        # Processes on a CPU share it, its memory too, so that together they are one device; GPUs are devices each.
        shared = self.device.startswith("cpu")
        sharing = scenario.setup.parallel.tp if shared else 1
        memory = kv_memory(scenario, decoder.spec, hardware.memory_bytes / sharing, longest)
        as_one = scenario.model_copy(update={"parallel": SINGLE}) if shared else scenario
        times = times_for(hardware)
        blocks = memory.num_blocks
        kv = decoder.new_cache(blocks, scenario.engine.block_size, scenario.engine.max_num_seqs)
        weights, block_size = self.model(scenario).weights, scenario.engine.block_size
        proposer = proposer_for(scenario, DraftHost(decoder, weights, kv, blocks, block_size, self.decoder))
        scheduler = build_scheduler(
            as_one, decoder.spec, times, memory, content_known=True, numbered_blocks=True, drafter=proposer
        )
        sampler = sampler_of(scenario, self.device)
        _warm_up(decoder, scenario)
        longest_blocks = -(-longest // scenario.engine.block_size)
        graphs, capture_note = decode_graphs(decoder, kv, longest_blocks, scenario.engine.max_num_seqs)

        stalls, meter = self.kernels.stalls(), _EnergyMeter(self.device)
        clock = clock or WallClock()
        moves = scenario.engine.prefix_caching or scenario.engine.preemption == "swap"
        mover = BlockMover(kv, scheduler.tables) if moves and scheduler.tables is not None else None
        executor: Executor = TorchExecutor(
            decoder, kv, scenario.engine.block_size, sampler, clock, graphs, proposer, mover
        )
        recorder = recorder or Recorder(observer)
        client = client_for(scenario.workload.arrivals, requests)
        for until_s in serve(scheduler, client, wrap(executor) if wrap else executor, clock, recorder):
            clock.wait_until(until_s)
        scheduler.check_integrity()
        recorder.bounds = recorder.bounds or bounds_of(decoder.spec, as_one.setup, times)
        emulated = [EMULATED_STORE] if any(getattr(layer, "emulated", False) for layer in kv) else []
        emulated += [EMULATED_WEIGHTS] if decoder.emulated else []
        notes = [*emulated, *([capture_note] if capture_note else []), *meter.notes(sum(r.output_tokens for r in requests))]
        provenance = self._provenance(scenario, hardware, self.kernels.stalls() - stalls, notes, bool(emulated))
        return run_result(scenario, decoder.spec, times, blocks, recorder, provenance)

    def _provenance(
        self, scenario: Scenario, hardware: HardwareSpec, stalls: int, run_notes: list[str], emulated: bool
    ) -> Provenance:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        notes = [
            f"kernels {self.kernels.name} ({self.kernels.describe()}), {torch.get_num_threads()} threads",
            f"load average {load:.1f} at the end, threads held up by other programs {stalls} times",
            self.model(scenario).weights.origin,
            "the bounds of steps are attributed by the roofline of their shapes",
            *run_notes,
        ]
        if self.kernels.name == "torch" and (reason := why_not_cpp() if self.device == "cpu" else why_not_triton()):
            notes.append(f"plain PyTorch kernels: {reason}")
        return Provenance(
            producer="runtime",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            hardware=hardware.name,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            stalls=stalls,
            emulated=emulated,
            notes=notes,
        )


def unmeasured(setup: EngineSetup) -> str | None:
    """The first part of a set-up that is predicted but does not run here yet, in one sentence; None where all runs."""
    plan, drafts = setup.precision, setup.drafts
    if problem := format_problem(plan):
        return problem
    parts = (
        (
            setup.parallel.devices > setup.parallel.tp or setup.parallel.ep > 1,
            f"parallelism other than tp on {setup.parallel.devices} devices",
            "tensor parallelism",
        ),
        (not runs_in(plan.kv), f"a KV cache in {plan.kv.name}", "fp8, int8, int4, kivi2, kivi4 and 16 bits"),
        (drafts is not None and drafts.kind not in RUNNING, f"speculation by {drafts and drafts.kind}", ", ".join(RUNNING)),
        (not setup.fused_attention, "attention that writes its scores to memory", "fused attention"),
    )
    wrong = next((part for part in parts if part[0]), None)
    return None if wrong is None else f"{wrong[1]} is predicted, not measured yet: the runtime has {wrong[2]}"


def unmeasured_engine(engine: Engine) -> str | None:
    """The first setting of an engine that is predicted but does not run here yet, in one sentence, or None."""
    parts = (
        (engine.disaggregation is not None, "engine.disaggregation", "one engine for prompts and outputs"),
    )
    wrong = next((part for part in parts if part[0]), None)
    return None if wrong is None else f"{wrong[1]} is predicted, not measured yet: the runtime has {wrong[2]}"


class _EnergyMeter:
    """What a GPU takes and how it is clocked while a run is measured; on a CPU it knows nothing."""

    def __init__(self, device: str) -> None:
        self._nvml = Nvml.of(device)
        self._before = self._nvml.read() if self._nvml else None

    def notes(self, output_tokens: int) -> list[str]:
        """The GPU's state at the end, and the energy of each output token since the meter was made."""
        if self._nvml is None or self._before is None:
            return []
        after = self._nvml.read()
        notes = [f"GPU at the end: {after.describe()}"]
        if after.energy_j is not None and self._before.energy_j is not None:
            joules = after.energy_j - self._before.energy_j
            notes.append(f"{joules:.0f} J by the GPU's counter, {joules / output_tokens:.3g} J for each output token")
        return notes


def _warm_up(decoder: Decoder, scenario: Scenario) -> None:
    """Touches every weight and every kernel a few times, on blocks of its own."""
    for _ in generate_plain(decoder, [1] * 16, WARM_UP_STEPS):
        pass
