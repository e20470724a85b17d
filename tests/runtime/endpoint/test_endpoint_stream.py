"""Are the moments and the count of a reply's tokens those that the server sent, however the network cuts its stream?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.runtime.endpoint.stream import MOST_EVENT_BYTES, Events, Reply, ReplyError, shown


def said(*documents: Any, ending: str = "\n\n") -> bytes:
    return "".join(f"data: {d if isinstance(d, str) else json.dumps(d)}{ending}" for d in documents).encode()


def text(content: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": content, "finish_reason": finish}]}


def chat(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


def used(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def reply_of(*documents: Any) -> Reply:
    """A reply whose events came one a second."""
    reply = Reply(0.0)
    for second, document in enumerate(documents, start=1):
        reply.take(document.encode() if isinstance(document, str) else json.dumps(document).encode(), float(second))
    reply.close()
    return reply


@given(
    cuts=st.lists(st.integers(0, 400), max_size=12),
    ending=st.sampled_from(["\n\n", "\r\n\r\n"]),
    words=st.lists(st.text(max_size=8), min_size=1, max_size=5),
)
def test_where_the_network_cuts_the_stream_does_not_matter(cuts: list[int], ending: str, words: list[str]) -> None:
    stream = b": a comment\n" + said(*[text(word) for word in words], "[DONE]", ending=ending)
    whole = list(Events().feed(stream))
    events, found, before = Events(), [], 0
    for cut in sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)}):
        found += events.feed(stream[before:cut])
        before = cut
    assert found == whole
    assert [json.loads(data)["choices"][0]["text"] for data in whole[:-1]] == words


def test_an_event_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    events = Events()
    with pytest.raises(ReplyError, match="more than 1 MiB"):
        for _ in range(MOST_EVENT_BYTES // 1000):
            list(events.feed(b"data: " + b"x" * 2000))
    many_lines = Events()
    with pytest.raises(ReplyError, match="more than 1 MiB"):
        for _ in range(MOST_EVENT_BYTES // 1000):
            list(many_lines.feed(b"data: " + b"x" * 2000 + b"\n"))


def test_the_last_event_needs_no_empty_line_behind_it() -> None:
    events = Events()
    assert list(events.feed(b"data: 1\n\ndata: 2")) == [b"1"]
    assert list(events.end()) == [b"2"]


def test_several_tokens_in_an_event_are_one_moment_and_counted_by_the_server() -> None:
    reply = reply_of(text("a b c"), text(" d e", "length"), used(5), "[DONE]")
    assert reply.moments_s == [1.0, 2.0]
    assert (reply.tokens, reply.events, reply.prompt_tokens, reply.counted) == (5, 2, 3, True)


def test_events_of_one_read_are_one_moment() -> None:
    reply = Reply(0.0)
    for document in (text("a"), text("b"), text("c", "stop")):
        reply.take(json.dumps(document).encode(), 1.5)
    reply.close()
    assert (reply.moments_s, reply.tokens) == ([1.5], 3)


def test_a_chat_begins_with_its_first_text_not_with_its_role() -> None:
    reply = reply_of(chat(role="assistant", content=""), chat(content="Hi"), chat(content="!"), chat("stop"), used(2))
    assert (reply.moments_s, reply.tokens, reply.text) == ([2.0, 3.0], 2, "Hi!")


def test_thinking_aloud_is_tokens() -> None:
    reply = reply_of(chat(role="assistant"), chat(reasoning_content="hm"), chat(content="Hi", finish="stop"))
    assert (reply.moments_s, reply.tokens) == ([2.0, 3.0], 2)


def test_a_token_without_text_is_a_token_where_the_server_counts_it() -> None:
    assert reply_of(text("a"), text(""), text("b", "length"), used(3)).moments_s == [1.0, 2.0, 3.0]
    assert reply_of(text("a"), text("", "stop"), used(2)).moments_s == [1.0, 2.0]
    assert reply_of(text("a"), text("", "stop"), used(1)).moments_s == [1.0]


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (["<html>"], "not JSON"),
        (["[" * 100_000], "not JSON"),
        (["[1]"], "not a JSON object"),
        ([{"error": {"message": "out of\nmemory"}}], "the server reports: out of memory"),
        ([{"error": "gone"}], "the server reports: gone"),
        ([text("a")], "ended before the reply did"),
        ([], "ended before the reply did"),
        (["[DONE]"], "without a token"),
        ([text("", "stop"), used(0), "[DONE]"], "without a token"),
    ],
)
def test_what_is_no_reply_says_why(documents: list[Any], reason: str) -> None:
    with pytest.raises(ReplyError, match=reason):
        reply_of(*documents)


@pytest.mark.parametrize("count", [-1, 1.5, "7", True, None, 10**30])
def test_a_count_that_is_none_is_not_believed(count: Any) -> None:
    reply = reply_of(text("a"), text("b", "stop"), {"usage": {"completion_tokens": count}})
    assert (reply.tokens, reply.counted) == (2, False)


def test_what_a_server_says_is_shown_short_and_without_control_characters() -> None:
    assert shown("a\x1b[31m\nb") == "a [31m b"
    assert len(shown("x" * 10_000)) == 200
