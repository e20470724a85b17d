"""How fast is a deployment under a steady load: time per token, time to the first, tokens a second?

A closed form for static batches and for a closed loop of clients, good enough to compare with published tables and to
search a plan; queues, bursts and tails are the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from membound.roofline.cost import (
    StepCost,
    filling_passes,
    micro_batch,
    pipelined_cost,
    step_cost,
    uneven_passes,
)
from membound.roofline.engine_memory import EngineLimits
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.shape import Count, StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import get_profile
from membound.roofline.times.known import RoofTimes, times_for
from membound.roofline.times.operator import Times

# Tokens that an engine takes into one step at most where nobody says: vLLM's and TensorRT-LLM's default for serving.
CHUNK_TOKENS = 8192
# Chunks of a prompt that are costed one by one; of more, so many stand for all. A chunk's time is nearly linear in the
# tokens before it, for which the middle of a range is exact.
MOST_CHUNKS = 64


def chunks(prompt_tokens: float, chunk_tokens: float) -> Iterator[tuple[float, float, float]]:
    """The steps of a prompt that takes several: tokens of one, those cached before it, and how many are like it."""
    whole, rest = divmod(prompt_tokens, chunk_tokens)
    costed = min(whole, float(MOST_CHUNKS))
    like_it = whole / max(costed, 1.0)
    for index in range(int(costed)):
        yield float(chunk_tokens), (index * like_it + (like_it - 1.0) / 2.0) * chunk_tokens, like_it
    if rest:
        yield rest, whole * chunk_tokens, 1.0


def mean_context(prompt_tokens: float, output_tokens: float) -> float:
    """Tokens that a decode step attends to for a sequence, on average over its output."""
    return prompt_tokens + (output_tokens + 1.0) / 2.0


def _others(batch: Count) -> Count:
    """Sequences that decode beside one whose prompt joins them."""
    return np.maximum(np.asarray(batch) - 1.0, 1e-3)[()]


@dataclass(frozen=True)
class Deployment:
    """A model on devices with an engine: one replica, whose parallelism is in the set-up.

    `ideal` takes the bare roofs for the kernels: what no engine can beat.
    """

    model: ModelSpec
    hardware: HardwareSpec
    setup: EngineSetup
    chunk_tokens: int = CHUNK_TOKENS
    ideal: bool = False

    @cached_property
    def times(self) -> Times:
        return RoofTimes(self.hardware) if self.ideal else times_for(self.hardware, self.setup.profile)

    @property
    def limits(self) -> EngineLimits | None:
        """The largest step that the engine prepares for; None where nobody says."""
        return None

    @cached_property
    def footprint(self) -> Footprint:
        """What the replica holds on each of its devices."""
        return Footprint.of(self.model, self.setup, self.limits)

    @property
    def interleaved(self) -> float:
        """The share of other requests' prompts that passes between a request's tokens."""
        return get_profile(self.setup.profile).interleaved

    def step(self, shape: StepShape) -> StepCost:
        """One step of the replica."""
        return pipelined_cost(self.model, self.setup, self.times, shape)

    def pass_s(self, shape: StepShape) -> Count:
        """Seconds of one micro-batch through all stages, or of each of many."""
        return step_cost(self.model, self.setup, self.times, shape).time_s

    def steps_s(self, shape: StepShape) -> Count:
        """Seconds of one step of the replica, or of each of many."""
        one, passes = uneven_passes(self.model, self.setup, self.times, shape)
        return self.pass_s(one) * passes

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step of the replica."""
        return float(self.steps_s(shape))

    def token_s(self, batch: Count, context: float) -> Count:
        """Seconds between two tokens of each of `batch` sequences of `context` tokens, at each of many batches."""
        return self.steps_s(StepShape.decode(batch, context))

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds between two tokens at one batch."""
        return float(self.token_s(batch, context))

    def joining_s(
        self, batch: Count, prompt_tokens: float, output_tokens: float, together: Count | None = None
    ) -> Count:
        """Seconds that a prompt adds to the steps that it joins, its share of what `together` prompts in them add.

        One in which `batch` sequences of these lengths are served, or each of many. Where nobody says how many join
        together, as many do as end meanwhile.
        """
        context = mean_context(prompt_tokens, output_tokens)
        together = self.together(batch, prompt_tokens, output_tokens) if together is None else together
        others = StepShape.decode(_others(batch), context)
        plain_s, total_s = self.steps_s(others), np.zeros(np.shape(batch))[()]
        for chunk, cached, times in chunks(prompt_tokens, float(self.chunk_tokens)):
            joined = others + StepShape.prefill(together, chunk, cached)
            total_s = total_s + times * (self.steps_s(joined) - plain_s)
        return np.maximum(total_s, 0.0) / together

    def together(self, batch: Count, prompt_tokens: float, output_tokens: float) -> Count:
        """Prompts that are in the same step where requests end one by one: as many as end meanwhile."""
        steps = max(prompt_tokens / self.chunk_tokens, 1.0)
        return np.clip(np.asarray(batch) * steps / max(output_tokens, 1.0), 1.0, self.at_once(prompt_tokens))[()]

    def at_once(self, prompt_tokens: float) -> float:
        """Prompts, or chunks of them, that a step holds at most: each rank's micro-batches have one or more."""
        parallel = self.setup.parallel
        return parallel.dp * parallel.most_micro_batches * max(self.chunk_tokens // prompt_tokens, 1.0)

    def joined_s(self, batch: float, context: float) -> float:
        """Seconds that the steps which a prompt joins would take without it: those of the others' tokens."""
        return self.step_s(StepShape.decode(_others(batch), context))

    def filling_s(self, batch: float, prompt_tokens: float) -> float:
        """Seconds that the first of the steps of `batch` prompts takes longer, where a pipeline was empty before."""
        together = min(batch, self.at_once(prompt_tokens))
        one, _ = micro_batch(self.setup.parallel, StepShape.prefill(together, min(prompt_tokens, self.chunk_tokens)))
        return float(self.pass_s(one) * filling_passes(self.setup.parallel, together))

    def prefill_s(self, batch: float, prompt_tokens: float) -> float:
        """Seconds to process `batch` prompts, in steps of at most `chunk_tokens` tokens a micro-batch."""
        together = min(batch, self.at_once(prompt_tokens))
        whole, rest = divmod(batch, together)
        steps_s = whole * self._group_s(together, prompt_tokens)
        if rest:
            steps_s += self._group_s(rest, prompt_tokens)
        return self.filling_s(batch, prompt_tokens) + steps_s

    def _group_s(self, prompts: float, tokens: float) -> float:
        """Seconds of prompts whose chunks are in the same steps."""
        steps = chunks(tokens, self.chunk_tokens) if tokens > self.chunk_tokens else [(tokens, 0.0, 1.0)]
        return sum(times * self.step_s(StepShape.prefill(prompts, chunk, cached)) for chunk, cached, times in steps)

    def largest_batch(self, context: float) -> float:
        """Sequences of `context` tokens whose caches fit beside the weights; 0 where the weights do not fit."""
        return self.footprint.sequences(self.hardware.memory_bytes, context)

    def with_batch_that_fits(self, batch: float, context: float) -> float:
        """The batch, or as much of it as fits."""
        return max(1.0, min(batch, self.largest_batch(context)))


@dataclass(frozen=True)
class StaticBatch:
    """A batch that starts together and generates `output_tokens` for each prompt, nothing joining it."""

    deployment: Deployment
    batch: float
    prompt_tokens: float
    output_tokens: float

    @cached_property
    def prefill_s(self) -> float:
        return self.deployment.prefill_s(self.batch, self.prompt_tokens)

    @cached_property
    def tpot_s(self) -> float:
        """Seconds a token at the mean context; a step's time is nearly linear in it."""
        return self.deployment.decode_s(self.batch, mean_context(self.prompt_tokens, self.output_tokens))

    @property
    def latency_s(self) -> float:
        """Seconds until the whole batch has its last token; prefill makes the first one."""
        return self.prefill_s + max(self.output_tokens - 1.0, 0.0) * self.tpot_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.batch * self.output_tokens / self.latency_s


@dataclass(frozen=True)
class SteadyLoad:
    """`concurrency` clients in a closed loop on one replica: as one request ends the next one's prompt joins a step.

    While a request makes its `output_tokens`, each of the others ends once and starts once, so that `concurrency - 1`
    prompts pass, the share `in_groups` of them together with those that they began with before. Who waits for them is
    the scheduler's choice: `first_s` of their time fall before a first token, the rest between tokens; their sum, a
    request's whole time, is the same. Where nobody says how much that is, the profile's `interleaved` share falls
    between tokens.
    """

    deployment: Deployment
    concurrency: float
    prompt_tokens: float
    output_tokens: float
    first_s: float | None = None
    in_groups: float = 0.0

    @cached_property
    def batch(self) -> float:
        """Sequences that decode together: what fits of the clients' requests."""
        return self.deployment.with_batch_that_fits(self.concurrency, self._context)

    @property
    def _context(self) -> float:
        return mean_context(self.prompt_tokens, self.output_tokens)

    @cached_property
    def decode_s(self) -> float:
        """Seconds of a step in which nothing but decoding happens: the median inter-token latency."""
        return self.deployment.decode_s(self.batch, self._context)

    @cached_property
    def prompt_s(self) -> float:
        """Seconds that a prompt takes from everybody: its share of what those in the same steps add to them."""
        lengths = self.batch, self.prompt_tokens, self.output_tokens
        apart_s = float(self.deployment.joining_s(*lengths))
        if not self.in_groups:
            return apart_s
        group = min(self.batch, self.deployment.at_once(self.prompt_tokens))
        together_s = float(self.deployment.joining_s(*lengths, group))
        if group == self.batch:  # all end together, which leaves a pipeline empty
            together_s += self.deployment.filling_s(group, self.prompt_tokens) / group
        return apart_s + self.in_groups * (together_s - apart_s)

    @property
    def _others_s(self) -> float:
        """Seconds of the other clients' prompts while a request is served."""
        return (self.batch - 1.0) * self.prompt_s

    @property
    def _first_s(self) -> float:
        """Seconds of them before a first token."""
        return (1.0 - self.deployment.interleaved) * self._others_s if self.first_s is None else self.first_s

    @cached_property
    def tpot_s(self) -> float:
        """Mean seconds a token after the first, with the prompts that pass meanwhile."""
        return self.decode_s + max(0.0, self._others_s - self._first_s) / max(self.output_tokens, 1.0)

    @property
    def median_itl_s(self) -> float:
        """Median seconds between two tokens: prompts are in it once most steps have some.

        Prompts come like a Poisson process of `batch / output_tokens` a step, whose median count is about its mean less
        a third; those that come in groups in fewer steps, as many of them at once as a step holds.
        """
        mean = self.batch / max(self.output_tokens, 1.0)
        group = min(self.batch, self.deployment.at_once(self.prompt_tokens))
        apart, together = max(0.0, mean - 1.0 / 3.0), group * max(0.0, mean / group - 1.0 / 3.0)
        return self.decode_s + (apart + self.in_groups * (together - apart)) * self.prompt_s

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: the own prompt, those before it, and a place in the batch where it is full."""
        waiting_s = (self.concurrency / self.batch - 1.0) * self._request_s
        if self.batch <= 1.0:  # no token of another is in the steps of the prompt
            return self.deployment.prefill_s(1.0, self.prompt_tokens) + waiting_s
        joined_s = self.deployment.joined_s(self.batch, self._context)
        return joined_s + self.prompt_s + self._first_s + waiting_s

    @property
    def _request_s(self) -> float:
        """Seconds of a request from its place in the batch to its last token."""
        return self.batch * self.prompt_s + self.output_tokens * self.decode_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.batch * self.output_tokens / self._request_s


def with_parallel(deployment: Deployment, **changes: int) -> Deployment:
    """The deployment with other degrees of parallelism."""
    parallel = deployment.setup.parallel.model_copy(update=changes)
    return replace(deployment, setup=replace(deployment.setup, parallel=parallel))
