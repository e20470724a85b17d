"""Which deployments could serve a load, and how fast would each be? Thousands of them, by closed forms.

The step times of a replica are computed once over all its batches. Means and rough 99th percentiles at a given load
follow from these curves. The simulator has the last word on the few candidates that matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import Scenario, Slo
from membound.roofline.scenario.engine import BatchingName
from membound.roofline.techniques import ContinuousBatching
from membound.simulator.deployment import deployment_of
from membound.simulator.load import Lengths
from membound.simulator.planning.choices import FormatChoice, parallelisms, precisions
from membound.simulator.planning.demand import Demand

Values = NDArray[np.float64]

# Sequences that a replica decodes together at most; vLLM's own default for large devices is 1024.
MOST_SEATS = 1024
BATCHES = 24
# What engines of today do where nobody says; a prompt may then be longer than a step.
USUAL_BATCHING: BatchingName = "chunked_prefill"
RATES = 64
# Standard deviations to the 99th percentile of a count.
TAIL = 2.326


class Estimate(NamedTuple):
    """The latencies of a replica under a load: means and rough 99th percentiles, elementwise for arrays of loads."""

    load: Values
    batch: Values
    tpot_s: Values
    tpot_p99_s: Values
    ttft_s: Values
    ttft_p99_s: Values
    e2e_p99_s: Values
    requests_per_s: Values

    def meets(self, slo: Slo, *, tails: bool, slack: float = 1.0) -> NDArray[np.bool_]:
        """Whether every bound of the objective holds: for the 99th percentiles, or only for the means, a necessary
        condition."""
        ttft, tpot = (self.ttft_p99_s, self.tpot_p99_s) if tails else (self.ttft_s, self.tpot_s)
        good = np.isfinite(self.tpot_s)
        for value, bound in ((ttft, slo.ttft_s), (tpot, slo.tpot_s), (self.e2e_p99_s if tails else None, slo.e2e_s)):
            if bound is not None and value is not None:
                good &= value <= bound * slack
        return good


@dataclass(frozen=True)
class ReplicaCurves:
    """One engine on some devices in a precision, with its curves: for each of `batches`, the seconds of a decode step
    and the seconds that a prompt adds."""

    scenario: Scenario
    hardware: HardwareSpec
    precision: FormatChoice
    parallel: Parallelism
    lengths: Lengths
    batches: Values
    decode_s: Values
    prompt_s: Values

    @property
    def devices(self) -> int:
        return self.parallel.devices

    @property
    def seats(self) -> int:
        """Sequences that it can decode together."""
        return int(self.batches[-1])

    @cached_property
    def whole_request_s(self) -> Values:
        """Seconds from start to end of a request, at each batch, if a closed loop keeps the batch constant."""
        return self.lengths.output_tokens * self.decode_s + self.batches * self.prompt_s

    @property
    def most_rps(self) -> float:
        """Requests a second that it can serve at most."""
        return float(np.max(self.batches / self.whole_request_s))

    def at_rates(self, rates: Values) -> Estimate:
        """Latencies under Poisson arrivals. The batch is the one at which as many requests end as arrive.

        Each of the `rate` prompts a second takes its time from decoding, so that a step with what prompts add to it
        takes C = D / (1 - rate P) on average. A request that arrives waits for the end of a step (long steps are hit
        more often); then the prompts of all that arrived meanwhile share a step, and their first tokens come at its
        end. The batch and the prompts beside one's own vary as Poisson counts do; those that pass during an output as
        in a busy period (Borel), since each makes it longer. Where few seats are free first tokens wait for one.
        """
        n, rate = self.lengths.output_tokens, np.asarray(rates, dtype=np.float64)
        busy = rate[:, None] * self.prompt_s
        with np.errstate(divide="ignore", invalid="ignore"):
            token_s = np.where(busy < 1.0, self.decode_s / (1.0 - busy), np.inf)
        over = rate[:, None] * n * token_s - self.batches
        stable = np.any(over <= 0, axis=1)
        index = np.argmax(over <= 0, axis=1)
        batch = np.where(stable, self._crossing(over, index), np.inf)
        b = np.where(stable, np.maximum(batch, 1e-3), self.batches[-1])
        most = np.minimum(b + TAIL * np.sqrt(b), self.batches[-1])
        prompt = self._at(self.prompt_s, b)
        used = np.minimum(rate * prompt, 0.999)
        tpot = self._at(self.decode_s, b) / (1.0 - used)
        passing = rate * n * tpot
        tpot_p99 = self._at(self.decode_s, most) + (passing + TAIL * np.sqrt(passing) / (1.0 - used)) * prompt / n
        longest, moment = self._spread_of_prompts
        under_way = tpot + moment * prompt**2 * rate / (1.0 - used**2)
        waiting = (1.0 - np.exp(-b)) * (0.5 + used) * under_way
        seat, seat_p99 = self._waiting_for_a_seat(b, n * tpot)
        ttft = self._at(self.decode_s, b) + prompt + waiting + seat
        beside = rate * 2.0 * under_way
        own = self._at(self.decode_s, most) + (longest + beside + TAIL * np.sqrt(beside)) * prompt
        ttft_p99 = under_way + own + seat_p99
        e2e_p99 = ttft_p99 + self._longest_output * tpot_p99
        unstable = np.where(stable, 0.0, np.inf)
        return Estimate(
            rate,
            batch,
            tpot + unstable,
            tpot_p99 + unstable,
            ttft + unstable,
            ttft_p99 + unstable,
            e2e_p99 + unstable,
            np.where(stable, rate, 0.0),
        )

    def at_concurrency(self, clients: Values, think_s: float = 0.0) -> Estimate:
        """Latencies with clients in a closed loop, who think after each answer; clients without a seat wait for one.

        Of N clients, n have a request in flight and N - n = X(n) Z think, where X(n) is the rate at which n are
        served. The number in flight varies as if the clients were independent of each other.
        """
        clients = np.asarray(clients, dtype=np.float64)
        under_way = self._under_way(clients, think_s)
        b = np.minimum(under_way, self.batches[-1])
        n = self.lengths.output_tokens
        most = np.minimum(b + TAIL * np.sqrt(b * np.maximum(1.0 - under_way / clients, 0.0)), self.batches[-1])
        prompt, decode = self._at(self.prompt_s, b), self._at(self.decode_s, b)
        tpot = decode + np.maximum(b - 1.0, 0.0) * prompt / n
        tpot_p99 = self._at(self.decode_s, most) + np.maximum(most - 1.0, 0.0) * self._at(self.prompt_s, most) / n
        request = np.maximum(b, 1.0) * prompt + n * decode
        waiting = (under_way / b - 1.0) * request
        ttft = decode + prompt + waiting
        own = prompt * self._spread_of_prompts[0] + np.sqrt(most) * prompt
        ttft_p99 = 2.0 * self._at(self.decode_s, most) + own + waiting
        e2e_p99 = ttft_p99 + self._longest_output * tpot_p99
        return Estimate(clients, b, tpot, tpot_p99, ttft, ttft_p99, e2e_p99, b / request)

    def _clients(self, think_s: float) -> Values:
        """How many clients there are when each of `batches` is in flight and the others think."""
        return self.batches * (1.0 + think_s / self.whole_request_s)

    def _under_way(self, clients: Values, think_s: float) -> Values:
        """Requests in flight for so many clients: interpolated linearly between batches, and from 0 below the first;
        clients beyond the last batch all wait."""
        known = np.concatenate(([0.0], np.maximum.accumulate(self._clients(think_s))))
        within = np.interp(clients, known, np.concatenate(([0.0], self.batches)))
        return within + np.maximum(clients - known[-1], 0.0)

    def at(self, demand: Demand, loads: Values) -> Estimate:
        """Latencies at loads in the unit of the demand: requests a second, or clients."""
        return self.at_rates(loads) if demand.rate_rps is not None else self.at_concurrency(loads, demand.think_s)

    def most_load(self, demand: Demand, *, tails: bool) -> float:
        """The largest load, in the unit of the demand, at which it meets the objective; 0 if there is none."""
        if demand.rate_rps is not None:
            loads = self.most_rps * np.linspace(1.0, RATES, RATES) / (RATES + 0.5)
        else:
            waiting = self.batches[-1] * np.array([0.25, 0.5, 1.0, 3.0])
            clients = self._clients(demand.think_s)
            loads = np.unique(np.concatenate((clients, clients[-1] + waiting)))
        good = self.at(demand, loads).meets(demand.slo, tails=tails)
        if not good[0]:
            return 0.0
        first_bad = int(np.argmin(good)) if not good.all() else len(good)
        return float(loads[first_bad - 1])

    def pools(self, demand: Demand) -> tuple[int, int] | None:
        """The fewest engines for prompts and for outputs that may meet the objective; None where none do.

        Engines that only decode have no prompts between their tokens; their means must meet it. Those for prompts must
        keep up with the rate, and 99 of 100 first tokens must come in time where each prompt has an engine of one queue
        to itself: prompts that share a step are later.
        """
        if demand.rate_rps is None:
            return None
        decode = self._decoding.replicas(_without_first_tokens(demand), tails=False)
        own_s, prompt_s, bound_s = float(self.decode_s[0]), float(self.prompt_s[0]), demand.slo.ttft_s
        longest, moment = self._spread_of_prompts
        if decode is None or (bound_s is not None and own_s + longest * prompt_s > bound_s):
            return None
        engines = max(1, math.ceil(demand.rate_rps * prompt_s))
        while bound_s is not None:
            used = min(demand.rate_rps * prompt_s / engines, 0.999)
            _, late_s = _waiting(used, engines, prompt_s * moment / 2.0)
            if own_s + prompt_s + float(late_s) <= bound_s:
                break
            engines += 1
        return engines, decode

    def most_of_pools(self, demand: Demand, prompt_engines: int, decode_engines: int) -> float:
        """The most requests a second that pools of so many engines serve: the smaller of the two pools decides."""
        decode = self._decoding.most_load(_without_first_tokens(demand), tails=False)
        return min(prompt_engines / float(self.prompt_s[0]), decode_engines * decode)

    @property
    def _decoding(self) -> ReplicaCurves:
        """An engine that has no prompts to compute."""
        return replace(self, prompt_s=np.zeros(len(self.batches)))

    def replicas(self, demand: Demand, *, tails: bool) -> int | None:
        """How many replicas it takes to meet the objective; None if no number does."""
        most = self.most_load(demand, tails=tails)
        return None if most <= 0.0 else max(1, math.ceil(demand.amount / most - 1e-9))

    def _at(self, curve: Values, batch: Values) -> Values:
        return np.interp(batch, self.batches, curve)

    def _crossing(self, over: Values, index: NDArray[np.int64]) -> Values:
        """The batch at which as many end as arrive, between two of the curve; below its first one linearly from 0."""
        row = np.arange(len(index))
        before = np.maximum(index - 1, 0)
        low, high = self.batches[before], self.batches[index]
        f_low, f_high = over[row, before], over[row, index]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(f_low > f_high, f_low / (f_low - f_high), 0.0)
        between = low + np.clip(share, 0.0, 1.0) * (high - low)
        return np.where(index == 0, self.batches[0] + over[:, 0], between)

    @cached_property
    def _spread_of_prompts(self) -> tuple[float, float]:
        """The 99th percentile of the prompts against their mean, and their second moment against its square."""
        prompts = self.lengths.prompts
        mean = prompts.mean()
        return float(np.percentile(prompts, 99) / mean), float((prompts**2).mean() / mean**2)

    @cached_property
    def _longest_output(self) -> float:
        return float(np.percentile(self.lengths.outputs, 99))

    def _waiting_for_a_seat(self, batch: Values, request_s: Values) -> tuple[Values, Values]:
        seats = self.batches[-1]
        return _waiting(np.minimum(batch / seats, 0.999), seats, request_s)


def _waiting(used: Values | float, servers: float, service_s: Values | float) -> tuple[Values, Values]:
    """Mean and 99th percentile of the wait in one queue before `servers` that are `used` so much of the time.

    M/M/c with Sakasegawa's approximation of the chance to wait (1977); where times of service vary
    otherwise, with the square v of their standard deviation over their mean, `service_s` is the mean times (1 + v) / 2
    (Pollaczek and Khinchine).
    """
    chance = np.asarray(used) ** (math.sqrt(2.0 * (servers + 1.0)) - 1.0)
    each = service_s / (servers * (1.0 - np.asarray(used)))
    return chance * each, np.where(chance > 0.01, each * np.log(np.maximum(100.0 * chance, 1.0)), 0.0)


def _without_first_tokens(demand: Demand) -> Demand:
    """What is asked of engines that only decode."""
    return replace(demand, slo=demand.slo.model_copy(update={"ttft_s": None}))


def replica_of(
    scenario: Scenario, hardware: HardwareSpec, precision: FormatChoice, parallel: Parallelism, lengths: Lengths
) -> ReplicaCurves:
    """A replica with its curves; raises MemboundError where it cannot be built or holds no sequence."""
    techniques = precision.techniques
    if scenario.engine.batching != "static" and not any(isinstance(t, ContinuousBatching) for t in techniques):
        techniques = (*techniques, ContinuousBatching())
    built = scenario.with_techniques(techniques).model_copy(update={"hardware": hardware.name, "parallel": parallel})
    model = resolve_model(scenario.model)
    deployment = replace(deployment_of(built, model, hardware), seats=math.inf)
    fits = deployment.largest_batch(lengths.context)
    if deployment.largest_batch(lengths.prompt_tokens + lengths.output_tokens) < 1.0:
        held, whole = deployment.footprint.weights_bytes / 2**30, hardware.memory_bytes / 2**30
        raise MemboundError(f"does not fit: its weights take {held:.1f} GiB of {whole:.1f} GiB")
    most = float(min(max(1.0, fits), MOST_SEATS))
    batches = np.unique(np.round(np.geomspace(1.0, most, BATCHES)))
    limits = {"max_num_seqs": int(batches[-1]), "batching": scenario.engine.batching or USUAL_BATCHING}
    built = built.model_copy(update={"engine": built.engine.model_copy(update=limits)})
    decode_s = np.broadcast_to(np.asarray(deployment.token_s(batches, lengths.context)), batches.shape)
    prompt_s = np.asarray(deployment.joining_s(batches, lengths.prompt_tokens, lengths.output_tokens))
    return ReplicaCurves(built, hardware, precision, parallel, lengths, batches, decode_s, prompt_s)


def replicas_on(
    scenario: Scenario, hardware: HardwareSpec, names: Sequence[str], lengths: Lengths
) -> tuple[list[ReplicaCurves], list[str]]:
    """Every replica that this device allows, and why others are not possible.

    Stages of a pipeline are tried only where no tensor parallelism holds the model: within a node they are slower.
    """
    found, reasons = [], []
    model = resolve_model(scenario.model)
    for precision in precisions(names, model, hardware, scenario.techniques):
        fits_without_stages = False
        for parallel in parallelisms(model, hardware):
            if parallel.pp > 1 and fits_without_stages:
                continue
            try:
                found.append(replica_of(scenario, hardware, precision, parallel, lengths))
            except MemboundError as error:
                reasons.append(f"{hardware.name}, {precision.name}, {parallel.devices} devices: {error}")
                continue
            fits_without_stages |= parallel.pp == 1
    return found, reasons
