"""Whatever a server does wrong, does it end only the requests that it did it to, with a reason, and in time?"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.measure import measure, need_answers


async def hangs_before(exchange) -> None:
    await exchange.head()
    await asyncio.sleep(60)


async def hangs_between(exchange) -> None:
    await exchange.head()
    await exchange.event(exchange.token())
    await asyncio.sleep(60)


async def comments_forever(exchange) -> None:
    await exchange.head()
    await exchange.event(exchange.token())
    while True:
        await exchange.raw(b": still here\n\n")
        await asyncio.sleep(0.02)


async def never_answers(exchange) -> None:
    await asyncio.sleep(60)


async def resets_before(exchange) -> None:
    exchange.reset()
    raise ConnectionResetError


async def resets_between(exchange) -> None:
    await exchange.head()
    await exchange.event(exchange.token())
    await asyncio.sleep(0.02)
    exchange.reset()
    raise ConnectionResetError


async def ends_between(exchange) -> None:
    await exchange.head()
    await exchange.event(exchange.token())
    await exchange.last_chunk()


async def html(exchange) -> None:
    await exchange.head(200, "text/html; charset=utf-8")
    await exchange.raw(b"<html><body>Welcome</body></html>")
    await exchange.last_chunk()


async def html_as_events(exchange) -> None:
    await exchange.head()
    await exchange.raw(b"data: <html>Welcome</html>\n\n")
    await exchange.last_chunk()


async def bytes_of_noise(exchange) -> None:
    exchange.writer.write(b"\x00\xff\x13 nonsense\r\n\r\n")
    await exchange.writer.drain()
    raise ConnectionResetError


async def long_lines(exchange) -> None:
    await exchange.head()
    for _ in range(160):
        await exchange.raw(b"x" * 65536)
    await exchange.last_chunk()


async def endless_tokens(exchange) -> None:
    await exchange.head()
    while True:
        await exchange.event(*[exchange.token("x" * 1000)] * 100)


async def more_tokens_than_asked_for(exchange) -> None:
    await exchange.head()
    while True:
        await exchange.event(exchange.token())
        await asyncio.sleep(0.005)


async def server_error(exchange) -> None:
    await exchange.error(500, "out of memory")


async def elsewhere(exchange) -> None:
    await exchange.head(307, "text/plain", location="http://192.0.2.1:1/v1/completions")
    await exchange.last_chunk()


async def error_in_stream(exchange) -> None:
    await exchange.head()
    await exchange.event(exchange.token(), {"error": {"message": "engine died"}})
    await exchange.last_chunk()


async def compressed(exchange) -> None:
    await exchange.head(content_encoding="gzip")
    await exchange.raw(b"\x1f\x8b" * 10)
    await exchange.last_chunk()


FAULTS = {
    hangs_before: "no first token in time",
    hangs_between: "no further token in time",
    comments_forever: "no further token in time",
    never_answers: "no first token in time",
    resets_before: "broke off|no HTTP answer",
    resets_between: "the connection broke off",
    ends_between: "ended before the reply did",
    html: "answered with 'text/html'",
    html_as_events: "not JSON",
    bytes_of_noise: "no HTTP answer",
    long_lines: "more than 1",
    endless_tokens: "more than (16 KiB|4 events) for each token",
    more_tokens_than_asked_for: "more than 4 events for each token",
    server_error: "status 500: out of memory",
    elsewhere: "redirected to http://192.0.2.1:1",
    error_in_stream: "engine died",
    compressed: "compressed",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_ends_its_own_request_and_the_others_finish(serving, well, scenario, fault) -> None:
    async def sometimes(exchange) -> None:
        await (fault if exchange.number % 4 == 3 else well)(exchange)

    with serving(sometimes) as server:
        began_s = time.monotonic()
        run = measure(scenario(), Endpoint.of(server.url, patience_s=1.0))
        assert time.monotonic() - began_s < 30  # a server that hangs does so for 60 s
    summary, reasons = run.summary, [reason for reason in run.requests["reason"] if reason]
    assert summary.completed + summary.failed == summary.requests == 12
    assert summary.failed == len(reasons) == 3
    for reason in reasons:
        assert re.search(FAULTS[fault], reason), reason
        assert "\n" not in reason and "Traceback" not in reason
    counted = [int(note.split()[0]) for note in run.provenance.notes if " of 12 requests failed: " in note]
    assert sum(counted) == summary.failed  # how an endless answer arrives decides which limit it passes first


def test_after_all_faults_nothing_is_left_open(serving, well, scenario) -> None:
    faults = [fault for fault in FAULTS if fault not in (long_lines, endless_tokens)]

    async def anything(exchange) -> None:
        good = exchange.number < 3 or exchange.number % 2
        await (well if good else faults[exchange.number // 2 % len(faults)])(exchange)

    asked = scenario(arrivals={"kind": "closed_loop", "concurrency": 20}, requests=200)
    counted = Path("/proc/self/fd").is_dir()
    before = len(os.listdir("/proc/self/fd")) if counted else 0
    with serving(anything) as server:
        run = measure(asked, Endpoint.of(server.url, patience_s=1.0))
    assert run.summary.completed + run.summary.failed == 200
    assert 90 <= run.summary.completed <= 110
    assert not counted or len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize(
    "fault", [hangs_before, html, server_error, elsewhere, resets_before], ids=lambda f: f.__name__
)
def test_a_server_that_answers_nothing_is_one_sentence(serving, scenario, fault) -> None:
    with serving(fault) as server, pytest.raises(MemboundError, match=r"endpoint 'http://127\.0\.0\.1:") as error:
        measure(scenario(), Endpoint.of(server.url, patience_s=0.3))
    assert "\n" not in str(error.value)


def test_a_server_that_answers_only_the_first_requests_has_a_result_and_no_comparison(serving, well, scenario) -> None:
    async def dies(exchange) -> None:
        await (well if exchange.number < 3 else server_error)(exchange)

    with serving(dies) as server:
        run = measure(scenario(), Endpoint.of(server.url))
    assert (run.summary.completed, run.summary.failed, run.summary.ttft_s.mean) == (0, 12, None)
    with pytest.raises(MemboundError, match="answered no request: 12 of 12 requests failed: status 500"):
        need_answers(run)


def test_a_slow_server_is_waited_for_as_long_as_each_token_comes_in_time(serving, well, scenario) -> None:
    async def slow(exchange) -> None:
        await well(exchange, gap_s=0.4, before_s=0.3)

    asked = scenario(requests=4, output_tokens={"kind": "fixed", "tokens": 4})
    with serving(slow) as server:
        run = measure(asked, Endpoint.of(server.url, patience_s=1.2))
    assert run.summary.completed == 4
    assert run.summary.e2e_s.mean > 1.2
    assert run.summary.itl_s.p50 == pytest.approx(0.4, rel=0.3)


def test_a_finished_reply_counts_though_its_stream_never_ends(serving, scenario) -> None:
    async def no_end(exchange) -> None:
        await exchange.head()
        await exchange.event(exchange.token(), exchange.token(finish="length"), exchange.usage(exchange.tokens))
        await asyncio.sleep(60)

    with serving(no_end) as server:
        run = measure(scenario(requests=4), Endpoint.of(server.url, patience_s=0.3))
    assert run.summary.completed == 4


@pytest.mark.parametrize(
    "answer", [b"<html>Welcome</html>", b'{"data": [oops', b'{"data": "\xff\xfe"}', b"[1, 2]", b""]
)
def test_models_that_cannot_be_read_are_one_sentence(answer: bytes, scenario) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(MemboundError, match=r"answered with status 200 and '.*'; name the model with") as error:
            measure(scenario(), Endpoint.of(url))
    assert "\n" not in str(error.value)


def test_a_server_that_lists_no_models_in_time_is_waited_for_no_longer_than_was_said(scenario) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began_s = time.monotonic()
        with pytest.raises(MemboundError, match="no answer in time"):
            measure(scenario(), Endpoint.of(f"http://127.0.0.1:{deaf.getsockname()[1]}", patience_s=0.3))
    assert time.monotonic() - began_s < 20


def test_an_address_where_nobody_listens_is_one_sentence(scenario) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MemboundError, match="cannot be used: connection refused"):
            measure(scenario(), Endpoint.of(f"http://localhost:{port}"))


def test_several_models_are_listed_and_one_is_taken_by_its_name(serving, well, scenario) -> None:
    with serving(well, models=("one", "two")) as server:
        with pytest.raises(MemboundError, match="has the models one, two; name the model with --endpoint-model"):
            measure(scenario(), Endpoint.of(server.url))
        measure(scenario(), Endpoint.of(server.url, model="two"))
    assert {body["model"] for _, _, body in server.asked} == {"two"}


def test_a_refused_key_is_one_sentence(serving, scenario) -> None:
    async def refuses(exchange) -> None:
        await exchange.error(401, "who are you")

    with serving(refuses) as server, pytest.raises(MemboundError, match=r"refuses the key.*--api-key-env"):
        measure(scenario(), Endpoint.of(server.url))
