"""What does a scenario's workload come to on a server?"""

from __future__ import annotations

import asyncio
import gc
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2
import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.results.result import Column, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import resolve
from membound.roofline.scenario.workload import ClosedLoop, TextPrompts
from membound.runtime.clock import WallClock
from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.connection import Connections, allow_files
from membound.runtime.endpoint.dialect import Dialect, agree, dialects, model_of
from membound.runtime.endpoint.drive import LATE_S, Answer, Pulse, drive
from membound.runtime.endpoint.prompts import Prompts, is_text
from membound.runtime.endpoint.record import RequestRow, gaps_s, lateness_notes, requests_table, run_result
from membound.runtime.endpoint.server_metrics import INTERVAL_S, ServerMetrics, shared_with_others
from membound.runtime.endpoint.stream import Reply, ReplyError
from membound.simulator.scheduling.request import Request

_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 16
_TELL_S = 0.5
_MOST_SHOWN = 4000  # characters of an answer that are told while the run goes on
# Of the tokens that were asked for, and of those that prompts should have had.
_NOTED_SHORTFALL, _NOTED_DIFFERENCE = 0.98, 0.1

Event = Callable[[str, Mapping[str, Any]], None]


def measure(
    scenario: Scenario,
    endpoint: Endpoint,
    progress: Progress = silent,
    event: Event = lambda kind, payload: None,
) -> RunResult:
    """Sends the scenario's workload to the endpoint in real time, after a warm-up that is not recorded.

    `event` hears twice a second how fast tokens come (`live`) and what was answered last (`text`). Requests that fail
    are recorded with their reason. Raises MemboundError where nothing can be measured at all.
    """
    try:
        return asyncio.run(_measure(scenario, endpoint, progress, event))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # what ended the run, not the tasks that it ended in


async def _measure(scenario: Scenario, endpoint: Endpoint, progress: Progress, event: Event) -> RunResult:
    workload = resolve(scenario.workload)
    arrivals = workload.arrivals
    vocab = resolve_model(scenario.model).vocab
    async with Connections(endpoint) as connections:
        progress(0.0, f"asking {endpoint.base_url}")
        clock = WallClock()
        model = await model_of(connections)
        recorded = isinstance(workload.prompts, TextPrompts)  # by a model that chats
        forms = dialects(endpoint.api, ids=not is_text(workload), prefer_chat=recorded)
        dialect = await agree(connections, forms, model, clock)
        run = _Run(scenario, connections, dialect, model, vocab if dialect.ids else None, progress, event)
        users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else len(run.prompts.requests)
        allow_files(min(users, len(run.prompts.requests)), certain=isinstance(arrivals, ClosedLoop))
        await run.warm_up()
        return await run.measured()


