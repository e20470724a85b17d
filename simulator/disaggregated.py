"""How is a scenario simulated when prefill and decode have engines of their own?

Source: Zhong et al., DistServe, OSDI 2024; Patel et al., Splitwise, ISCA 2024, for the transfer layer by layer.

A prompt's KV cache is in memory at all times: it crosses the links once the engine for its output has taken blocks for
it, and keeps those where it was computed until it has crossed. A transfer layer by layer needs the blocks while the
prompt is computed, so that they are asked for as its first step begins; a whole one is pulled when it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import simpy

from membound.roofline.errors import MemboundError
from membound.roofline.memory import kv_bytes
from membound.roofline.parallel import Parallelism
from membound.roofline.results.result import RunResult
from membound.roofline.scenario.engine import Disaggregation
from membound.simulator.inbox import Inbox, VirtualClock
from membound.simulator.run import DeployedScenario, deploy, provenance
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.build import bounds_of, build_scheduler, run_result
from membound.simulator.scheduling.client import Client, client_for
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.prefix import Span, count_of
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step

Enough = Callable[[Sequence], bool]


class _EnoughError(Exception):
    """Who asked has seen enough of the run."""


class _Engine:
    """One engine with what it is sent and what it has recorded."""

    def __init__(
        self, env: simpy.Environment, deployment: DeployedScenario, recorder: Recorder, step_by_step: bool
    ) -> None:
        d = deployment
        self.scheduler = build_scheduler(d.scenario, d.model, d.times, d.memory, d.content_known)
        self.recorder = recorder
        recorder.bounds = bounds_of(d.model, d.scenario.setup, d.times)
        self.inbox = Inbox(env, self.ended, self.looks)
        self._executor = d.executor(step_by_step)
        waits = serve(self.scheduler, self.inbox, self, VirtualClock(env), recorder)
        env.process(self.inbox.process(waits))  # type: ignore[arg-type]

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        """Computes a step."""
        return self._executor.run(step, sequences)

    def looks(self, now_s: float) -> None:
        """It looks up between two steps."""

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """A sequence has left the engine."""
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Sequences that are here or on their way."""
        return self.scheduler.num_running + len(self.scheduler.waiting) + len(self.inbox)


class _Prompts(Recorder):
    """Records steps of an engine whose sequences go on elsewhere; only those that end here are requests."""

    def completed(self, sequence: Sequence) -> None:
        pass


@dataclass
class _Handover:
    """A prompt's KV cache that moves from one engine to the other as `sequence`, which goes on there."""

    sequence: Sequence
    source: _Prefill
    target: _Decode
    granted_s: float | None = None  # since when the target has blocks for it
    computed_s: float | None = None
    source_rank: int = 0
    own_blocks: int = 0  # that it has there, beside those of the prefix cache
    shared: list[Span] = field(default_factory=list)  # which are these

    def hold(self, prompt: Sequence, now_s: float) -> None:
        """`prompt` is computed; its blocks were just given back, and are taken again."""
        self.computed_s = now_s
        of, came = self.sequence, prompt.request
        of.token_ids, of.preemptions, of.cached_tokens = prompt.token_ids, prompt.preemptions, prompt.cached_tokens
        of.admitted_s, of.first_token_s, of.last_token_s = prompt.admitted_s, prompt.first_token_s, prompt.last_token_s
        self.source_rank = prompt.rank
        pool = self._pool
        prefix = came.prefix.spans(pool.block_size, came.prompt_tokens) if came.prefix else []
        blocks = pool.blocks_for(came.prompt_tokens)
        self.shared = pool.hold(blocks, prefix)
        self.own_blocks = blocks - count_of(self.shared)

    def give_back(self) -> None:
        """It has crossed."""
        self._pool.give(self.own_blocks)
        if self._pool.cache is not None:
            self._pool.cache.leave(self.shared)

    @property
    def _pool(self) -> BlockPool:
        return self.source.scheduler.pools[self.source_rank]


