"""What happened in a cluster, and how does it become a result?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from membound.roofline.results.cluster_summary import ClusterEvent, ClusterSummary, ReplicaSummary
from membound.roofline.results.metrics import prefix_hit_rate, summarize
from membound.roofline.results.result import Column, Provenance, RunResult, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario
from membound.simulator.cluster.replica import Replica, ReplicaRecorder
from membound.simulator.run import provenance

# Events that a summary lists at most.
MOST_EVENTS = 1000


@dataclass
class ClusterRecord:
    """The records of the replicas, and what happened between them; `unsent` ends what no replica took."""

    replicas: list[Replica]
    unsent: ReplicaRecorder = field(default_factory=ReplicaRecorder)
    arrived: int = 0
    retries: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    lost_tokens: int = 0
    lost_output_tokens: int = 0
    events: list[ClusterEvent] = field(default_factory=list)
    end_s: float = 0.0

    def recorders(self) -> dict[int, ReplicaRecorder]:
        """By the number of their replica."""
        return {-1: self.unsent} | {replica.number: replica.recorder for replica in self.replicas}


def cluster_result(scenario: Scenario, record: ClusterRecord) -> RunResult:
    """The result of a run of a cluster; asserts that every request that arrived ended once."""
    requests, steps, itl_s = _requests(record), _steps(record), Samples()
    ends = requests["completed"].astype(int) + requests["failed"]
    assert len(requests["id"]) == record.arrived, "a request was lost or ended twice"
    assert np.all(np.diff(requests["id"]) > 0) and ends.max(initial=0) <= 1, "a request ended twice"
    recorders = record.recorders()
    outputs: dict[int, list[int]] = {}
    for recorder in recorders.values():
        itl_s.extend(recorder.itl_s)
        outputs |= recorder.outputs
    duration_s = max(recorder.end_s for recorder in recorders.values())
    replicas = tuple(_of_replica(replica, record, requests, steps) for replica in record.replicas)
    cost_usd = _total([replica.cost_usd for replica in replicas])
    summary = summarize(
        requests,
        steps,
        itl_s,
        slo=scenario.slo,
        duration_s=duration_s,
        # Each replica waits when it has nothing to do while it is paid for, whether or not it could.
        idle_s=sum(_paid_s(replica, record) for replica in record.replicas) - float(steps["time_s"].sum()),
        num_blocks=1,
        block_size=scenario.engine.block_size,
        price_usd_per_h=None if cost_usd is None or not duration_s else cost_usd / duration_s * 3600,
    )
    summary = summary.model_copy(update={"kv_utilization": _kv_utilization(record, steps)})
    made = _provenance(record)
    return RunResult(
        scenario, summary, made, requests, steps, itl_s, outputs, _summary(scenario, record, replicas, summary)
    )


def _requests(record: ClusterRecord) -> dict[str, Column]:
    """All requests in order of their ids, with their replica, retries and whether they failed."""
    tables = []
    for number, recorder in record.recorders().items():
        table = recorder.requests()
        tables.append(table | {"replica": np.full(len(table["id"]), number)})
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    order = np.argsort(joined["id"], kind="stable")
    joined = {name: column[order] for name, column in joined.items()}
    ids = joined["id"]
    retries = np.zeros(len(ids), dtype=np.int64)
    retries[np.searchsorted(ids, list(record.retries))] = list(record.retries.values())
    failed = np.zeros(len(ids), dtype=bool)
    failed[np.searchsorted(ids, list(record.failed))] = True
    return joined | {"retries": retries, "failed": failed}


def _steps(record: ClusterRecord) -> dict[str, Column]:
    """The steps of all replicas in order of time, with their replica."""
    tables = []
    for replica in record.replicas:
        table = replica.recorder.steps()
        tables.append(table | {"replica": np.full(len(table["start_s"]), replica.number)})
    tables = [table for table in tables if len(table["start_s"])] or tables[:1]  # one without steps saw no windows
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    order = np.argsort(joined["start_s"], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _kv_utilization(record: ClusterRecord, steps: dict[str, Column]) -> float:
    """Blocks held of the blocks of each step's replica, mean over the time in steps."""
    blocks = np.array([replica.deployment.memory.num_blocks for replica in record.replicas])
    busy_s = float(steps["time_s"].sum())
    held = steps["time_s"] * steps["blocks_used"] / blocks[steps["replica"]]
    return float(held.sum()) / busy_s if busy_s else 0.0


