"""How near are membound and its peers to published measurements, on exactly the same cases?

    python -m membound.roofline.validation.peers PEERS.csv MEASURED.csv

prints two Markdown tables: what each peer predicts beside membound, and both beside the measurement where there is one.
A measurement counts for a case when device, formats, parallelism and layers are the same, and when the step moves
bytes (decode) or does FLOPs (prefill) that differ by less than 5 %. membound knows nothing of the engine there: its
profile is `graphs`. What it predicts when it is told the engine stands in a column of its own.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from membound.roofline.engines import get_profile
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.precision_names import parse_plan
from membound.roofline.serving import Deployment
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.validation.report import NOT_JUDGED
from membound.roofline.validation.step_cases import StepCase, case_of
from membound.roofline.validation.tables import Row, read_table

Phase = Literal["decode", "prefill"]

COLUMNS = ("tool", "gpu", "model", "wdtype", "kvdtype", "tp", "batch", "input_len", "context_len", "phase", "value")
_GPUS = {"A100-80G-SXM": "A100-SXM4-80GB"}  # the peers' own spelling
_WEIGHTS = {"w4": "int4", "w8": "int8"}  # weight-only formats without a name for the scales
# The same chip and memory under a lower power cap: as fast where bandwidth binds, which is all it is used for.
_SAME_BANDWIDTH = {"A100-SXM4-80GB-330W": "A100-SXM4-80GB"}
# How far the work of a measurement may be from a case's, and predictions of two tools from each other to agree.
SAME_WORK, AGREEMENT = 0.05, 0.20
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
        widths = (plan.weights.width, plan.activations.width)
        widths += (plan.kv.width,) if self.phase == "decode" else ()
        model = self.deployment.model
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
class PeerPrediction:
    """What a tool predicts for an operation; `fits` is false where the tool itself says that memory does not suffice."""

    tool: str
    operation: Operation
    ms: float
    fits: bool


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


@dataclass(frozen=True)
class Comparison:
    """A peer's prediction, membound's, and the measurement of the same operation."""

    peer: PeerPrediction
    measurement: Measurement

    @property
    def kind(self) -> str:
        if self.peer.operation.phase == "prefill":
            return "prefill"
        return "decode, launched from the host" if self.measurement.launches else "decode"

    @property
    def peer_error(self) -> float:
        return self.peer.ms / self.measurement.ms - 1.0

    @property
    def error(self) -> float:
        """That of membound, which is not told the engine."""
        return self.peer.operation.ms / self.measurement.ms - 1.0

    @cached_property
    def told_error(self) -> float:
        """That of membound when it is told the engine."""
        operation = self.peer.operation
        setup = replace(operation.deployment.setup, profile=self.measurement.profile)
        told = replace(operation, deployment=replace(operation.deployment, setup=setup))
        return told.ms / self.measurement.ms - 1.0

    @property
    def membound_is_nearer(self) -> bool:
        """In ratio, so that half and double are equally far."""
        return abs(math.log1p(self.error)) < abs(math.log1p(self.peer_error))


@dataclass(frozen=True)
class Beside:
    """A tool's predictions beside membound's."""

    tool: str
    phase: Phase
    n: int
    median_ratio: float
    p10_ratio: float
    p90_ratio: float
    agreeing: float


@dataclass(frozen=True)
class Nearness:
    """Median absolute errors of a tool and of membound on the same cases, and in how many membound is nearer."""

    tool: str
    kind: str
    n: int
    sources: int
    peer_median: float
    median: float
    told_median: float
    nearer: int


def read_peers(path: Path) -> list[PeerPrediction]:
    """The predictions of a table of peers; raises MemboundError with one sentence for a file that is not one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise MemboundError(f"table '{path}' lacks the columns {', '.join(missing)} of peers' predictions")
            records = [(reader.line_num, record) for record in reader]
    except OSError as error:
        raise MemboundError(f"table '{path}' cannot be read: {error.strerror or error}") from None
    operations: dict[tuple[str, ...], Operation] = {}
    found = []
    for line, record in records:
        row = Row(line, {name: value or "" for name, value in record.items() if isinstance(name, str)}, 0.0)
        key = tuple(row.text(column) for column in COLUMNS[1:-1])
        if key not in operations:
            operations[key] = _operation(row)
        tool = row.text("tool").removesuffix("/OOM")
        found.append(PeerPrediction(tool, operations[key], row.count("value"), tool == row.text("tool")))
    return found


