"""How fast is a deployment under a steady load: time per token, time to the first, tokens a second?

A closed form for static batches and for a closed loop of clients, good enough to compare with published tables and to
search a plan; queues, bursts and tails are the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from membound.roofline.cost import StepCost, step_cost
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

    @cached_property
    def footprint(self) -> Footprint:
        """What the replica holds on each of its devices."""
        return Footprint.of(self.model, self.setup)

    @property
    def interleaved(self) -> float:
        """The share of other requests' prompts that passes between a request's tokens."""
        return get_profile(self.setup.profile).interleaved

    def step(self, shape: StepShape) -> StepCost:
        return step_cost(self.model, self.setup, self.times, shape)

    def steps_s(self, shape: StepShape) -> Count:
        """Seconds of one step of a micro-batch through all stages of the replica, or of each of many."""
        return self.step(shape).time_s

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return float(self.steps_s(shape))

    def token_s(self, batch: Count, context: float) -> Count:
        """Seconds between two tokens of each of `batch` sequences of `context` tokens, at each of many batches.

        A pipeline's micro-batches each pass all stages once (`cost.pipelined_cost`).
        """
        micro = self.setup.parallel.micro_batches_of(batch)
        turns = np.maximum(micro / self.setup.parallel.pp, 1.0)
        return self.steps_s(StepShape.decode(batch / micro, context)) * turns

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds between two tokens at one batch."""
        return float(self.token_s(batch, context))

    def joining_s(self, batch: Count, prompt_tokens: float, output_tokens: float) -> Count:
        """Seconds that a prompt adds to the steps that it joins, with the others that join the same ones.

        One in which `batch` sequences of these lengths are served, or each of many.
        """
        context = mean_context(prompt_tokens, output_tokens)
        together = self.together(batch, prompt_tokens, output_tokens)
        others = StepShape.decode(_others(batch), context)
        plain_s, total_s = self.steps_s(others), np.zeros(np.shape(batch))[()]
        for chunk, cached, times in chunks(prompt_tokens, float(self.chunk_tokens)):
            joined = others + StepShape.prefill(together, chunk, cached)
            total_s = total_s + times * (self.steps_s(joined) - plain_s)
        return np.maximum(total_s, 0.0) / together

    def together(self, batch: Count, prompt_tokens: float, output_tokens: float) -> Count:
        """Prompts that join the same step where requests end one by one: as many as end meanwhile."""
        most = max(self.chunk_tokens // prompt_tokens, 1.0)
        return np.clip(np.asarray(batch) / max(output_tokens, 1.0), 1.0, most)[()]

    def joined_s(self, batch: float, context: float) -> float:
        """Seconds that the steps which a prompt joins would take without it: those of the others' tokens."""
        return self.step_s(StepShape.decode(_others(batch), context))

    def _micro_batches(self, batch: float) -> float:
        return float(self.setup.parallel.micro_batches_of(batch))

    def _prefill_step_s(self, batch: float, tokens: float, cached: float = 0.0) -> float:
        """Seconds of prompts through all stages: the last micro-batch leaves `pp - 1` stage times after the first."""
        micro, pp = self._micro_batches(batch), self.setup.parallel.pp
        return self.step_s(StepShape.prefill(batch / micro, tokens, cached)) * (micro + pp - 1.0) / pp

    def prefill_s(self, batch: float, prompt_tokens: float) -> float:
        """Seconds to process `batch` prompts, in steps of at most `chunk_tokens` tokens."""
        total = 0.0
        if batch * prompt_tokens <= self.chunk_tokens:
            return self._prefill_step_s(batch, prompt_tokens)
        if prompt_tokens <= self.chunk_tokens:
            at_once = max(1.0, self.chunk_tokens // prompt_tokens)
            whole, rest = divmod(batch, at_once)
            total = whole * self._prefill_step_s(at_once, prompt_tokens)
            return total + (self._prefill_step_s(rest, prompt_tokens) if rest else 0.0)
        for chunk, cached, times in chunks(prompt_tokens, self.chunk_tokens):
            total += times * self._prefill_step_s(1.0, chunk, cached)
        return total * batch

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
    prompts pass. Who waits for them is the scheduler's choice: `first_s` of their time fall before a first token, the
    rest between tokens; their sum, a request's whole time, is the same. Where nobody says how much that is, the
    profile's `interleaved` share falls between tokens.
    """

    deployment: Deployment
    concurrency: float
    prompt_tokens: float
    output_tokens: float
    first_s: float | None = None

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
        """Seconds that a prompt adds to the steps that it joins, with the others that join the same ones."""
        return float(self.deployment.joining_s(self.batch, self.prompt_tokens, self.output_tokens))

    @property
    def busy_s(self) -> float:
        """Seconds that a prompt takes from everybody: stages of a pipeline work on several at once."""
        return self.prompt_s / float(self.deployment.setup.parallel.busy_stages(self.batch))

    @property
    def _others_s(self) -> float:
        """Seconds of the other clients' prompts while a request is served."""
        return (self.batch - 1.0) * self.busy_s

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
        """Median seconds between two tokens: a prompt is in it once most steps have one.

        Prompts come like a Poisson process of `batch / output_tokens` a step, whose median count is about its mean less
        a third.
        """
        prompts = max(0.0, self.batch / max(self.output_tokens, 1.0) - 1.0 / 3.0)
        return self.decode_s + prompts * self.busy_s

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
        return self.batch * self.busy_s + self.output_tokens * self.decode_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.batch * self.output_tokens / self._request_s


def with_parallel(deployment: Deployment, **changes: int) -> Deployment:
    """The deployment with other degrees of parallelism."""
    parallel = deployment.setup.parallel.model_copy(update=changes)
    return replace(deployment, setup=replace(deployment.setup, parallel=parallel))