class _Run:
    """One run against one server."""

    def __init__(
        self,
        scenario: Scenario,
        connections: Connections,
        dialect: Dialect,
        model: str,
        vocab: int | None,
        progress: Progress,
        event: Event,
    ) -> None:
        self.scenario, self.connections, self.dialect, self.model = scenario, connections, dialect, model
        self.vocab, self.progress, self.event = vocab, progress, event
        self.answered: tuple[int, str] | None = None
        self.prompts = Prompts(scenario, vocab, secrets.randbelow(1 << 30))
        self.clock = WallClock()
        self.tokens = self.under_way = 0
        self.expected = sum(turn.output_tokens for request in self.prompts.requests for turn in request.turns())

    async def ask(self, request: Request) -> Reply:
        url = self.connections.endpoint.url(self.dialect.api)
        prompt = self.prompts.body(request, self.dialect.api)
        body = self.dialect.body(self.model, prompt, request.output_tokens, self.scenario.temperature)
        self.under_way += 1
        try:
            return await self.connections.ask(url, body, request.output_tokens, self.clock, self._came)
        finally:
            self.under_way -= 1

    async def warm_up(self) -> None:
        """A few requests of the workload's own shape and other content, whose times are not kept."""
        other = Prompts(self.scenario, self.vocab, secrets.randbelow(1 << 30))
        url = self.connections.endpoint.url(self.dialect.api)
        for request in other.requests[:_WARM_UP_REQUESTS]:
            tokens = min(request.output_tokens, _WARM_UP_TOKENS)
            prompt = other.body(request, self.dialect.api)
            body = self.dialect.body(self.model, prompt, tokens, self.scenario.temperature)
            try:
                await self.connections.ask(url, body, tokens, self.clock)
            except ReplyError:
                return  # what is wrong will be seen, and recorded, in the run

    async def measured(self) -> RunResult:
        metrics, pulse = ServerMetrics(), Pulse()
        has_metrics = await metrics.read(self.connections)
        gc.collect()
        gc.freeze()  # what lives through the run need not be looked through while tokens come
        try:
            answers = await self._driven(metrics if has_metrics else None, pulse)
        finally:
            gc.unfreeze()
        if has_metrics:
            await metrics.read(self.connections)
        self.progress(1.0, "done")
        return self._result(answers, metrics.summary(), pulse.delays_s)

    async def _driven(self, metrics: ServerMetrics | None, pulse: Pulse) -> list[Answer]:
        """All answers, with what is watched beside them."""
        self.clock = WallClock()
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(pulse.beat()), group.create_task(self._tell())]
            if metrics is not None:
                beside.append(group.create_task(self._read_on(metrics)))
            arrivals = resolve(self.scenario.workload).arrivals
            answers = await drive(self.prompts.requests, arrivals, self.ask, self.clock, self._answered)
            for task in beside:
                task.cancel()
        return answers

    def _came(self, events: int) -> None:
        self.tokens += events

    def _answered(self, answer: Answer) -> None:
        if answer.reply is not None:
            text = answer.reply.text
            self.answered = answer.request.id, text
            self.prompts.answered(answer.request, text)
            answer.reply.texts.clear()

    async def _tell(self) -> None:
        told_s, told_tokens = self.clock.now_s(), self.tokens
        while True:
            share = min(1.0, self.tokens / self.expected)
            self.progress(share, f"measuring {self.scenario.name} at the endpoint, {self.under_way} under way")
            if self.answered is not None:
                number, text = self.answered
                self.event("text", {"request": number, "prompt": "", "text": text[:_MOST_SHOWN]})
                self.answered = None
            await asyncio.sleep(_TELL_S)
            now_s, now_tokens = self.clock.now_s(), self.tokens
            rate = (now_tokens - told_tokens) / (now_s - told_s)
            self.event("live", {"t": now_s, "tokens_per_s": rate, "running": self.under_way})
            told_s, told_tokens = now_s, now_tokens

    async def _read_on(self, metrics: ServerMetrics) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await metrics.read(self.connections)

    def _result(self, answers: list[Answer], told: dict[str, Any], delays_s: list[float]) -> RunResult:
        requests = requests_table(RequestRow.of(answer) for answer in answers)
        # A server with speculation sends several tokens in an event, and its own counts say how many.
        answered = sum(answer.reply.tokens for answer in answers if answer.reply is not None)
        others = shared_with_others(told, max(answered, self.tokens))
        endpoint = self.connections.endpoint
        how = f"{'token ids' if self.dialect.ids else 'text'}, {self.dialect.api}"
        notes = [f"model '{self.model}' at {endpoint.base_url} ({how})", *self._notes(answers, requests)]
        notes += [*lateness_notes(requests, delays_s), *_metric_notes(told, others)]
        return run_result(
            self.scenario,
            requests,
            gaps_s(answers),
            duration_s=max(answer.ended_s for answer in answers),
            told={} if others else told,
            notes=notes,
            details={"endpoint": {"url": endpoint.base_url, "model": self.model, "server": told}},
            versions={"httpx2": httpx2.__version__, "python": platform.python_version()},
            stalls=sum(delay > LATE_S for delay in delays_s),
        )

    def _notes(self, answers: list[Answer], requests: dict[str, Column]) -> Iterator[str]:
        yield from self.dialect.lacks()
        if self.prompts.recorded:
            yield "recorded prompts are the same in every run: a server with a prefix cache has read them before"
        done = requests["completed"]
        asked = np.array([a.request.output_tokens for a in sorted(answers, key=lambda a: a.request.id)])[done]
        wished = np.array([a.request.prompt_tokens for a in sorted(answers, key=lambda a: a.request.id)])[done]
        got, read = requests["output_tokens"][done], requests["prompt_tokens"][done]
        if got.sum() < _NOTED_SHORTFALL * asked.sum():
            yield f"answers had {got.sum() / asked.sum():.0%} of the tokens asked for: they ended by themselves"
        if done.any() and abs(read.sum() / wished.sum() - 1) > _NOTED_DIFFERENCE:
            yield f"prompts had {read.mean():.0f} tokens by the server's count, {wished.mean():.0f} by the scenario"


def _metric_notes(told: dict[str, Any], others: bool) -> Iterator[str]:
    """What the server's metrics say, in words."""
    if not told:
        yield "the server has no metrics that are known, so its queue, KV cache, preemptions and drafts are not"
        return
    if others:
        yield (
            f"the server generated {told['generated']:.0f} tokens, more than this run's: others used it, so its "
            "counters are kept aside"
        )
    parts = [
        f"{name} {told[f'{name}_mean']:.1f} on average, {told[f'{name}_max']:.0f} at most"
        for name in ("running", "waiting")
        if f"{name}_mean" in told
    ]
    if "kv_usage_mean" in told:
        parts.append(f"KV cache {told['kv_usage_mean']:.0%} used, {told['kv_usage_max']:.0%} at most")
    parts += [f"{told['preemptions']:.0f} preemptions"] if "preemptions" in told else []
    parts += [f"{told['prefix_hit_rate']:.0%} of prompt tokens cached"] if "prefix_hit_rate" in told else []
    parts += [f"{told['acceptance_rate']:.0%} of drafts accepted"] if "acceptance_rate" in told else []
    yield "server: " + ", ".join(parts)


def need_answers(result: RunResult) -> None:
    """Raises MemboundError where the endpoint answered nothing, with the usual reason."""
    if not result.summary.completed:
        reasons = [note for note in result.provenance.notes if "requests failed" in note]
        raise MemboundError(f"the endpoint answered no request: {reasons[0] if reasons else 'it was sent none'}")