def _operation(row: Row) -> Operation:
    phase, weights = row.text("phase"), row.text("wdtype")
    if phase not in ("decode", "prefill"):
        raise MemboundError(f"line {row.line}: phase is '{phase}'; it must be decode or prefill")
    plan = parse_plan(_WEIGHTS.get(weights, weights), "", row.text("kvdtype"))
    setup = EngineSetup(precision=plan, parallel=Parallelism(tp=int(row.count("tp"))))
    hardware = get_hardware(_GPUS.get(row.text("gpu"), row.text("gpu")))
    tokens = row.count("context_len" if phase == "decode" else "input_len")
    # mypy does not narrow a str by membership in a tuple
    known: Phase = "decode" if phase == "decode" else "prefill"
    return Operation(Deployment(get_model(row.text("model")), hardware, setup), known, row.count("batch"), tokens)


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


def compare(peers: Sequence[PeerPrediction], measurements: Sequence[Measurement]) -> list[Comparison]:
    """Every prediction that has a measurement with it.

    For each tool a measurement serves one case and a case takes one measurement of a source: the nearest in length.
    """
    at: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        at[measurement.operation.place].append(measurement)
    pairs: list[Comparison] = []
    for peer in peers:
        candidates = at.get(peer.operation.place, ()) if peer.fits else ()
        pairs += [Comparison(peer, other) for other in candidates if peer.operation.resembles(other.operation)]
    pairs.sort(key=lambda pair: pair.peer.operation.distance(pair.measurement.operation))
    taken: set[tuple[object, ...]] = set()
    chosen = []
    for pair in pairs:
        formats = pair.peer.operation.deployment.setup.precision
        uses = {
            (pair.peer.tool, formats, "measurement", pair.measurement.row.line),
            (pair.peer.tool, "case", id(pair.peer.operation), pair.measurement.source),
        }
        if not uses & taken:
            taken |= uses
            chosen.append(pair)
    return chosen


def beside(peers: Sequence[PeerPrediction]) -> list[Beside]:
    """Every tool's predictions over membound's, by phase, where the tool says that the case fits."""
    groups: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    for peer in peers:
        if peer.fits:
            groups[(peer.tool, peer.operation.phase)].append(peer.ms / peer.operation.ms)
    found = []
    for (tool, phase), members in sorted(groups.items()):
        ratios = np.array(members)
        p10, median, p90 = (float(value) for value in np.quantile(ratios, (0.1, 0.5, 0.9)))
        agreeing = float(np.mean(np.abs(np.log(ratios)) < math.log1p(AGREEMENT)))
        found.append(Beside(tool, phase, len(ratios), median, p10, p90, agreeing))
    return found


def nearness(comparisons: Sequence[Comparison]) -> list[Nearness]:
    """Errors by tool and kind of operation, then over all tools."""
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for pair in comparisons:
        groups[(pair.peer.tool, pair.kind)].append(pair)
        groups[("~ all", pair.kind)].append(pair)
    found = []
    for (tool, kind), pairs in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        medians = [
            float(np.median(np.abs(errors)))
            for errors in zip(*((pair.peer_error, pair.error, pair.told_error) for pair in pairs), strict=True)
        ]
        sources = len({pair.measurement.source[0] for pair in pairs})
        found.append(
            Nearness(tool, kind, len(pairs), sources, *medians, sum(pair.membound_is_nearer for pair in pairs))
        )
    return found


def markdown(peers: Sequence[PeerPrediction], comparisons: Sequence[Comparison]) -> str:
    """Both tables."""
    lines = [
        "| peer | phase | cases | peer / membound, median | 10 % to 90 % | within 20 % |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {b.tool} | {b.phase} | {b.n} | {b.median_ratio:.2f} | {b.p10_ratio:.2f} to {b.p90_ratio:.2f} | {b.agreeing:.0%} |"
        for b in beside(peers)
    ]
    lines += [
        "",
        "| operation | peer | cases | sources | error of the peer | of membound | of membound, told the engine | membound nearer |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for n in nearness(comparisons):
        tool = "all of them" if n.tool == "~ all" else n.tool
        errors = " | ".join(f"{error:.1%}" for error in (n.peer_median, n.median, n.told_median))
        lines.append(f"| {n.kind} | {tool} | {n.n} | {n.sources} | {errors} | {n.nearer} of {n.n} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints the tables of the two files that the arguments name."""
    if len(arguments) != 2:
        sys.exit("give two files: python -m membound.roofline.validation.peers PEERS.csv MEASURED.csv")
    try:
        peers = read_peers(Path(arguments[0]))
        measurements = read_measurements(Path(arguments[1]), (peer.operation for peer in peers))
    except MemboundError as error:
        sys.exit(str(error))
    print(markdown(peers, compare(peers, measurements)))


if __name__ == "__main__":
    main(sys.argv[1:])