class _Prefill(_Engine):
    """Computes prompts, and sends their KV caches over its links, of each rank one after the other."""

    def __init__(self, world: _World, deployment: DeployedScenario) -> None:
        super().__init__(world.env, deployment, _Prompts(world.observer), world.step_by_step)
        self.world = world
        self.layers = deployment.model.layers
        self.link_free_s = [0.0] * deployment.memory.ranks
        self.link_busy_s = 0.0
        self._begun: dict[int, _Handover] = {}

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        if self.world.settings.layerwise:
            for id in step.admitted:
                if (request := self.world.requests[id]).output_tokens > 1:
                    self._begun[id] = self._asked(request)
        return super().run(step, sequences)

    def _asked(self, request: Request) -> _Handover:
        """Asks the engine for outputs that has least to do for blocks."""
        target = min(self.world.decode, key=lambda engine: engine.load)
        handover = _Handover(Sequence.continued(request, None), self, target)
        target.ask(handover)
        return handover

    def ended(self, sequence: Sequence, now_s: float) -> None:
        world = self.world
        request = world.requests.pop(sequence.id)
        if sequence.status == "rejected" or request.output_tokens == 1:
            sequence.request = request
            if sequence.status != "rejected":
                Recorder.completed(self.recorder, sequence)
            world.ended(sequence, now_s)
            return
        handover = self._begun.pop(sequence.id, None) or self._asked(request)
        handover.hold(sequence, now_s)
        if handover.granted_s is not None:
            self.send(handover)

    def send(self, handover: _Handover) -> None:
        """What is computed, and has blocks over there, crosses the links of both ranks.

        Each link is busy with it for as long as its own rate asks, first come first served, and the slower one says
        when it is there: a link does not wait for the other side, as it has other flows meanwhile.
        """
        world, target, sequence = self.world, handover.target, handover.sequence
        granted_s, computed_s, rank = handover.granted_s, handover.computed_s, handover.source_rank
        assert granted_s is not None and computed_s is not None, "it has blocks on both sides"
        out_s, in_s = world.transfer_s(sequence.request.prompt_tokens)
        begun_s = max(self.link_free_s[rank], granted_s)
        left_s = begun_s + out_s
        entered_s = max(target.link_free_s[sequence.rank], begun_s) + in_s
        if world.settings.layerwise:
            # The last layer leaves when it has been computed, whatever the links had time for before.
            left_s = max(left_s, computed_s + out_s / self.layers)
            entered_s = max(entered_s, computed_s + in_s / self.layers)
        self.link_free_s[rank], target.link_free_s[sequence.rank] = left_s, entered_s
        end_s = max(left_s, entered_s)
        self.link_busy_s += out_s
        world.env.process(self._give_back(handover, end_s))  # type: ignore[arg-type]
        target.receive(sequence, end_s + world.latency_s)

    def _give_back(self, handover: _Handover, at_s: float) -> Iterator[simpy.Event]:
        yield self.world.env.timeout(at_s - self.world.env.now)
        handover.give_back()
        self.inbox.wake(at_s)


class _Decode(_Engine):
    """Writes the outputs of prompts that were computed elsewhere."""

    def __init__(self, world: _World, deployment: DeployedScenario) -> None:
        super().__init__(world.env, deployment, Recorder(world.observer), world.step_by_step)
        self.world = world
        self.link_free_s = [0.0] * deployment.memory.ranks
        self._asking: deque[_Handover] = deque()
        self._coming = 0

    def ask(self, handover: _Handover) -> None:
        """A prompt waits for blocks, which it gets between two steps."""
        self._coming += 1
        self._asking.append(handover)
        self.inbox.wake(self.world.env.now)

    def looks(self, now_s: float) -> None:
        while self._asking and self.scheduler.reserve(self._asking[0].sequence):
            handover = self._asking.popleft()
            handover.granted_s = now_s
            if handover.computed_s is not None:
                handover.source.send(handover)

    def receive(self, sequence: Sequence, at_s: float) -> None:
        """The KV cache of a prompt is here from then on."""
        self._coming -= 1
        self.inbox.put(sequence, at_s)

    @property
    def load(self) -> int:
        return super().load + self._coming

    def ended(self, sequence: Sequence, now_s: float) -> None:
        self.world.ended(sequence, now_s)


