"""Which requests does a scenario's workload consist of? The same ones for the simulator and the runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario, SyntheticPrompts, TextPrompts
from membound.simulator.scheduling.client import sample_arrivals_s, sample_lengths
from membound.simulator.scheduling.request import Request


@dataclass(frozen=True)
class Prompt:
    """A prompt as recorded by `membound record`: its tokens and a model's greedy continuation."""

    id: str
    task: str
    text: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def prompts_path(file: str) -> Path:
    """The recorded prompts `file` names: a path, or a name in `data/prompts/`."""
    if file.endswith(".jsonl"):
        return Path(file)
    return Path(str(resources.files("membound.data"))) / "prompts" / f"{file}.jsonl"


def load_prompts(file: str) -> list[Prompt]:
    """Reads recorded prompts; raises MemboundError with one sentence."""
    path = prompts_path(file)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MemboundError(
            f"workload.prompts.file '{file}' cannot be read ({path}: {reason}); "
            "give a name of data/prompts/ or the path of a .jsonl that `membound record` wrote"
        ) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            ids, outputs = tuple(map(int, item["prompt_ids"])), tuple(map(int, item["output_ids"]))
            prompts.append(Prompt(str(item["id"]), str(item["task"]), str(item["text"]), ids, outputs))
        except (ValueError, KeyError, TypeError):
            raise MemboundError(
                f"workload.prompts.file '{file}' line {number} is not a recorded prompt; make it with `membound record`"
            ) from None
    if not prompts:
        raise MemboundError(f"workload.prompts.file '{file}' holds no prompt")
    return prompts


def requests_for(scenario: Scenario, vocab: int | None = None) -> list[Request]:
    """The workload's requests in order of arrival, drawn from its seed.

    Text prompts come with their recorded content. Synthetic ones have no content for the simulator; for the runtime,
    which passes `vocab`, their token ids are drawn uniformly from it.
    Raises MemboundError where a request asks for more tokens than its recording holds.
    """
    workload = scenario.workload
    rng = np.random.default_rng(workload.seed)
    count = workload.requests
    arrivals = sample_arrivals_s(workload.arrivals, count, rng)
    outputs = sample_lengths(workload.output_tokens, count, rng)
    match workload.prompts:
        case TextPrompts(file=file):
            prompts = load_prompts(file)
            order = rng.permutation(len(prompts))
            drawn = [prompts[order[i % len(prompts)]] for i in range(count)]
            return _text_requests(file, drawn, arrivals.tolist(), outputs.tolist())
        case SyntheticPrompts(tokens=length):
            lengths = sample_lengths(length, count, rng).tolist()
    requests = [
        Request(i, arrival_s, prompt, output)
        for i, (arrival_s, prompt, output) in enumerate(zip(arrivals.tolist(), lengths, outputs.tolist(), strict=True))
    ]
    if vocab is None:
        return requests
    return [
        replace(request, prompt_ids=tuple(rng.integers(0, vocab, request.prompt_tokens).tolist()))
        for request in requests
    ]


def _text_requests(file: str, prompts: list[Prompt], arrivals: list[float], outputs: list[int]) -> list[Request]:
    requests = []
    for i, (prompt, arrival_s, wanted) in enumerate(zip(prompts, arrivals, outputs, strict=True)):
        if wanted > len(prompt.output_ids):
            raise MemboundError(
                f"workload.output_tokens asks for {wanted} tokens, but the recording of prompt '{prompt.id}' in "
                f"'{file}' holds {len(prompt.output_ids)}; ask for fewer or record more"
            )
        recorded = prompt.output_ids[:wanted]
        requests.append(Request(i, arrival_s, len(prompt.prompt_ids), wanted, prompt.prompt_ids, recorded))
    return requests
