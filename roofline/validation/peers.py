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
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.precision.names import parse_plan
from membound.roofline.serving import Deployment
from membound.roofline.techniques import EngineSetup
from membound.roofline.validation.operations import Measurement, Operation, Phase, read_measurements
from membound.roofline.validation.tables import MOST_DEVICES, Row

COLUMNS = ("tool", "gpu", "model", "wdtype", "kvdtype", "tp", "batch", "input_len", "context_len", "phase", "value")
_PHASES: dict[str, Phase] = {"decode": "decode", "prefill": "prefill"}
_GPUS = {"A100-80G-SXM": "A100-SXM4-80GB"}  # the peers' own spelling
_WEIGHTS = {"w4": "int4", "w8": "int8"}  # weight-only formats without a name for the scales
# How far predictions of two tools may be from each other to agree.
AGREEMENT = 0.20
ALL = "all of them"


@dataclass(frozen=True)
class PeerPrediction:
    """What a tool predicts for an operation; `fits` is false where the tool says that memory does not suffice."""

    tool: str
    operation: Operation
    ms: float
    fits: bool


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
    phase, weights = _PHASES.get(row.text("phase")), row.text("wdtype")
    if phase is None:
        raise MemboundError(f"line {row.line}: phase is '{row.text('phase')}'; it must be decode or prefill")
    plan = parse_plan(_WEIGHTS.get(weights, weights), "", row.text("kvdtype"))
    setup = EngineSetup(precision=plan, parallel=Parallelism(tp=int(row.size("tp", MOST_DEVICES))))
    hardware = get_hardware(_GPUS.get(row.text("gpu"), row.text("gpu")))
    tokens = row.count("context_len" if phase == "decode" else "input_len")
    return Operation(Deployment(get_model(row.text("model")), hardware, setup), phase, row.count("batch"), tokens)


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
        groups[(ALL, pair.kind)].append(pair)
    found = []
    for (tool, kind), pairs in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0] == ALL, item[0][0])):
        peer_median, median, told_median = (
            float(np.median(np.abs(errors)))
            for errors in zip(*((pair.peer_error, pair.error, pair.told_error) for pair in pairs), strict=True)
        )
        sources = len({pair.measurement.source[0] for pair in pairs})
        nearer = sum(pair.membound_is_nearer for pair in pairs)
        found.append(Nearness(tool, kind, len(pairs), sources, peer_median, median, told_median, nearer))
    return found


def markdown(peers: Sequence[PeerPrediction], comparisons: Sequence[Comparison]) -> str:
    """Both tables."""
    lines = [
        "| peer | phase | cases | peer / membound, median | 10 % to 90 % | within 20 % |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for b in beside(peers):
        ratios = f"{b.median_ratio:.2f} | {b.p10_ratio:.2f} to {b.p90_ratio:.2f}"
        lines.append(f"| {b.tool} | {b.phase} | {b.n} | {ratios} | {b.agreeing:.0%} |")
    columns = ("operation", "peer", "cases", "sources", "peer's error", "membound's", "told the engine", "nearer")
    lines += ["", f"| {' | '.join(columns)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for n in nearness(comparisons):
        errors = " | ".join(f"{error:.1%}" for error in (n.peer_median, n.median, n.told_median))
        lines.append(f"| {n.kind} | {n.tool} | {n.n} | {n.sources} | {errors} | {n.nearer} of {n.n} |")
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