class _World:
    """Both pools, the router before them and the links between them."""

    def __init__(
        self,
        deployment: DeployedScenario,
        pools: tuple[DeployedScenario, DeployedScenario],
        settings: Disaggregation,
        requests: Iterator[Request],
        observer: Observer | None,
        step_by_step: bool,
        enough: Enough | None,
    ) -> None:
        self.env = simpy.Environment()
        self.deployment = deployment
        self.settings = settings
        self.observer = observer
        self.step_by_step = step_by_step
        self.enough = enough
        self.requests: dict[int, Request] = {}
        self.client: Client = client_for(deployment.scenario.workload.arrivals, requests)
        link = deployment.times.hardware.scale_out
        # Each device of the smaller rank has a partner, and sends or takes its share over a link of its own.
        setups = [pool.scenario.setup for pool in pools]
        self.partners = min(setups, key=lambda setup: setup.parallel.devices_of_rank)
        if link is None and settings.link_bytes_per_s is None:
            raise MemboundError(
                f"hardware '{deployment.times.hardware.name}' gives no scale_out link, over which KV caches would "
                "move; give engine.disaggregation.link_bytes_per_s"
            )
        self.latency_s = link.latency_s if link else 0.0
        device_bytes_per_s, whole = link.bandwidth_bytes_per_s if link else 0.0, settings.link_bytes_per_s
        # Bytes that a rank sends in a second, and that one takes.
        self.links_bytes_per_s = [
            whole / of.dp if whole else device_bytes_per_s * of.devices_of_rank for of in (s.parallel for s in setups)
        ]
        self.prefill = [_Prefill(self, pools[0]) for _ in range(settings.prefill_engines)]
        self.decode = [_Decode(self, pools[1]) for _ in range(settings.decode_engines)]
        self._news = self.env.event()
        self.env.process(self._route())  # type: ignore[arg-type]

    def transfer_s(self, tokens: int) -> tuple[float, float]:
        """Seconds of a prompt's KV cache on the links of the rank that sends it, and of that which takes it."""
        of_device = float(kv_bytes(self.deployment.model, self.partners, float(tokens), 1.0))
        whole = of_device * self.partners.parallel.devices_of_rank
        out, into = self.links_bytes_per_s
        return whole / out, whole / into

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """A request was answered, or turned away: the client may send the next one."""
        if self.enough is not None and self.enough(sequence):
            raise _EnoughError
        self.client.ended(sequence, now_s)
        if not self._news.triggered:
            self._news.succeed()

    def _route(self) -> Iterator[simpy.Event]:
        """Each request goes to the prefill engine that has least to do."""
        env = self.env
        while True:
            for request in self.client.due(env.now):
                assert isinstance(request, Request), "clients send requests"
                engine = min(self.prefill, key=lambda engine: engine.load)
                self.requests[request.id] = request
                if self.decode[0].scheduler.refusal(request):
                    engine.inbox.put(request, env.now)  # refused there too, and recorded with the reason
                else:
                    engine.inbox.put(replace(request, output_tokens=1, follow_up=None), env.now)
            arrival_s = self.client.next_arrival_s()
            self._news = env.event()
            if arrival_s is None:
                yield self._news
            else:
                yield env.timeout(arrival_s - env.now) | self._news


def run_disaggregated(
    deployment: DeployedScenario,
    requests: Iterator[Request],
    observer: Observer | None,
    step_by_step: bool,
    enough: Enough | None = None,
) -> RunResult:
    """Serves a workload with pools of engines for prompts and for outputs.

    `enough` is told each request that ends; once it says so, the run ends there with what was recorded.
    """
    settings = deployment.scenario.engine.disaggregation
    assert settings is not None, "the scenario has two pools"
    pools = _pool(deployment, settings.prefill_parallel), _pool(deployment, settings.decode_parallel)
    world = _World(deployment, pools, settings, requests, observer, step_by_step, enough)
    engines: list[_Engine] = [*world.prefill, *world.decode]
    try:
        world.env.run()
    except _EnoughError:
        pass
    else:
        for engine in engines:
            engine.scheduler.check_integrity()
            assert not engine.scheduler.has_work and not len(engine.inbox), "a request was lost between the pools"
    recorder = Recorder.joined([engine.recorder for engine in engines])
    made = provenance(deployment, recorder.steps())
    made.notes.append(_rates(world, recorder.end_s))
    return run_result(
        deployment.scenario,
        deployment.model,
        deployment.times,
        pools[1].memory.num_blocks,
        recorder,
        made,
        devices=settings.devices(deployment.scenario.parallel),
    )


def _pool(deployment: DeployedScenario, parallel: Parallelism | None) -> DeployedScenario:
    """What the engines of a pool are made of, which may be divided over devices in a way of their own."""
    if parallel is None or parallel == deployment.scenario.parallel:
        return deployment
    divided = deployment.scenario.model_copy(update={"parallel": parallel})
    return deploy(divided, deployment.times.hardware)[0]


def _rates(world: _World, duration_s: float) -> str:
    """Whether the pools' rates match: the one that is always busy holds the other up."""

    def busy(engines: list[_Prefill] | list[_Decode]) -> float:
        spent = sum(float(engine.recorder.steps()["time_s"].sum()) for engine in engines)
        return spent / (len(engines) * duration_s) if duration_s else 0.0

    links = sum(len(engine.link_free_s) for engine in world.prefill)
    link = sum(engine.link_busy_s for engine in world.prefill) / (links * max(duration_s, 1e-300))
    return (
        f"prefill engines busy {busy(world.prefill):.0%} of the time, decode engines {busy(world.decode):.0%}, "
        f"links {link:.0%}"
    )
