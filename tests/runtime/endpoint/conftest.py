"""A server that speaks OpenAI's protocol as well, or as badly, as a test asks; standard library only."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from membound.roofline.scenario import Scenario, parse_scenario

Behaviour = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request, and what can be written in answer to it."""

    server: FakeServer
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    number: int

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def tokens(self) -> int:
        return int(self.body.get("max_tokens") or self.body["max_completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        if self.chat:
            return sum(len(message["content"].split()) for message in self.body["messages"])
        prompt = self.body["prompt"]
        return len(prompt) if isinstance(prompt, list) else len(prompt.split())

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Status", f"content-type: {kind}", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        if not data:
            return  # a chunk of nothing is the last one
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, *documents: Any) -> None:
        """Sends the events in one write."""
        said = "".join(f"data: {d if isinstance(d, str) else json.dumps(d)}\n\n" for d in documents)
        await self.raw(said.encode())

    def token(self, text: str = " word", finish: str | None = None) -> dict[str, Any]:
        held = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish, **held}]}

    def usage(self, tokens: int) -> dict[str, Any]:
        return {"choices": [], "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens}}

    async def end(self, *documents: Any) -> None:
        """Sends the last events and the end of the body."""
        await self.event(*documents, "[DONE]")
        await self.last_chunk()

    async def last_chunk(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def error(self, status: int, message: str) -> None:
        await self.head(status, "application/json")
        await self.raw(json.dumps({"error": {"message": message}}).encode())
        await self.last_chunk()

    def reset(self) -> None:
        """Ends the connection as a killed process does."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def well(exchange: Exchange, gap_s: float = 0.0, before_s: float = 0.0) -> None:
    """One token an event, then the count of tokens."""
    await exchange.head()
    await asyncio.sleep(before_s)
    if exchange.chat:
        await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number in range(exchange.tokens):
        if number:
            await asyncio.sleep(gap_s)
        await exchange.event(exchange.token(finish="length" if number == exchange.tokens - 1 else None))
    await exchange.end(exchange.usage(exchange.tokens))


@dataclass
class FakeServer:
    """Answers with `behaviour`, and remembers what it was asked and how many it answered at a time."""

    behaviour: Behaviour = well
    models: tuple[str, ...] = ("fake",)
    metrics: Callable[[FakeServer], str] | None = None
    url: str = ""
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    now: int = 0
    most: int = 0
    open: int = 0
    crowd: bool = False
    times_s: list[float] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while (exchange := await self._read(reader, writer)) is not None:
                await self._answer(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
        first = (await reader.readline()).decode()
        if not first:
            return None
        headers = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Exchange(self, first.split()[1], headers, json.loads(body or b"{}"), writer, len(self.asked))

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path.endswith("/models") or exchange.path.endswith("/metrics"):
            await self._tell(exchange)
            return
        self.asked.append((exchange.path, exchange.headers, exchange.body))
        self.times_s.append(asyncio.get_running_loop().time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.behaviour(exchange)
        finally:
            self.now -= 1

    async def _tell(self, exchange: Exchange) -> None:
        if exchange.path.endswith("/models"):
            await exchange.head(200, "application/json")
            await exchange.raw(json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        elif self.metrics is None:
            await exchange.head(404, "application/json")
        else:
            await exchange.head(200, "text/plain")
            await exchange.raw(self.metrics(self).encode())
        await exchange.last_chunk()


@contextmanager
def serving(behaviour: Behaviour = well, **options: Any) -> Iterator[FakeServer]:
    """A server on a port of its own, in a thread of its own."""
    fake = FakeServer(behaviour, **options)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, backlog=2048)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()

    stop = asyncio.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(main())
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture(name="serving")
def _serving() -> Callable[..., Any]:
    """A context with a server that behaves as asked."""
    return serving


@pytest.fixture(name="well")
def _well() -> Behaviour:
    """The behaviour of a server that does all right."""
    return well


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """A small scenario, with parts of its workload as asked."""

    def make(**workload: Any) -> Scenario:
        given: dict[str, Any] = {
            "arrivals": {"kind": "closed_loop", "concurrency": 4},
            "requests": 12,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 5, "high": 30}},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 6},
        }
        return parse_scenario(
            {"name": "asked", "model": "SmolLM2-135M", "hardware": "H100-SXM5", "workload": given | workload}
        )

    return make
