"""What is said to a server: token ids where it takes them, else words?

The lengths, arrivals and shared prefixes are the workload's. Its content is new in every run, for servers keep what
they have read: a second run of equal prompts would find them in the prefix cache.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import resolve
from membound.roofline.scenario.workload import SessionPrompts, TextPrompts, Workload
from membound.runtime.endpoint.address import Api
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.workload import requests_for
from membound.simulator.scheduling.workload.prompts import load_prompts
from membound.simulator.scheduling.workload.requests import token_ids

# Short, common words, each of which is a token or close to it in the vocabularies in use; the server's own count of
# the prompt is what is recorded.
WORDS = (
    *("time", "year", "day", "way", "man", "thing", "world", "life", "hand", "part", "child", "eye", "woman", "place"),
    *("work", "week", "case", "point", "company", "number", "group", "problem", "fact", "water", "room", "money"),
    *("story", "month", "lot", "right", "study", "book", "job", "word", "business", "issue", "side", "kind", "head"),
    *("house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city"),
    *("name", "team", "minute", "idea", "body", "back", "parent", "face", "level", "office", "door", "health", "art"),
    *("war", "history", "party", "result", "change", "morning", "reason", "girl", "moment", "air", "teacher", "force"),
)
# Special tokens lie at either end of vocabularies (from memory), and some, such as that of an image, end a request.
_SPECIAL_BELOW, _SPECIAL_ABOVE = 1000, 0.9

Message = dict[str, str]


def is_text(workload: Workload) -> bool:
    """Whether it must be told as text: recorded text, and conversations, whose history a server tells as text."""
    return isinstance(workload.prompts, TextPrompts | SessionPrompts)


class Prompts:
    """The requests of a scenario and what each of them says; another `seed` changes all content and no length.

    `vocab` is the model's where the server takes token ids, else None.
    """

    def __init__(self, scenario: Scenario, vocab: int | None, seed: int) -> None:
        workload = resolve(scenario.workload)
        self.recorded = isinstance(workload.prompts, TextPrompts)
        self._ids = None if vocab is None or is_text(workload) else _usual_ids(vocab)
        self._seed = seed
        drawn = requests_for(scenario)
        self._texts = {}
        if isinstance(workload.prompts, TextPrompts):
            texts = {prompt.prompt_ids: prompt.text for prompt in load_prompts(workload.prompts.file)}
            self._texts = {request.id: texts[request.prompt_ids or ()] for request in drawn}
        self._said: dict[int, int] = {}  # tokens of a turn's prompt that its conversation has had before
        for request in drawn:
            for turn, following in pairwise(request.turns()):
                self._said[following.id] = turn.tokens
        self._history: dict[int, list[Message]] = {}
        self.requests = [replace(request, prompt_ids=None, output_ids=None) for request in drawn]

    def body(self, request: Request, api: Api) -> dict[str, Any]:
        """The part of a request's body that says the prompt."""
        history = self._history.get(request.id, [])
        if api == "chat":
            return {"messages": [*history, {"role": "user", "content": self._text(request)}]}
        if self._ids is not None:
            low, size = self._ids
            return {"prompt": [low + id for id in token_ids(request, size, self._seed)]}
        return {"prompt": "".join(message["content"] for message in history) + self._text(request)}

    def answered(self, request: Request, text: str) -> None:
        """`text` is what the next turn of the conversation finds as the answer to this one."""
        if (turn := request.follow_up) is not None:
            asked = {"role": "user", "content": self._text(request)}
            before = self._history.pop(request.id, [])
            self._history[turn.id] = [*before, asked, {"role": "assistant", "content": text}]

    def _text(self, request: Request) -> str:
        if request.id in self._texts:
            return self._texts[request.id]
        ids = token_ids(request, len(WORDS), self._seed)[self._said.get(request.id, 0) :]
        return "".join(f" {WORDS[id]}" for id in ids)


def _usual_ids(vocab: int) -> tuple[int, int]:
    """The first of the ids that are no special tokens, and their number; all of a small vocabulary."""
    low, high = _SPECIAL_BELOW, int(_SPECIAL_ABOVE * vocab)
    return (low, high - low) if high > 2 * low else (0, vocab)
