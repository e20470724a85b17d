"""How fast is a scenario under a steady load? By closed forms, in milliseconds, for stacks, advice and plans.

The load is a closed loop of clients whose requests have the workload's mean lengths. Queues, bursts and tail latencies
are left to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from membound.roofline.cost import StepCost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.remedies import remedies
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import ClosedLoop
from membound.roofline.serving import StaticBatch, SteadyLoad
from membound.roofline.shape import StepShape
from membound.simulator.busiest import BusiestPart, busiest_of, requests_seen
from membound.simulator.deployment import SpeculatingDeployment, check_context, deployment_of
from membound.simulator.load import Lengths, Load, arrival_rate, think_s


def refuse_what_only_runs_show(scenario: Scenario) -> None:
    """Raises MemboundError if the scenario names something that the closed forms of one engine would ignore."""
    if scenario.engine.prefix_caching:
        raise MemboundError(
            "only a simulation knows what a prefix cache saves; use --simulate, or leave --closed-form out"
        )
    if scenario.cluster is not None:
        raise MemboundError(
            "field 'cluster' names replicas, and closed forms are of one engine; use a simulation, or remove it and "
            "give one engine's share of the load"
        )


@dataclass(frozen=True)
class Steady:
    """A deployment under a load, with static or continuous batching as its set-up says."""

    deployment: SpeculatingDeployment
    load: Load

    @cached_property
    def lengths(self) -> Lengths:
        """Those of the requests that are served: where long prompts are not cut, some may be too long for a step."""
        cuts = self.deployment.batching.cuts_long_prompts
        return self.load.lengths if cuts else self.load.lengths.within(self.deployment.chunk_tokens)

    def check_steps(self) -> None:
        """Raises MemboundError where every request is too long for a step that holds it whole."""
        batching, shortest = self.deployment.batching, self.load.lengths.shortest
        if not batching.cuts_long_prompts and shortest > self.deployment.chunk_tokens:
            raise MemboundError(
                f"{shortest:.0f} tokens exceed max_batched_tokens ({self.deployment.chunk_tokens}), and "
                f"{batching.name} batching computes a prompt in one step; raise engine.max_batched_tokens, or set "
                "engine.batching to chunked_prefill"
            )

    def check(self) -> None:
        """Raises MemboundError where every request is too long for a step, or not even one sequence fits."""
        self.check_steps()
        context, model = self._whole_context, self.deployment.model
        if self.deployment.largest_batch(context) >= 1.0:
            return
        deployment, memory = self.deployment, self.deployment.hardware.memory_bytes
        held, room = deployment.footprint.weights_bytes / 2**30, deployment.footprint.usable_bytes(memory)
        advice = remedies(model, deployment.setup, memory, lambda held: held.sequence_bytes(context), deployment.limits)
        raise MemboundError(
            f"'{self.deployment.model.name}' does not fit on '{self.deployment.hardware.name}': its weights take "
            f"{held:.1f} GiB of the {room / 2**30:.1f} GiB that weights and caches may take of its "
            f"{memory / 2**30:.1f} GiB, and one sequence needs {context:.0f} tokens of cache beside them{advice}"
        )

    @property
    def _whole_context(self) -> float:
        return self.lengths.prompt_tokens + self.lengths.output_tokens

    @property
    def is_static(self) -> bool:
        return self.deployment.setup.policy == "static"

    @cached_property
    def _continuous(self) -> SteadyLoad:
        lengths = self.lengths
        load = SteadyLoad(self.deployment, self.load.concurrency, lengths.prompt_tokens, lengths.output_tokens)
        load = replace(load, in_groups=self._in_groups)
        return replace(load, first_s=self._first_s(load))

    @property
    def _in_groups(self) -> float:
        """The share of requests that end with those that they began with, and so stay in groups."""
        in_step = self.load.amid_steps == 0.0 and self.deployment.speculation is None
        return self.lengths.end_together if in_step else 0.0

    def _first_s(self, load: SteadyLoad) -> float:
        """Seconds of others' prompts that are computed before a request's first token.

        A request takes the place of one that ended, and joins the next step with those of the others that ended in the
        same one: of `batch - 1` who end once in an output's steps. Who began together and has as many tokens to write
        ends together again, so that such requests stay in groups.
        """
        deployment, others = self.deployment, load.batch - 1.0
        if others <= 0.0:
            return 0.0
        same = self._in_groups
        mixed_s = others / max(load.output_tokens / deployment.tokens_per_step, 1.0) * load.prompt_s
        own_s = deployment.joined_s(load.batch, self.lengths.context) + load.prompt_s
        return same * max(0.0, self._group_s(load.batch) - own_s) + (1.0 - same) * mixed_s

    def _group_s(self, batch: float) -> float:
        """Mean seconds to the first tokens of a group: as many as a step holds beside the others' tokens, or where
        prompts come first all clients, a step of them after the other."""
        deployment, prompt = self.deployment, self.lengths.prompt_tokens
        group = min(batch, deployment.at_once(prompt))
        if deployment.batching.prompts_alone:
            return self._mean_wait_s(batch)
        filling_s = deployment.filling_s(group, prompt) if group == batch else 0.0
        return filling_s + deployment.group_s(batch - group, group, prompt, self.lengths.context)

    @cached_property
    def batch(self) -> float:
        """Sequences that decode together: as many of the clients' as fit."""
        return self._continuous.batch

    @cached_property
    def _static_s(self) -> float:
        """Seconds of a static batch until its longest output ends; whoever is done early leaves a seat empty."""
        lengths = self.lengths
        longest = lengths.longest_output_of(self.batch)
        alive = max(1.0, self.batch * lengths.output_tokens / longest)
        prefill_s = self.deployment.prefill_s(self.batch, lengths.prompt_tokens)
        return prefill_s + max(longest - 1.0, 0.0) * self.deployment.decode_s(alive, lengths.context)

    @cached_property
    def tpot_s(self) -> float:
        """Mean seconds a token after the first."""
        if not self.is_static:
            return self._continuous.tpot_s
        lengths = self.lengths
        batch = StaticBatch(self.deployment, self.batch, lengths.prompt_tokens, lengths.output_tokens)
        waiting_s = batch.prefill_s - self._mean_wait_s(self.batch)  # for the batch's other prompts, after the own one
        return batch.tpot_s + waiting_s / max(lengths.output_tokens - 1.0, 1.0)

    @property
    def ttft_s(self) -> float:
        """Mean seconds to the first token; a static batch's clients wait for the batch before.

        Who comes while a step is under way waits for its end, half of it on average. Of those who are there when a run
        begins each waits for half of the others' steps.
        """
        if not self.is_static:
            steady_s = self._continuous.ttft_s + self.load.amid_steps * self.step_s / 2.0
            return steady_s + self.load.at_once * max(0.0, self._mean_wait_s(self.batch) - steady_s)
        waiting_s = (self.load.concurrency / self.batch - 1.0) * self._static_s
        return self._mean_wait_s(self.batch) + waiting_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step that decodes, with the prompts in it."""
        return self.tpot_s * self.deployment.tokens_per_step

    def _mean_wait_s(self, batch: float) -> float:
        """Mean seconds to a first token where all of a batch arrive at once, and a step computes what it holds."""
        deployment, prompt = self.deployment, self.lengths.prompt_tokens
        together = min(batch, deployment.at_once(prompt))
        filling_s, all_s = deployment.filling_s(batch, prompt), deployment.prefill_s(batch, prompt)
        groups, rest = divmod(batch, together)
        full_s = deployment.prefill_s(groups * together, prompt) - filling_s
        return filling_s + (together * full_s * (groups + 1.0) / 2.0 + rest * (all_s - filling_s)) / batch

    @property
    def output_tokens_per_s(self) -> float:
        if not self.is_static:
            return self._continuous.output_tokens_per_s
        return self.batch * self.lengths.output_tokens / self._static_s

    @property
    def requests_per_s(self) -> float:
        return self.output_tokens_per_s / self.lengths.output_tokens

    @property
    def prompt_share(self) -> float:
        """The share of the engine's time that prompts take."""
        if self.is_static:
            return self.deployment.prefill_s(self.batch, self.lengths.prompt_tokens) / self._static_s
        prompts_s = self.batch * self._continuous.prompt_s
        return prompts_s / (prompts_s + self.lengths.output_tokens * self._continuous.decode_s)

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each bound in the engine's time, prompts and decode steps together, as a run counts them."""
        prompts, steps = self._prompt_bounds, self.decode_shares
        part = self.prompt_share
        # what a prompt's step takes over from a decode step, such as its weights, is no longer there
        mixed = {
            bound: max(0.0, part * prompts.get(bound, 0.0) + (1.0 - part) * share) for bound, share in steps.items()
        }
        whole = sum(mixed.values())
        return {bound: share / whole for bound, share in mixed.items()}

    @property
    def relative_error(self) -> float:
        """How far off the time of its decode steps may be."""
        return float(self.deployment.verify_cost(max(self.batch, 1.0), self.lengths.context).relative_error)

    @property
    def decode_shares(self) -> dict[str, float]:
        """The share of each bound in a decode step."""
        return self.deployment.shares(self.batch, self.lengths.context)

    @property
    def _prompt_bounds(self) -> dict[str, float]:
        """How the time that prompts take divides over the bounds; of steps that they share with decodes what they add,
        which is below 0 for a bound that they lift."""
        deployment, lengths = self.deployment, self.lengths
        chunk = min(lengths.prompt_tokens, float(deployment.chunk_tokens))
        # static batches compute as many prompts in a step as it holds, others as many as end meanwhile
        waiting = self.batch if self.is_static else self.batch / max(lengths.output_tokens, 1.0)
        together = min(max(waiting, 1.0), deployment.at_once(lengths.prompt_tokens))
        prompts = StepShape.prefill(together, chunk, (lengths.prompt_tokens - chunk) / 2.0)
        if deployment.batching.prompts_alone:
            return _seconds(deployment.step(prompts), None)
        others = StepShape.decode(max(self.batch - 1.0, 1e-3), lengths.context)
        return _seconds(deployment.step(others + prompts), deployment.step(others))

    @property
    def bottleneck(self) -> str:
        """The bound with the largest share."""
        return max(self.shares, key=self.shares.__getitem__)


