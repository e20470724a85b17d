"""How fast are an engine and its techniques at an operating point that a person chose?

The questions of the pages Techniques, Stack and Advisor, without the pages: `views.background` asks them in a process
beside the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from membound.app.stacks import stack_document
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.operating_point import BATCHES, CONTEXTS
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.scenario.workload import Workload
from membound.roofline.techniques import (
    TECHNIQUES,
    GainMetric,
    KvQuantization,
    Speculative,
    Technique,
    WeightQuantization,
)
from membound.simulator.advice.advisor import advise, to_json
from membound.simulator.advice.effects import Bench, Effect
from membound.simulator.deployment import check_context
from membound.simulator.load import Lengths, Load

# What every engine of today has, and what a technique is added to.
ENGINE = ("continuous_batching",)
# Outputs differ in length, as those of people do; the prompt is as long as the chosen context leaves it.
WORKLOAD: dict[str, Any] = {
    "requests": 2000,
    "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
    "output_tokens": {"kind": "uniform", "low": 32, "high": 480},
    "seed": 1,
}
# Formats of quantized weights and caches: weights alone, or with the activations that are multiplied with them.
AUTO = "auto"
WEIGHTS = (
    *(AUTO, "int4", "awq", "q4_k_m", "nvfp4", "mxfp4", "fp8", "int8", "int3"),
    *("int4/int8", "nvfp4/nvfp4", "mxfp4/mxfp4"),
)
CACHES = (AUTO, "fp8", "int8", "nvfp4", "int4", "kivi4", "kivi2")
# Guesses are right as often as each technique's default says.
ANY_TASK = "any"
# A calibrated machine looks up its tables at each operator: fewer points of a sweep are costed there.
EVERY_OTHER = 2


@dataclass(frozen=True)
class EngineChoice:
    """An engine at an operating point, what gains are of, and the task whose content drafts are guessed for."""

    model_name: str
    device_name: str
    tp: int
    profile: str
    batch: int
    context: int
    metric: GainMetric
    task: str = ANY_TASK
    weights: str = AUTO
    kv: str = AUTO
    techniques: tuple[str, ...] = ENGINE

    @property
    def model(self) -> ModelSpec:
        return get_model(self.model_name)

    @property
    def device(self) -> HardwareSpec:
        """Raises MemboundError where this machine was not calibrated."""
        return get_hardware(self.device_name)

    @property
    def scenario(self) -> Scenario:
        """The engine with as many clients in a closed loop as the batch has sequences."""
        arrivals = {"kind": "closed_loop", "concurrency": self.batch}
        task = None if self.task == ANY_TASK else self.task
        return parse_scenario(
            {
                "name": "dashboard",
                "model": self.model_name,
                "hardware": self.device_name,
                "parallel": {"tp": self.tp},
                "engine": {"profile": self.profile, "max_num_seqs": BATCHES[-1]},
                "techniques": list(self.techniques),
                "workload": {"arrivals": arrivals, "task": task, **WORKLOAD},
            }
        )

    def technique(self, name: str) -> Technique:
        """A technique by its defaults, in the format that was chosen, else in the one that suits the device."""
        if name == "weight_quantization" and self.weights != AUTO:
            format, _, activations = self.weights.partition("/")
            return WeightQuantization(format=format, activations=activations or None)
        if name == "kv_quantization" and self.kv != AUTO:
            return KvQuantization(format=self.kv)
        return TECHNIQUES[name].suited(self.device)

    @property
    def load(self) -> Load:
        return Load(float(self.batch), lengths_at(self.context))

    @property
    def key(self) -> tuple[object, ...]:
        """What tells its answers from those of others, whoever gives them."""
        return (*self.effects_key, self.metric)

    @property
    def effects_key(self) -> tuple[object, ...]:
        """What effects depend on: they hold the gains of every metric."""
        return (*self._engine_key, self.batch, self.context)

    def sweep_key(self, axis: str) -> tuple[object, ...]:
        """What a sweep depends on: the points of it, whichever of them is the chosen one."""
        points = self.over(axis)
        return (*self._engine_key, *((point.batch, point.context) for point in points))

    @property
    def _engine_key(self) -> tuple[object, ...]:
        engine = (self.model_name, self.device_name, self.tp, self.profile, self.techniques)
        return (*engine, self.task, self.weights, self.kv)

    def at(self, *, batch: int | None = None, context: int | None = None) -> EngineChoice:
        """The same engine elsewhere."""
        return replace(self, batch=batch or self.batch, context=context or self.context)

    def having(self, techniques: Sequence[str]) -> EngineChoice:
        """The same with an engine that has these techniques."""
        return replace(self, techniques=tuple(techniques))

    def over(self, axis: str) -> list[EngineChoice]:
        """The points of a sweep over `batch` or `ctx`; on a calibrated machine every other one and this one."""
        xs = list(BATCHES) if axis == "batch" else contexts_of(self.model)
        if self.device.calibration is not None:
            xs = sorted({*xs[::EVERY_OTHER], self.batch if axis == "batch" else self.context})
        return [self.at(batch=x) if axis == "batch" else self.at(context=x) for x in xs]


@cache
def _sample() -> Lengths:
    arrivals = {"kind": "closed_loop", "concurrency": 1}
    return Lengths.of(Workload.model_validate({"arrivals": arrivals, **WORKLOAD}))


@cache
def lengths_at(context: int) -> Lengths:
    """Prompts and outputs with which a decode step attends to so many tokens on average."""
    return _sample().at_context(context)


def contexts_of(model: ModelSpec) -> list[int]:
    """The contexts at which prompt and output are within what the model was made for."""
    return [context for context in CONTEXTS if _within(model, context)] or [CONTEXTS[0]]


def _within(model: ModelSpec, context: int) -> bool:
    try:
        check_context(model, lengths_at(context))
    except MemboundError:
        return False
    return True


# --- the questions ---


def effects_of(choice: EngineChoice, names: Iterable[str], fixed: bool = False) -> dict[str, Effect]:
    """Each technique alone on the engine; with `fixed` drafts are as long as they usually are, else the best."""
    bench, engine = Bench(choice.load), choice.scenario
    found = {}
    for name in names:
        technique = choice.technique(name)
        if fixed and isinstance(technique, Speculative):
            technique = technique.sized(technique.usual_size)
        found[name] = bench.effect(engine, technique)
    return found


def swept(points: Sequence[EngineChoice], names: Sequence[str], fixed: bool) -> list[dict[str, Effect]]:
    """The same at each point."""
    return [effects_of(point, names, fixed) for point in points]


def stacked(choice: EngineChoice, names: Sequence[str]) -> dict[str, Any]:
    """The techniques together, by closed forms."""
    techniques = [choice.technique(name) for name in names]
    return stack_document(choice.scenario, techniques, batch=choice.batch, context=choice.context, metric=choice.metric)


def advised(choice: EngineChoice) -> dict[str, Any]:
    """What `membound advise` says of single moves, with what binds a step after each, its interval and its devices."""
    advice = advise(choice.scenario, batch=choice.batch, context=choice.context, metric=choice.metric, pairs=False)
    document = to_json(advice)
    for move, said in zip(advice.moves, document["moves"], strict=True):
        wider = move.after is not None and move.move.after is not None and move.move.name == "tensor_parallel"
        ends = (move.move.before, move.move.after) if wider else ()
        said["devices"] = [end.parallel.devices for end in ends if end is not None] or None
        said["shares_after"] = None if move.after is None else move.after.shares
        said["error"] = None if move.gain is None or move.high is None else move.high / move.gain - 1
    return document


def not_to_combine(choice: EngineChoice) -> list[dict[str, Any]]:
    """What `membound advise` says of pairs of moves, which takes longer than all that it says of single ones."""
    advice = advise(choice.scenario, batch=choice.batch, context=choice.context, metric=choice.metric)
    pairs: list[dict[str, Any]] = to_json(advice)["do_not_combine"]
    return pairs
