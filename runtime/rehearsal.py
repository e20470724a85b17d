"""What does a GPU do for the first time only, so that no measured step has to wait for it?

Triton compiles a kernel for each combination of sizes that it takes as constants, and libraries choose their way, when
they are first called. So requests with the scenario's own prompts are served once before the run, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import ClosedLoop
from membound.runtime.clock import WallClock
from membound.runtime.ragged import MOST_IN_TREE
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.loop import Executor, serve
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.scheduler import Scheduler

STEPS_OF_PROMPTS = 4  # as many full ones as the rehearsed prompts fill, beside the longest
OUTPUT_TOKENS = (2, 3, 4, 6)  # in turn, so that batches of every size decode as requests end


def compiles_when_called(device: torch.device) -> bool:
    """Whether the first call of a kernel takes longer than the others; a CPU's are compiled before any is called."""
    return device.type == "cuda"


def rehearsed(scenario: Scenario) -> Scenario:
    """The scenario, without what keeps or moves blocks between requests: these are forgotten."""
    engine = scenario.engine.model_copy(update={"prefix_caching": False, "preemption": "recompute"})
    return scenario.model_copy(update={"engine": engine})


def rehearsal_of(requests: Sequence[Request], most: int, max_batched_tokens: int, max_context: int) -> list[Request]:
    """The longest turn and, shortened, the first of the requests, `most` together; their ids are of no request.

    None where the model's context holds no turn: each of these is refused when it comes.
    """
    turns = [turn for request in requests for turn in request.turns()]
    fitting = [turn for turn in turns if turn.tokens <= max_context]
    if not fitting:
        return []
    longest = max(fitting, key=lambda turn: turn.prompt_tokens)
    others = [request for request in requests if request is not longest and request.tokens <= max_context][: most - 1]
    room = max(MOST_IN_TREE + 1, STEPS_OF_PROMPTS * max_batched_tokens // max(len(others), 1))
    first_id = 1 + max(turn.id for turn in turns)
    return [
        _cut(request, first_id + i, request.prompt_tokens if i == 0 else room, OUTPUT_TOKENS[i % len(OUTPUT_TOKENS)])
        for i, request in enumerate([longest, *others])
    ]


def rehearse(requests: Sequence[Request], scheduler: Scheduler, executor: Executor) -> None:
    """Serves requests that all come at once, and keeps nothing of it."""
    if not requests:
        return
    client = client_for(ClosedLoop(concurrency=len(requests)), requests)
    for _ in serve(scheduler, client, executor, WallClock(), Recorder()):
        pass


def _cut(request: Request, id: int, most_prompt: int, most_output: int) -> Request:
    prompt = min(request.prompt_tokens, most_prompt)
    ids = None if request.prompt_ids is None else request.prompt_ids[:prompt]
    return replace(
        request,
        id=id,
        arrival_s=0.0,
        prompt_tokens=prompt,
        output_tokens=min(request.output_tokens, most_output),
        prompt_ids=ids,
        output_ids=None,
        prefix=None,
        think_s=0.0,
        follow_up=None,
    )