def _seconds(cost: StepCost, less: StepCost | None) -> dict[str, float]:
    """Each bound's share of a step's time, of what it takes beyond another step where one is given."""
    whole_s, shares = float(cost.time_s), cost.shares()
    seconds = {bound: float(shares[bound]) * whole_s for bound in BOUNDS}
    if less is not None:
        other_s, other = float(less.time_s), less.shares()
        if whole_s > other_s:
            seconds = {bound: seconds[bound] - float(other[bound]) * other_s for bound in BOUNDS}
            whole_s -= other_s
    return {bound: value / whole_s for bound, value in seconds.items()}


def load_of(scenario: Scenario, deployment: SpeculatingDeployment, *, at_busiest: bool = False) -> Load:
    """The load that the scenario's workload puts on a deployment, on average or in the busiest part of its arrivals.

    Of an open workload it is the concurrency n at which as many requests end as arrive (Little's law), and that of all
    seats where more arrive than can be served. Of a closed loop of N clients who think for Z seconds it is
    n = N - X(n) Z with the rate X(n) that n requests under way reach: who is not served thinks.
    """
    workload = scenario.workload
    part = busiest_of(workload, requests_seen(workload)) if at_busiest else None
    if part is not None:
        workload = workload.model_copy(update={"arrivals": part.arrivals})
    lengths = Lengths.of(workload)
    check_context(deployment.model, lengths)
    seats, arrivals = float(scenario.seats), workload.arrivals

    def served(concurrency: float) -> float:
        return Steady(deployment, Load(concurrency, lengths, amid_steps=1.0)).requests_per_s

    if isinstance(arrivals, ClosedLoop):
        clients, pause_s = float(arrivals.concurrency), think_s(workload)
        if not pause_s:
            requests = workload.requests
            return Load(clients, lengths, at_once=min(1.0, clients / requests) if requests else 0.0)
        under_way = _crossing(lambda n: n + served(n) * pause_s - clients, clients)
        return Load(under_way, lengths, amid_steps=1.0 - math.exp(-under_way))
    mean = arrival_rate(scenario.workload)
    assert mean is not None, "an open workload has a rate"
    rate, busiest = (mean, None) if part is None else (part.rate_rps, _busiest_said(part, mean))
    if (most := served(seats)) <= rate:
        return Load(seats, lengths, rate - most, busiest, amid_steps=1.0)
    concurrency = _crossing(lambda n: served(n) - rate, seats)
    under_way = rate / served(1.0) if concurrency <= 1.0 else concurrency
    return Load(concurrency, lengths, busiest=busiest, amid_steps=1.0 - math.exp(-under_way))


