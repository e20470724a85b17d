"""How is a scenario simulated when replicas behind a router serve it?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import simpy

from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.results.cluster_summary import ClusterEvent, EventKind
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.cluster import Cluster, Failures, ReplicaGroup
from membound.simulator.cluster.autoscaler import Autoscaler
from membound.simulator.cluster.record import ClusterRecord, cluster_result
from membound.simulator.cluster.replica import Replica, ReplicaRecorder
from membound.simulator.cluster.router import router_for
from membound.simulator.run import DeployedScenario, deploy
from membound.simulator.scheduling.client import Client, client_for
from membound.simulator.scheduling.recorder import Observer
from membound.simulator.scheduling.request import Request, Sequence
from membound.simulator.scheduling.workload.streams import stream

DEFAULT_MOST_RETRIES = 5


class Group:
    """Equal replicas: what each is built of, and how many there should be."""

    def __init__(self, index: int, settings: ReplicaGroup, deployment: DeployedScenario) -> None:
        self.index = index
        self.settings = settings
        self.deployment = deployment
        self.replicas: list[Replica] = []
        self.scaler = Autoscaler(settings.autoscaling) if settings.autoscaling else None

    def of(self, *states: str) -> list[Replica]:
        """Its replicas in one of these states."""
        return [replica for replica in self.replicas if replica.state in states]


class ClusterRun:
    """The world of one run: requests come, the router sends them, replicas serve, come, go and fail.

    Each request that arrived ends once: completed, rejected or failed; `finished` happens with the last.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: list[DeployedScenario],
        requests: Iterator[Request],
        observer: Observer | None,
        step_by_step: bool,
    ) -> None:
        self.env = simpy.Environment()
        scenario = groups[0].scenario
        self.router = router_for(cluster, scenario.workload.seed, scenario.engine.block_size)
        self.failures = cluster.failures
        self.client: Client = client_for(scenario.workload.arrivals, requests)
        self.groups = [Group(i, s, d) for i, (s, d) in enumerate(zip(cluster.groups, groups, strict=True))]
        self.observer = observer
        self.step_by_step = step_by_step
        self.replicas: list[Replica] = []
        self.record = ClusterRecord(self.replicas)
        self.unsent: deque[Sequence] = deque()
        self.under_way = 0
        self.finished = self.env.event()
        self._news = self.env.event()
        self._next_s: float | None = None
        self._seed = scenario.workload.seed

    def run(self) -> ClusterRecord:
        """Serves every request."""
        for group in self.groups:
            for _ in range(group.settings.count):
                self._serves(self._start(group))
        for group in self.groups:
            if group.scaler is not None:
                self.env.process(self._scale(group, group.scaler))  # type: ignore[arg-type]
        for outage in self.failures.outages if self.failures else ():
            self.env.process(self._outage(self.replicas[outage.replica], outage.at_s, outage.for_s))  # type: ignore[arg-type]
        self.env.process(self._arrivals())  # type: ignore[arg-type]
        self.env.run(until=self.finished)
        for replica in self.replicas:
            replica.scheduler.check_integrity()
            assert not replica.unanswered and not replica.scheduler.has_work, "a request was lost in a replica"
        assert not self.unsent and not self.under_way, "a request was lost before a replica took it"
        self.record.end_s = float(self.env.now)
        return self.record

    # -- requests

    def dispatch(self, now_s: float) -> None:
        """Sends every request that has arrived by now to a replica."""
        for request in self.client.due(now_s):
            assert isinstance(request, Request), "clients send requests"
            self.record.arrived += 1
            self.under_way += 1
            self._send(request, now_s)

    def ended(self, replica: Replica, sequence: Sequence, now_s: float) -> None:
        """A request was answered, or refused, by a replica."""
        self._ended(sequence, now_s)
        if replica.state == "draining" and not replica.unanswered:
            self._release(replica)

    def _send(self, piece: Request | Sequence, now_s: float) -> None:
        """To a replica that the router chooses among those that can serve it; to wait where nobody takes requests."""
        request = piece.request if isinstance(piece, Sequence) else piece
        up = [replica for replica in self.replicas if replica.state == "up"]
        if len(self.groups) > 1:
            up = [replica for replica in up if not replica.refuses(request)] or up
        if up:
            up[self.router.choose(request, up)].put(piece, now_s)
            return
        sequence = piece if isinstance(piece, Sequence) else Sequence.of(piece)
        if any(replica.state in ("starting", "down") for replica in self.replicas) or any(
            group.scaler is not None for group in self.groups
        ):
            self.unsent.append(sequence)
        else:
            self._fail(sequence, self.record.unsent, now_s)

    def _ended(self, sequence: Sequence, now_s: float) -> None:
        self.under_way -= 1
        self.client.ended(sequence, now_s)
        if not self.under_way or self.client.next_arrival_s() != self._next_s:
            self._tell()

    def _fail(self, sequence: Sequence, recorder: ReplicaRecorder, now_s: float) -> None:
        sequence.status, sequence.reason = "failed", "its replica failed"
        recorder.failed(sequence)
        self.record.failed.add(sequence.id)
        self._ended(sequence, now_s)

    def _tell(self) -> None:
        if not self._news.triggered:
            self._news.succeed()

    def _arrivals(self) -> Iterator[simpy.Event]:
        """Looks up whenever a request is due, and ends the run after the last."""
        env = self.env
        while True:
            self.dispatch(env.now)
            self._next_s = arrival_s = self.client.next_arrival_s()
            if arrival_s is None and not self.under_way:
                self.finished.succeed()
                return
            self._news = env.event()
            if arrival_s is None:
                yield self._news
            else:
                yield env.timeout(max(0.0, arrival_s - env.now)) | self._news

    # -- replicas that come and go

    def _start(self, group: Group) -> Replica:
        number = len(self.replicas)
        replica = Replica(self.env, self, number, group.index, group.deployment, self.observer, self.step_by_step)
        self.replicas.append(replica)
        group.replicas.append(replica)
        self._note(replica, "start")
        return replica

    def _serves(self, replica: Replica) -> None:
        """`replica` takes requests: first of all those that nobody took."""
        now_s = float(self.env.now)
        replica.serves(now_s)
        self._note(replica, "up")
        for _ in range(len(self.unsent)):
            self._send(self.unsent.popleft(), now_s)
        if self.failures and self.failures.mtbf_s is not None:
            self.env.process(self._lifetime(replica, self.failures))  # type: ignore[arg-type]

    def _release(self, replica: Replica) -> None:
        replica.release(float(self.env.now))
        self._note(replica, "release")

    def _scale(self, group: Group, scaler: Autoscaler) -> Iterator[simpy.Event]:
        """Looks at a group at regular times."""
        while True:
            yield self.env.timeout(scaler.settings.interval_s)
            now_s = float(self.env.now)
            unanswered = sum(replica.unanswered for replica in group.replicas)
            busy_s = sum(replica.busy_s(now_s) for replica in group.replicas)
            fewest, most = scaler.wanted(now_s, unanswered, len(self.unsent), busy_s)
            serving = group.of("starting", "up")
            room = scaler.settings.max_replicas - len(serving) - len(group.of("down"))
            for _ in range(min(fewest - len(serving), room)):
                self.env.process(self._cold_start(self._start(group), scaler.settings.cold_start_s))  # type: ignore[arg-type]
            # Those that do not serve yet leave first, then those with least to do; of equal ones the youngest.
            serving.sort(key=lambda replica: (replica.state == "up", replica.unanswered_tokens, -replica.number))
            for replica in serving[: max(0, len(serving) - most)]:
                self._drain(replica)

    def _cold_start(self, replica: Replica, seconds: float) -> Iterator[simpy.Event]:
        if seconds:
            yield self.env.timeout(seconds)
        if replica.state == "starting":
            self._serves(replica)

    def _drain(self, replica: Replica) -> None:
        replica.drain()
        self._note(replica, "drain")
        if not replica.unanswered:
            self._release(replica)

    # -- replicas that fail

    def _outage(self, replica: Replica, at_s: float, for_s: float | None) -> Iterator[simpy.Event]:
        yield self.env.timeout(at_s)
        yield from self._goes_down(replica, for_s)

    def _lifetime(self, replica: Replica, settings: Failures) -> Iterator[simpy.Event]:
        """Works for a while, from now on, and is down for a while."""
        assert settings.mtbf_s is not None and settings.mttr_s is not None, "failures are random"
        rng = stream(self._seed, f"failure {replica.failures} of replica {replica.number}")
        yield self.env.timeout(rng.exponential(settings.mtbf_s))
        yield from self._goes_down(replica, rng.exponential(settings.mttr_s))

    def _goes_down(self, replica: Replica, for_s: float | None) -> Iterator[simpy.Event]:
        """`replica` fails, unless it was given back before, and its requests go elsewhere."""
        if replica.state not in ("up", "draining"):
            return
        now_s = float(self.env.now)
        leaves = for_s is None or replica.state == "draining"
        lost = replica.fail(now_s)
        self._note(replica, "failure")
        if leaves:
            self._release(replica)
        for sequence in lost:
            self._lost(replica, sequence, now_s)
        if for_s is not None and not leaves:
            yield self.env.timeout(for_s)
            self._serves(replica)

    def _lost(self, replica: Replica, sequence: Sequence, now_s: float) -> None:
        """What becomes of a request whose replica failed."""
        assert self.failures is not None, "something fails"
        record, most = self.record, self.failures.most_retries or DEFAULT_MOST_RETRIES
        record.lost_tokens += sequence.computed
        gives_up = self.failures.on_failure == "fail" or record.retries[sequence.id] >= most
        if not gives_up and self.failures.on_failure == "resume":
            again = _resumed(sequence)
        else:
            record.lost_output_tokens += sequence.emitted
            again = _begun_anew(sequence)
        if gives_up:
            self._fail(sequence, replica.recorder, now_s)
        else:
            record.retries[sequence.id] += 1
            self._send(again, now_s)

    def _note(self, replica: Replica, kind: EventKind) -> None:
        self.record.events.append(ClusterEvent(time_s=float(self.env.now), replica=replica.number, kind=kind))


