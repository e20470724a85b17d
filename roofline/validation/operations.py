"""Which single operations, a decode step or a prefill, does an end-to-end table time?

Some rows give such a time, some imply it: a batch without prompts has the rate of its decode steps, and the rate of a
whole run less the time of its first token is that of the others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.serving import Deployment
from membound.roofline.shape import StepShape
from membound.roofline.times.engines import get_profile
from membound.roofline.validation.report import NOT_JUDGED
from membound.roofline.validation.step_cases import StepCase, case_of
from membound.roofline.validation.tables import Row, read_table

Phase = Literal["decode", "prefill"]

# The same chip and memory under a lower power cap: as fast where bandwidth binds, which is all it is used for.
_SAME_BANDWIDTH = {"A100-SXM4-80GB-330W": "A100-SXM4-80GB"}
# How far the work of a measurement may be from that of the operation that it is taken for.
SAME_WORK = 0.05
# Below this a prompt is as good as a decode step, so that the whole batch's rate is that of decoding.
_NO_PROMPT = 8.0
# With fewer prompts than this a step the median step has none, and the median inter-token latency is a decode step's.
_MEDIAN_IS_DECODE = 1.0 / 3.0


@dataclass(frozen=True)
class Operation:
    """A decode step of `batch` sequences with `tokens` of context, or the prefill of `batch` prompts of `tokens`."""

    deployment: Deployment
    phase: Phase
    batch: float
    tokens: float

    @cached_property
    def ms(self) -> float:
        """membound's prediction."""
        run = self.deployment.decode_s if self.phase == "decode" else self.deployment.prefill_s
        return 1e3 * run(self.batch, self.tokens)

    @cached_property
    def work(self) -> float:
        """What binds the phase: bytes that a decode step moves, FLOPs of a prefill."""
        if self.phase == "decode":
            return float(self.deployment.step(StepShape.decode(self.batch, self.tokens)).bytes)
        return float(self.deployment.step(StepShape.prefill(self.batch, self.tokens)).flops)

    @property
    def place(self) -> tuple[object, ...]:
        """Where it runs: operations in different places are never the same case. Layers count, the vocabulary not."""
        plan, parallel = self.deployment.setup.precision, self.deployment.setup.parallel
        model, cache = self.deployment.model, plan.kv.width if self.phase == "decode" else None
        widths = (plan.weights.width, plan.activations.width, cache)
        return (self.deployment.hardware.name, self.phase, model.hidden, model.groups(), widths, parallel)

    def resembles(self, other: Operation) -> bool:
        return (
            self.place == other.place
            and abs(self.batch / other.batch - 1.0) < SAME_WORK
            and abs(self.work / other.work - 1.0) < SAME_WORK
        )

    def distance(self, other: Operation) -> float:
        return abs(math.log(self.tokens / other.tokens))


@dataclass(frozen=True)
class Measurement:
    """A published time of an operation, with the profile of the engine that ran it."""

    row: Row
    operation: Operation
    profile: str
    ms: float

    @property
    def source(self) -> tuple[str, str, str]:
        return self.row.text("source"), self.row.text("engine"), self.row.text("engine_version")

    @property
    def launches(self) -> bool:
        """Whether the engine launches every kernel from the host, which bounds its decode and no peer models."""
        return not get_profile(self.profile).graphs


def read_measurements(path: Path, places: Iterable[Operation]) -> list[Measurement]:
    """Times of single operations that an end-to-end table holds for devices and models of `places`.

    Flagged rows, trust C, and what the bare roofs do not allow are left out, and so is what a source repeats.
    """
    table = read_table(path)
    if table.schema != "end_to_end":
        raise MemboundError(f"table '{path}' is of operators; peers predict whole steps")
    wanted = {(place.deployment.hardware.name, place.deployment.model.hidden) for place in places}
    runs: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    usable: list[Row] = []
    for row in table.rows:
        if set(row.text("flags").split(";")) & set(NOT_JUDGED) or row.text("trust") == "C":
            continue
        usable.append(row)
        runs[_run(row)][row.text("metric")] = row.measured
    found: dict[tuple[object, ...], Measurement] = {}
    for row in usable:
        try:
            hardware, model = _same_bandwidth(get_hardware(row.text("gpu"))), get_model(row.text("model"))
            if (hardware.name, model.hidden) not in wanted:
                continue
            case = case_of(row)
            measurement = _measurement(case, model, hardware, runs[_run(row)])
        except MemboundError:
            continue
        if measurement is not None and case.is_possible():
            found.setdefault((row.text("source"), *measurement.operation.place, row.measured), measurement)
    return list(found.values())


def _same_bandwidth(hardware: HardwareSpec) -> HardwareSpec:
    return get_hardware(_SAME_BANDWIDTH.get(hardware.name, hardware.name))


_RUN = (
    "source",
    "engine",
    "engine_version",
    "gpu",
    "model",
    "weight_dtype",
    "act_dtype",
    "kv_dtype",
    "tp",
    "technique",
)
_LOAD = ("batch_or_concurrency", "input_len", "output_len")


def _run(row: Row) -> tuple[str, ...]:
    return tuple(row.text(column) for column in (*_RUN, *_LOAD))


def _measurement(case: StepCase, model: ModelSpec, hardware: HardwareSpec, run: dict[str, float]) -> Measurement | None:
    """The row as the time of a single operation; None where it mixes several or speculates."""
    row, technique = case.row, case.row.text("technique").lower()
    if case.replicas > 1.0 or re.search(r"specul|window|offload|sparse", technique):
        return None
    found = _prefill_ms(case) or _decode_ms(case, run)
    if found is None:
        return None
    phase, tokens, ms = found
    if hardware is not case.deployment.hardware and phase == "prefill":
        return None
    setup = replace(case.deployment.setup, profile="graphs", policy="static")
    operation = Operation(Deployment(model, hardware, setup), phase, case.batch, tokens)
    return Measurement(row, operation, case.deployment.setup.profile, ms)


def _prefill_ms(case: StepCase) -> tuple[Phase, float, float] | None:
    value = case.row.measured
    if case.metric == "prefill_ms" or (case.metric == "ttft_ms" and case.batch == 1.0 and not case.steady):
        return "prefill", case.prompt_tokens, value
    if case.metric == "prefill_tok_s_total":
        return "prefill", case.prompt_tokens, 1e3 * case.batch * case.prompt_tokens / value
    return None


def _decode_ms(case: StepCase, run: dict[str, float]) -> tuple[Phase, float, float] | None:
    """A whole batch's rate is that of decoding where its prompts are short, or once its first token's time is known."""
    value, context = case.row.measured, case.prompt_tokens + (case.output_tokens + 1.0) / 2.0
    if case.metric == "tpot_ms":
        few_prompts = "itl_median" in case.flags and case.batch / case.output_tokens < _MEDIAN_IS_DECODE
        return ("decode", context, value) if few_prompts or not case.steady else None
    if case.steady or ("includes_prefill" in case.flags and case.metric != "throughput_tok_s_total"):
        return None
    if case.metric == "decode_tok_s_per_user":
        return "decode", context, 1e3 / value
    if case.metric == "decode_tok_s_total":
        return "decode", context, 1e3 * case.batch / value
    if case.metric == "throughput_tok_s_total" and case.prompt_tokens <= _NO_PROMPT:
        return "decode", context, 1e3 * case.batch / value
    if case.metric == "throughput_tok_s_total" and case.batch == 1.0 and "ttft_ms" in run and case.output_tokens > 1.0:
        return "decode", context, (1e3 * case.output_tokens / value - run["ttft_ms"]) / (case.output_tokens - 1.0)
    return None
