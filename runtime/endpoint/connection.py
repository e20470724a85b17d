"""How is one request sent, and what can go wrong until its last token?

Nothing is believed of a server: it may refuse, hang before or between tokens, reset, send garbage without end, or send
the client elsewhere. Each of these ends its own request with a reason, and no other.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.stream import MOST_BYTES_A_TOKEN, MOST_EVENT_BYTES, Events, Reply, ReplyError, shown
from membound.simulator.scheduling.loop import Clock

# A pool looks through all its connections for each request, so many small ones serve a thousand users.
_CONNECTIONS_A_POOL = 32
# Idle connections are given up before servers do so (uvicorn, which serves vLLM and SGLang: after 5 s), for a request
# on a connection that is just being closed would look like a failure of the server.
_IDLE_S = 2.0
# Files besides connections: the index of runs, the terminal, libraries that are still being loaded.
_SPARE_FILES = 256
# A deadline costs more than an event, so it is renewed in steps of this share of the time between tokens.
_RENEWED = 0.1
# What follows the last token (a count, the end of the stream) is waited for, so that the connection can be used again.
_END_S = 5.0
# A server that takes no notice of how many tokens were asked for may go on for ever, a few bytes at a time.
_MOST_EVENTS_A_TOKEN = 4
_MOST_ANSWER_BYTES = 8 << 20
_MOST_ERROR_BYTES = 1 << 14


class Connections:
    """Connections to one server, as many as there are requests at a time; opened when needed, closed together.

    Proxies and names of users in the environment are left out: what is measured is the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._headers = {"accept-encoding": "identity", "user-agent": "membound"}
        if endpoint.api_key:
            self._headers["authorization"] = f"Bearer {endpoint.api_key}"
        https = endpoint.base_url.startswith("https:")
        self._verify: ssl.SSLContext | bool = httpx2.create_ssl_context(trust_env=False) if https else False
        self._pools: list[httpx2.AsyncClient] = []
        self._used: list[int] = []

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools:
            await pool.aclose()

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a short answer; raises ReplyError."""
        with _told():
            async with asyncio.timeout(timeout_s), self._pool() as pool, pool.stream("GET", url) as response:
                _check_here(response)
                return response.status_code, await _body(response, _MOST_ANSWER_BYTES)
        raise AssertionError("without a reply every error is raised")

    async def ask(
        self,
        url: str,
        body: dict[str, Any],
        most_tokens: int,
        clock: Clock,
        on_tokens: Callable[[int], None] = lambda events: None,
    ) -> Reply:
        """Sends a request and reads its reply to the end; raises ReplyError, or Refused where the server said no."""
        patience, loop = self.endpoint.patience, asyncio.get_running_loop()
        most_bytes = MOST_EVENT_BYTES + MOST_BYTES_A_TOKEN * most_tokens
        content = json.dumps(body).encode()
        reply = Reply(clock.now_s())
        with _told(reply):
            async with asyncio.timeout(patience.first_token_s) as deadline, self._pool() as pool:
                headers = {"content-type": "application/json"}
                async with pool.stream("POST", url, content=content, headers=headers) as response:
                    await self._check(response)
                    events, received_bytes, renewed_s = Events(), 0, -math.inf
                    async for received in response.aiter_raw():
                        at_s = clock.now_s()
                        received_bytes += len(received)
                        if received_bytes > most_bytes:
                            raise ReplyError(
                                f"more than {MOST_BYTES_A_TOKEN >> 10} KiB for each token that was asked for"
                            )
                        before = reply.events
                        for event in events.feed(received):
                            reply.take(event, at_s)
                        if reply.events > _MOST_EVENTS_A_TOKEN * (most_tokens + 1):
                            raise ReplyError(f"more than {_MOST_EVENTS_A_TOKEN} events for each token asked for")
                        if reply.ended:
                            deadline.reschedule(loop.time() + min(_END_S, patience.next_token_s))
                        elif reply.events > before and at_s > renewed_s + _RENEWED * patience.next_token_s:
                            deadline.reschedule(loop.time() + (1 + _RENEWED) * patience.next_token_s)
                            renewed_s = at_s
                        if reply.events > before:
                            on_tokens(reply.events - before)
                    for event in events.end():
                        reply.take(event, clock.now_s())
        reply.close()
        return reply

    async def _check(self, response: httpx2.Response) -> None:
        """Raises unless the response is a stream of events."""
        _check_here(response)
        if response.status_code != 200:
            said = await _body(response, _MOST_ERROR_BYTES, cut=True)
            message = f"status {response.status_code}: {_message(said)}" if said else f"status {response.status_code}"
            raise Refused(response.status_code, self.endpoint.hidden(message))
        kind = response.headers.get("content-type", "text/event-stream").partition(";")[0].strip()
        if kind != "text/event-stream":
            raise ReplyError(f"answered with '{shown(kind)}', not with a stream of events")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ReplyError("the stream is compressed, though that was not accepted")

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[httpx2.AsyncClient]:
        """The first pool with a free connection, so that connections are used again where that is possible."""
        number = next((n for n, used in enumerate(self._used) if used < _CONNECTIONS_A_POOL), len(self._pools))
        if number == len(self._pools):
            self._pools.append(self._new_pool())
            self._used.append(0)
        self._used[number] += 1
        try:
            yield self._pools[number]
        finally:
            self._used[number] -= 1

    def _new_pool(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            verify=self._verify,
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=self.endpoint.patience.connect_s),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
            follow_redirects=False,
            trust_env=False,
        )


class Refused(ReplyError):
    """The server answered a request with an error of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _told:
    """Turns whatever ends a request into a ReplyError that says it; a reply that has all its tokens is one."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.reply = reply

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        reason = None if error is None or isinstance(error, ReplyError) else self._reason(error)
        if reason is None:
            return False
        if self.reply is not None and self.reply.ended:
            return True
        raise ReplyError(reason) from None

    def _reason(self, error: BaseException) -> str | None:
        match error:
            case httpx2.ConnectTimeout():
                return "no connection in time"
            case TimeoutError():
                if self.reply is None:
                    return "no answer in time"
                return "no further token in time" if self.reply.moments_s else "no first token in time"
            case httpx2.ConnectError():
                return _connect_reason(error)
            case httpx2.ReadError() | httpx2.WriteError() | httpx2.RemoteProtocolError() | httpx2.CloseError():
                return "the connection broke off" if self.reply and self.reply.moments_s else _broken(error)
            case httpx2.HTTPError() | httpx2.InvalidURL() | ssl.SSLError():
                return f"{type(error).__name__}: {shown(str(error))}"
            case OSError():
                return _connect_reason(error)
            case _:
                return None


def _broken(error: BaseException) -> str:
    protocol = isinstance(error, httpx2.RemoteProtocolError)
    return f"no HTTP answer: {shown(str(error))}" if protocol else "the connection broke off before an answer"


def _connect_reason(error: BaseException) -> str:
    causes: list[BaseException] = [error]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return "this machine allows no more open files; raise them with `ulimit -n`"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        causes += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        causes += [inner for inner in (cause.__cause__, cause.__context__) if inner is not None and inner not in causes]
    return f"no connection: {shown(str(error))}"


def _check_here(response: httpx2.Response) -> None:
    """Redirects are not followed: another address is another server."""
    if 300 <= response.status_code < 400:
        target = response.headers.get("location", "nowhere").partition("?")[0]
        raise ReplyError(f"redirected to {shown(target)}, which is not followed; give that address itself")


async def _body(response: httpx2.Response, most: int, cut: bool = False) -> bytes:
    body = b""
    async for received in response.aiter_raw():
        body += received
        if len(body) > most:
            if cut:
                return body[:most]
            raise ReplyError(f"an answer of more than {most >> 10} KiB")
    return body


def _message(said: bytes) -> str:
    """What an error's body says: the message of OpenAI's form, else its beginning."""
    try:
        document = json.loads(said)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        error = document.get("error", document)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if message:
            return shown(str(message))
    return shown(said.decode(errors="replace"))


def allow_files(connections: int, certain: bool) -> None:
    """Makes room for so many connections at a time, each of which is an open file.

    Raises MemboundError where the system does not allow as many as a run is `certain` to need.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return
    needed = connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if certain and allowed < needed:
        raise MemboundError(
            f"{connections} connections at a time need {needed} open files, and this machine allows {hard}; "
            "raise that with `ulimit -Hn`, or lower workload.arrivals.concurrency"
        )