def _begun_anew(lost: Sequence) -> Sequence:
    """The same request with nothing done, as its client would ask again."""
    sequence = Sequence.of(lost.request)
    sequence.preemptions = lost.preemptions
    return sequence


def _resumed(lost: Sequence) -> Sequence:
    """The same request after its emitted tokens, whose K and V must be computed again."""
    sequence = Sequence(lost.request, None if lost.token_ids is None else list(lost.token_ids))
    sequence.standing = lost.tokens
    sequence.preemptions = lost.preemptions
    sequence.cached_tokens = lost.cached_tokens
    sequence.admitted_s = lost.admitted_s
    sequence.first_token_s = lost.first_token_s
    sequence.last_token_s = lost.last_token_s
    return sequence


def scenario_of(scenario: Scenario, group: ReplicaGroup) -> Scenario:
    """What one replica of a group is alone."""
    changes = {"hardware": group.hardware, "parallel": group.parallel}
    alone = {name: value for name, value in changes.items() if value is not None}
    engine = scenario.engine.model_copy(update={"profile": group.profile} if group.profile else {})
    return scenario.model_copy(update=alone | {"engine": engine, "cluster": None})


def run_cluster(
    scenario: Scenario, hardware: HardwareSpec | None, observer: Observer | None, step_by_step: bool
) -> RunResult:
    """Serves a workload with the scenario's cluster; `hardware` stands in for the scenario's, not for a group's own."""
    cluster = scenario.cluster
    assert cluster is not None, "the scenario has a cluster"
    deployments, streams = [], []
    for group in cluster.groups:
        own = get_hardware(group.hardware) if group.hardware is not None else hardware
        deployment, requests = deploy(scenario_of(scenario, group), own)
        deployments.append(deployment)
        streams.append(requests)
    world = ClusterRun(cluster, deployments, streams[0], observer, step_by_step)
    return cluster_result(scenario, world.run())