def _paid_s(replica: Replica, record: ClusterRecord) -> float:
    return (record.end_s if replica.released_s is None else replica.released_s) - replica.paid_from_s


def _of_replica(
    replica: Replica, record: ClusterRecord, requests: dict[str, Column], steps: dict[str, Column]
) -> ReplicaSummary:
    mine, ran = requests["replica"] == replica.number, steps["replica"] == replica.number
    done = mine & requests["completed"]
    in_steps_s = float(steps["time_s"][ran].sum())
    held = float(np.sum(steps["time_s"][ran] * steps["blocks_used"][ran]))
    hardware = replica.deployment.times.hardware
    devices = replica.deployment.scenario.setup.parallel.devices
    up_s, busy_s = replica.up_s(record.end_s), replica.busy_s(record.end_s)
    device_hours = devices * _paid_s(replica, record) / 3600
    price = hardware.price
    return ReplicaSummary(
        replica=replica.number,
        group=replica.group,
        hardware=hardware.name,
        devices=devices,
        requests=int(mine.sum()),
        completed=int(done.sum()),
        output_tokens=int(requests["output_tokens"][done].sum()),
        up_s=up_s,
        busy_s=busy_s,
        utilization=busy_s / up_s if up_s else 0.0,
        kv_utilization=held / (in_steps_s * replica.deployment.memory.num_blocks) if in_steps_s else 0.0,
        prefix_hit_rate=prefix_hit_rate(requests, done),
        failures=replica.failures,
        device_hours=device_hours,
        price_usd_per_h=price.usd_per_h if price else None,
        price_date=str(price.date) if price else None,
        cost_usd=device_hours * price.usd_per_h if price else None,
    )


def _summary(
    scenario: Scenario, record: ClusterRecord, replicas: tuple[ReplicaSummary, ...], summary: Summary
) -> ClusterSummary:
    assert scenario.cluster is not None, "a cluster ran"
    paid_s = [_paid_s(replica, record) for replica in record.replicas]
    return ClusterSummary(
        router=scenario.cluster.router,
        replicas=replicas,
        most_replicas=_most(record.events),
        mean_replicas=sum(paid_s) / record.end_s if record.end_s else float(len(replicas)),
        failures=sum(replica.failures for replica in record.replicas),
        retries=record.retries.total(),
        lost_tokens=record.lost_tokens,
        lost_output_tokens=record.lost_output_tokens,
        device_hours=sum(replica.device_hours for replica in replicas),
        cost_usd=_total([replica.cost_usd for replica in replicas]),
        event_count=len(record.events),
        events=tuple(record.events[:MOST_EVENTS]),
    )


def _most(events: list[ClusterEvent]) -> int:
    """Replicas that were paid for at the same time at most."""
    changes = {"start": 1, "release": -1}
    return int(np.cumsum([changes.get(event.kind, 0) for event in events]).max(initial=0))


def _total(costs: list[float | None]) -> float | None:
    """None where one is not known."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def _provenance(record: ClusterRecord) -> Provenance:
    """Who made the numbers: the first group's hardware, and notes on each kind."""
    kinds = {replica.deployment.times.hardware.name: replica for replica in reversed(record.replicas)}
    made = [provenance(replica.deployment, replica.recorder.steps()) for replica in reversed(kinds.values())]
    notes = [note if len(made) == 1 else f"{one.hardware}: {note}" for one in made for note in one.notes]
    rejections: dict[int, str] = {}
    for recorder in record.recorders().values():
        rejections |= recorder.rejections
    if rejections:
        id, reason = next(iter(rejections.items()))
        notes.append(f"requests were turned away; request {id}, because {reason}")
    return made[0].model_copy(update={"hardware": ", ".join(one.hardware for one in made), "notes": notes})
