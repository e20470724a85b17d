"""When did the tokens of one streamed reply come?

A reply is a stream of server-sent events. All events of one read of the socket came at one moment, whatever their
number; how many tokens they held is what the server counts in `usage`, where it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# An event that holds a token takes some hundred bytes; these leave room for servers that tell much more.
MOST_EVENT_BYTES = 1 << 20
MOST_BYTES_A_TOKEN = 1 << 14
_MOST_TOKENS = 10**9
_SAID = 200


class ReplyError(Exception):
    """Why a request has no answer, in a few words."""


def shown(said: str) -> str:
    """What a server said, short and printable."""
    plain = "".join(character if character.isprintable() else " " for character in said[: 2 * _SAID])
    return " ".join(plain.split())[:_SAID]


class Events:
    """Splits bytes as they come into the data of events.

    An event ends with an empty line; comments, which some servers send to keep a connection, are none. Raises
    ReplyError where one is larger than any token.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> Iterator[bytes]:
        self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data, self._size = [], 0
        if len(self._rest) + self._size > MOST_EVENT_BYTES:
            raise ReplyError(f"an event of more than {MOST_EVENT_BYTES >> 20} MiB")

    def end(self) -> Iterator[bytes]:
        """The event that the end of the stream cut from its empty line, if there is one."""
        yield from self.feed(b"\n\n")


@dataclass
class Reply:
    """What came of one request, at moments of the run's clock.

    `moments_s` are those at which tokens came. `tokens` is the server's count, or that of the events with tokens.
    """

    sent_s: float
    moments_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    events: int = 0
    finish: str | None = None
    done: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    _tail_s: float | None = None

    def take(self, data: bytes, at_s: float) -> None:
        """Reads one event that came at `at_s`; raises ReplyError where it is none."""
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise ReplyError(f"an event that is not JSON: {shown(data[:_SAID].decode(errors='replace'))}") from None
        if not isinstance(event, dict):
            raise ReplyError("an event that is not a JSON object")
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise ReplyError(f"the server reports: {shown(str(message))}")
        if isinstance(usage := event.get("usage"), dict):
            self.usage = usage
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], at_s)

    def _choice(self, choice: dict[str, Any], at_s: float) -> None:
        finish = choice.get("finish_reason")
        delta = choice.get("delta")
        held = _content(delta) if isinstance(delta, dict) else choice.get("text")
        if isinstance(held, str):
            self.texts.append(held)
        if finish is not None:
            self.finish = str(finish)
        opens = isinstance(delta, dict) and "role" in delta
        if not held and (finish is not None or opens):
            # The end alone. Of some servers it is also the last token, without text: their count tells.
            self._tail_s = at_s if finish is not None else self._tail_s
            return
        self.events += 1
        self._came(at_s)

    def _came(self, at_s: float) -> None:
        if not self.moments_s or self.moments_s[-1] != at_s:
            self.moments_s.append(at_s)

    def close(self) -> None:
        """The stream has ended. Raises ReplyError where the reply has not."""
        if self._tail_s is not None and self.tokens > self.events:
            self._came(self._tail_s)
        if not self.ended:
            raise ReplyError("the stream ended before the reply did")
        if not self.moments_s or not self.tokens:
            raise ReplyError("a reply without a token")

    @property
    def ended(self) -> bool:
        """Whether the server said that no token will follow."""
        return self.done or self.finish is not None

    @property
    def counted(self) -> bool:
        """Whether the server said how many tokens it sent."""
        return self._used("completion_tokens") is not None

    @property
    def tokens(self) -> int:
        used = self._used("completion_tokens")
        return self.events if used is None else used

    @property
    def prompt_tokens(self) -> int | None:
        return self._used("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server found in its prefix cache, where it says so."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def _used(self, key: str) -> int | None:
        return _count(self.usage.get(key))


def _content(delta: dict[str, Any]) -> Any:
    """What a chat's event adds: text, thought aloud or not, or a call of a tool."""
    for key in ("content", "reasoning_content", "reasoning"):
        if delta.get(key):
            return delta[key]
    return delta.get("tool_calls") or delta.get("content")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None
