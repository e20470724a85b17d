"""What does a scenario come to when prompts and outputs have engines of their own?

Source: Zhong et al., DistServe, OSDI 2024; Patel et al., Splitwise, ISCA 2024, for the transfer layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import simpy

from membound.roofline.errors import MemboundError
from membound.roofline.memory import kv_bytes
from membound.roofline.parallel import Parallelism
from membound.roofline.results.result import RunResult
from membound.roofline.scenario.engine import Disaggregation
from membound.simulator.inbox import Inbox, VirtualClock
from membound.simulator.run import Deployment, deploy, provenance
from membound.simulator.scheduling.build import bounds_of, build_scheduler, run_result
from membound.simulator.scheduling.client import Client, client_for
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.request import Request, Sequence

Enough = Callable[[Sequence], bool]


class _EnoughError(Exception):
    """Who asked has seen enough of the run."""


class _Engine:
    """One engine with what it is sent and what it has recorded."""

    def __init__(self, env: simpy.Environment, deployment: Deployment, recorder: Recorder, step_by_step: bool) -> None:
        d = deployment
        self.scheduler = build_scheduler(d.scenario, d.model, d.times, d.memory, d.content_known)
        self.recorder = recorder
        recorder.bounds = bounds_of(d.model, d.scenario.setup, d.times)
        self.inbox = Inbox(env, self.ended)
        waits = serve(self.scheduler, self.inbox, d.executor(step_by_step), VirtualClock(env), recorder)
        env.process(self.inbox.process(waits))  # type: ignore[arg-type]

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


class _Prefill(_Engine):
    """Computes prompts, and sends their KV caches over its link, one after the other."""

    def __init__(self, world: _World, deployment: Deployment) -> None:
        super().__init__(world.env, deployment, _Prompts(world.observer), world.step_by_step)
        self.world = world
        self.layers = deployment.model.layers
        self.link_free_s = 0.0
        self.link_busy_s = 0.0

    def ended(self, sequence: Sequence, now_s: float) -> None:
        world = self.world
        request = world.requests.pop(sequence.id)
        if sequence.status == "rejected" or request.output_tokens == 1:
            sequence.request = request
            if sequence.status != "rejected":
                Recorder.completed(self.recorder, sequence)
            world.ended(sequence, now_s)
            return
        engine = min(world.decode, key=lambda engine: engine.load)
        engine.inbox.put(_continued(sequence, request), self._transferred_s(sequence, now_s))

    def _transferred_s(self, sequence: Sequence, now_s: float) -> float:
        """When the KV cache of a prompt has crossed the link; until then it keeps its blocks here."""
        world = self.world
        transfer_s = world.transfer_s(sequence.request.prompt_tokens)
        assert sequence.admitted_s is not None, "what ended has begun"
        begun_s = max(self.link_free_s, sequence.admitted_s if world.settings.layerwise else now_s)
        end_s = begun_s + transfer_s
        if world.settings.layerwise:
            # The last layer leaves when it has been computed, whatever the link had time for before.
            end_s = max(end_s, now_s + transfer_s / self.layers)
        self.link_free_s = end_s
        self.link_busy_s += transfer_s
        pool = self.scheduler.pool
        if pool.cache is None:
            blocks = pool.blocks_for(sequence.request.prompt_tokens)
            pool.take(blocks)
            world.env.process(self._give_back(blocks, end_s))  # type: ignore[arg-type]
        return end_s + world.latency_s

    def _give_back(self, blocks: int, at_s: float) -> Iterator[simpy.Event]:
        yield self.world.env.timeout(at_s - self.world.env.now)
        self.scheduler.pool.give(blocks)
        self.inbox.wake(at_s)


class _Decode(_Engine):
    """Writes the outputs of prompts that were computed elsewhere."""

    def __init__(self, world: _World, deployment: Deployment) -> None:
        super().__init__(world.env, deployment, Recorder(world.observer), world.step_by_step)
        self.world = world

    def ended(self, sequence: Sequence, now_s: float) -> None:
        self.world.ended(sequence, now_s)


class _World:
    """Both pools, the router before them and the links between them."""

    def __init__(
        self,
        deployment: Deployment,
        pools: tuple[Deployment, Deployment],
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
        # Each device of the smaller engine has a partner, and sends or takes its share over a link of its own.
        self.partners = min(pools, key=lambda pool: pool.scenario.setup.parallel.devices).scenario.setup
        if link is None and settings.link_bytes_per_s is None:
            raise MemboundError(
                f"hardware '{deployment.times.hardware.name}' gives no scale_out link, over which KV caches would "
                "move; give engine.disaggregation.link_bytes_per_s"
            )
        self.latency_s = link.latency_s if link else 0.0
        self.link_bytes_per_s = settings.link_bytes_per_s or (
            link.bandwidth_bytes_per_s * self.partners.parallel.devices if link else 0.0
        )
        self.prefill = [_Prefill(self, pools[0]) for _ in range(settings.prefill_engines)]
        self.decode = [_Decode(self, pools[1]) for _ in range(settings.decode_engines)]
        self._news = self.env.event()
        self.env.process(self._route())  # type: ignore[arg-type]

    def transfer_s(self, tokens: int) -> float:
        """Seconds of a prompt's KV cache on an otherwise idle link."""
        of_device = float(kv_bytes(self.deployment.model, self.partners, float(tokens), 1.0))
        return of_device * self.partners.parallel.devices / self.link_bytes_per_s

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


def _continued(prompt: Sequence, request: Request) -> Sequence:
    """The sequence of `request` whose prompt was computed, and first token emitted, as `prompt`."""
    sequence = Sequence.continued(request, prompt.token_ids)
    sequence.preemptions = prompt.preemptions
    sequence.cached_tokens = prompt.cached_tokens
    sequence.admitted_s = prompt.admitted_s
    sequence.first_token_s = prompt.first_token_s
    sequence.last_token_s = prompt.last_token_s
    return sequence


def run_disaggregated(
    deployment: Deployment,
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


def _pool(deployment: Deployment, parallel: Parallelism | None) -> Deployment:
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

    link = sum(engine.link_busy_s for engine in world.prefill) / (len(world.prefill) * max(duration_s, 1e-300))
    return (
        f"prefill engines busy {busy(world.prefill):.0%} of the time, decode engines {busy(world.decode):.0%}, "
        f"links {link:.0%}"
    )
