"""Which of OpenAI's protocol and its extensions does a server take?

Servers differ in what they refuse: token ids as a prompt, `ignore_eos`, the count of tokens in the stream. The fullest
form that a server answers is the one that it is measured with; what it lacks is said beside the result.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.address import Api, Endpoint
from membound.runtime.endpoint.connection import Connections, Refused
from membound.runtime.endpoint.stream import Reply, ReplyError, shown
from membound.simulator.scheduling.loop import Clock

_TRIED_TOKENS = 4
_TRIED_IDS = tuple(range(2000, 2016))
_ANSWER_S = 30.0
_KEY_MATTERS = (401, 403)
_FORM_MATTERS = (400, 404, 405, 415, 422, 501)  # RFC 9110, sections 15.5 and 15.6: of other errors the form is no cause
_TOO_BUSY = {429, *range(500, 600)} - {*_FORM_MATTERS}
_RETRIES = 4
_LONGEST_WAIT_S = 8.0


@dataclass(frozen=True)
class Dialect:
    """The form of requests: `ids` as a prompt, `full` length whatever the model says, `usage` at the end."""

    api: Api
    ids: bool
    full: bool
    usage: bool

    def body(self, model: str, prompt: dict[str, Any], tokens: int, temperature: float) -> dict[str, Any]:
        """A request for `tokens` tokens. Its fields are those of vLLM's and SGLang's servers (vllm/entrypoints/openai,
        python/sglang/srt/entrypoints/openai/protocol.py), of which llama.cpp's (tools/server) knows `ignore_eos`."""
        body: dict[str, Any] = {"model": model, **prompt, "stream": True, "temperature": temperature}
        body["max_tokens"] = tokens
        if self.full:
            body |= {"ignore_eos": True, "min_tokens": tokens}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        return body

    def lacks(self) -> Iterator[str]:
        """What the result must be read with."""
        if not self.full:
            yield "the server takes no ignore_eos, so answers may be shorter than asked"
        if not self.usage:
            yield "the server does not count tokens: each event with text counts as one"


def dialects(api: Api | None, ids: bool, prefer_chat: bool) -> Iterator[Dialect]:
    """The forms to try, the fullest first; token ids are no part of a chat."""
    order: tuple[Api, ...] = ("chat", "completions") if prefer_chat else ("completions", "chat")
    for each in order if api is None else (api,):
        for full, usage in ((True, True), (False, True), (False, False)):
            for with_ids in (True, False) if ids and each == "completions" else (False,):
                yield Dialect(each, with_ids, full, usage)


async def agree(connections: Connections, tried: Iterator[Dialect], model: str, clock: Clock) -> Dialect:
    """The first form that the server answers with tokens.

    Raises MemboundError with its last refusal, and where it refuses for another reason than the form.
    """
    endpoint, last, missing = connections.endpoint, "", set[Api]()
    for dialect in tried:
        if dialect.api in missing:
            continue
        words = "one two three four"
        prompt: dict[str, Any] = {"prompt": list(_TRIED_IDS) if dialect.ids else words}
        if dialect.api == "chat":
            prompt = {"messages": [{"role": "user", "content": words}]}
        try:
            body = dialect.body(model, prompt, _TRIED_TOKENS, 0.0)
            reply = await _answered(connections, endpoint.url(dialect.api), body, clock)
        except Refused as error:
            if error.status in _KEY_MATTERS:
                raise MemboundError(
                    f"endpoint '{endpoint.base_url}' refuses the key: {error}; "
                    "name the environment variable that holds one with --api-key-env"
                ) from None
            if error.status not in _FORM_MATTERS:
                raise MemboundError(
                    f"endpoint '{endpoint.base_url}' turned a short request away, and not for its form: {error}; "
                    "measure it when it has room"
                ) from None
            last = str(error)
            if error.status in (404, 405):
                missing.add(dialect.api)
        except ReplyError as error:
            raise MemboundError(f"endpoint '{endpoint.base_url}' gives no answer to measure: {error}") from None
        else:
            return dialect if reply.counted or not dialect.usage else _uncounted(dialect)
    raise MemboundError(f"endpoint '{endpoint.base_url}' refuses every form of request, the last with {last}")


async def _answered(connections: Connections, url: str, body: dict[str, Any], clock: Clock) -> Reply:
    """The reply to a request, which is sent again, each time later, while the server is busy or failing."""
    wait_s = min(_LONGEST_WAIT_S, connections.endpoint.patience.first_token_s) / 2**_RETRIES
    for _ in range(_RETRIES):
        try:
            return await connections.ask(url, body, _TRIED_TOKENS, clock)
        except Refused as error:
            if error.status not in _TOO_BUSY:
                raise
        await asyncio.sleep(wait_s)
        wait_s *= 2
    return await connections.ask(url, body, _TRIED_TOKENS, clock)


def _uncounted(dialect: Dialect) -> Dialect:
    """A server may take the wish for a count and not fulfil it."""
    return Dialect(dialect.api, dialect.ids, dialect.full, usage=False)


async def model_of(connections: Connections) -> str:
    """The model that the endpoint is asked for: the one that was named, else the only one that it has."""
    endpoint: Endpoint = connections.endpoint
    if endpoint.model is not None:
        return endpoint.model
    name_it = "name the model with --endpoint-model"
    try:
        within_s = min(_ANSWER_S, endpoint.patience.first_token_s)
        status, body = await connections.get(f"{endpoint.base_url}/models", within_s)
    except ReplyError as error:
        raise MemboundError(f"endpoint '{endpoint.base_url}' cannot be used: {error}") from None
    if status in _KEY_MATTERS:
        raise MemboundError(
            f"endpoint '{endpoint.base_url}' refuses the key (status {status}); "
            "name the environment variable that holds one with --api-key-env"
        )
    names = _names(body) if status == 200 else []
    if not names:
        listed = f"list its models: it answered with status {status} and '{shown(body[:200].decode(errors='replace'))}'"
        raise MemboundError(f"endpoint '{endpoint.base_url}' does not {listed}; {name_it}, or give another address")
    if len(names) > 1:
        listed = ", ".join(shown(name) for name in names[:8])
        raise MemboundError(f"endpoint '{endpoint.base_url}' has the models {listed}; {name_it}")
    return names[0]


def _names(body: bytes) -> list[str]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return []
    listed = document.get("data") if isinstance(document, dict) else None
    names = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return [name for name in names if isinstance(name, str) and name]