def _busiest_said(part: BusiestPart, mean: float) -> str:
    return f"{part.rate_rps:.3g} requests/s {part.when}, where the mean is {mean:.3g}"


def _crossing(over: Callable[[float], float], most: float) -> float:
    """Requests under way from 1 to `most` from which on a function that rises with them is not below 0."""
    low, high = 1.0, most
    if over(low) >= 0:
        return low
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) >= 0 else (middle, high)
    return high


class UsualStep(NamedTuple):
    """A step to look at where nobody says which: sequences, tokens of each, and whose they are."""

    batch: int
    context: int
    whose: str


def usual_step(scenario: Scenario, phase: str = "decode") -> UsualStep:
    """The step that a scenario's own load makes usual: as many sequences as arrive, and as memory and seats hold.

    In prefill it is one prompt; and one request where the engine cannot serve its load, or where it is a cluster's,
    whose replicas have parts of it.
    """
    lengths = Lengths.of(scenario.workload)
    if phase == "prefill":
        return UsualStep(1, max(1, round(lengths.prompt_tokens)), "one prompt of the scenario")
    try:
        return _loaded_step(scenario)
    except MemboundError:  # of a model that does not fit, say, which the step itself explains better
        return UsualStep(1, max(1, round(lengths.context)), "one request of the scenario")


def _loaded_step(scenario: Scenario) -> UsualStep:
    """Raises MemboundError where the engine cannot serve the load, or it is a cluster's."""
    if scenario.cluster is not None:
        raise MemboundError("field 'cluster' names replicas, each of which has a part of the load")
    deployment = deployment_of(scenario, resolve_model(scenario.model), get_hardware(scenario.hardware))
    load = load_of(scenario, deployment, at_busiest=True)
    steady = Steady(deployment, load)
    steady.check()
    return UsualStep(max(1, round(steady.batch)), max(1, round(load.lengths.context)), "the scenario's own load")
