"""What holds of every run against a server: nothing is lost, no time is made up, and what was asked for is sent."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.measure import measure
from membound.simulator.scheduling.workload import requests_for

SESSIONS = {
    "kind": "sessions",
    "tokens": {"kind": "fixed", "tokens": 6},
    "turns": {"kind": "fixed", "count": 3},
    "think": {"kind": "fixed", "seconds": 0.005},
    "system_tokens": 10,
}


def measured_requests(server, run):
    """The requests of a run, without those that came before it."""
    return server.asked[-int(np.isfinite(run.requests["sent_s"]).sum()) :]


def test_every_request_ends_once_and_its_gaps_sum_to_its_time(serving, well, scenario) -> None:
    asked = scenario()
    with serving(partial(well, gap_s=0.002)) as server:
        run = measure(asked, Endpoint.of(server.url))
    table = run.requests
    assert table["id"].tolist() == sorted(request.id for request in requests_for(asked))
    assert run.summary.completed == run.summary.requests == 12
    assert table["output_tokens"].tolist() == [request.output_tokens for request in requests_for(asked)]
    assert table["prompt_tokens"].tolist() == [request.prompt_tokens for request in requests_for(asked)]
    spans = table["finished_s"] - table["first_token_s"]
    assert np.sum(spans) == pytest.approx(np.sum(run.itl_s.values()), abs=1e-9)
    assert len(run.itl_s) <= int(np.sum(table["output_tokens"] - 1))
    assert (table["first_token_s"] > table["arrival_s"]).all()


def test_no_more_users_than_asked_for_are_served_at_a_time(serving, well, scenario) -> None:
    asked = scenario(arrivals={"kind": "closed_loop", "concurrency": 3}, requests=20)
    with serving(partial(well, gap_s=0.002)) as server:
        measure(asked, Endpoint.of(server.url))
    assert server.most == 3


def test_an_open_loop_keeps_its_arrivals_whatever_the_server_does(serving, well, scenario) -> None:
    asked = scenario(arrivals={"kind": "poisson", "rate_rps": 50.0}, requests=25)
    with serving(partial(well, before_s=0.8)) as server:
        run = measure(asked, Endpoint.of(server.url))
    wanted = np.array([request.arrival_s for request in requests_for(asked)])
    assert run.requests["arrival_s"].tolist() == wanted.tolist()
    late_s = run.requests["sent_s"] - wanted
    assert late_s.min() >= -1e-3
    assert np.median(late_s) < 0.4  # the first answer comes after 0.8 s
    assert server.most > 5  # it did not wait for answers


def test_a_thousand_requests_at_a_time_all_end_and_leave_no_file_open(serving, well, scenario) -> None:
    async def answers_when_all_have_come(exchange) -> None:
        exchange.server.crowd = exchange.server.crowd or exchange.number < 3 or exchange.server.now == 1000
        while not exchange.server.crowd:
            await asyncio.sleep(0.05)
        exchange.server.crowd = exchange.number >= 3
        await well(exchange)

    asked = scenario(
        arrivals={"kind": "closed_loop", "concurrency": 1000},
        requests=1000,
        output_tokens={"kind": "fixed", "tokens": 2},
    )
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with serving(answers_when_all_have_come) as server:
        run = measure(asked, Endpoint.of(server.url))
    assert run.summary.completed == 1000
    assert server.most == 1000
    if files is not None:
        assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_each_turn_has_the_conversation_before_it(serving, well, scenario) -> None:
    asked = scenario(prompts=SESSIONS, requests=9, output_tokens={"kind": "fixed", "tokens": 4})
    for api in ("/v1/completions", "/v1/chat/completions"):
        with serving(well) as server:
            run = measure(asked, Endpoint.of(server.url + api))
        assert run.summary.completed == 9
        bodies = [body for _, _, body in measured_requests(server, run)]
        if api.endswith("chat/completions"):
            histories = [body["messages"] for body in bodies]
            turns = sorted(len(history) for history in histories)
            assert turns == [1, 1, 1, 3, 3, 3, 5, 5, 5]
            assert all(message["content"] == " word" * 4 for history in histories for message in history[1::2])
            assert all(
                any(h[: len(g)] == g for h in histories if len(h) == len(g) + 2) for g in histories if len(g) < 5
            )
        else:
            prompts = sorted((body["prompt"] for body in bodies), key=len)
            assert all(any(p.startswith(q + " word" * 4) for p in prompts) for q in prompts[:6])
            assert {len(prompt.split()) for prompt in prompts} == {16, 26, 36}


def test_a_conversation_that_fails_leaves_its_other_turns_unsent_and_recorded(serving, well, scenario) -> None:
    async def second_turns_fail(exchange) -> None:
        if len(exchange.body["messages"]) == 3:
            await exchange.error(500, "no second turns")
        else:
            await well(exchange)

    asked = scenario(prompts=SESSIONS, requests=9, output_tokens={"kind": "fixed", "tokens": 2})
    with serving(second_turns_fail) as server:
        run = measure(asked, Endpoint.of(server.url + "/v1/chat/completions"))
    assert (run.summary.requests, run.summary.completed, run.summary.failed) == (9, 3, 6)
    assert sum("not sent" in reason for reason in run.requests["reason"]) == 3


def test_equal_prefixes_are_equal_and_content_is_new_in_each_run(serving, well, scenario) -> None:
    asked = scenario()
    prompts = []
    for _ in range(2):
        with serving(well) as server:
            run = measure(asked, Endpoint.of(server.url))
        prompts.append({tuple(body["prompt"]) for _, _, body in measured_requests(server, run)})
    assert len(prompts[0]) == len(prompts[1]) == 12
    assert not prompts[0] & prompts[1]
    assert sorted(map(len, prompts[0])) == sorted(map(len, prompts[1]))


def test_recorded_prompts_are_sent_as_their_text(serving, well, scenario) -> None:
    asked = scenario(prompts={"kind": "text", "file": "live"}, requests=4)
    with serving(well) as server:
        run = measure(asked, Endpoint.of(server.url))
    path, _, body = server.asked[-1]
    assert path.endswith("/chat/completions") and len(body["messages"][0]["content"]) > 20
    assert any("prefix cache" in note for note in run.provenance.notes)


@pytest.mark.parametrize("lacking", ["ids", "ignore_eos", "stream_options", "completions"])
def test_what_a_server_does_not_take_is_left_out_and_said(serving, well, scenario, lacking) -> None:
    async def picky(exchange) -> None:
        body = exchange.body
        has = {
            "ids": isinstance(body.get("prompt"), list),
            "ignore_eos": "ignore_eos" in body or "min_tokens" in body,
            "stream_options": "stream_options" in body,
            "completions": not exchange.chat,
        }
        if has[lacking]:
            await exchange.error(404 if lacking == "completions" else 400, f"no {lacking} here")
        else:
            await well(exchange)

    with serving(picky) as server:
        run = measure(scenario(), Endpoint.of(server.url))
    assert run.summary.completed == 12
    notes = " ".join(run.provenance.notes)
    said = {
        "ids": "(text, completions)",
        "ignore_eos": "no ignore_eos",
        "stream_options": "does not count tokens",
        "completions": "(text, chat)",
    }
    assert said[lacking] in notes


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_at_first_is_measured_in_the_form_that_it_takes(serving, well, scenario, status) -> None:
    async def busy(exchange) -> None:
        await (exchange.error(status, "no room") if exchange.number < 3 else well(exchange))

    with serving(busy) as server:
        run = measure(scenario(), Endpoint.of(server.url, patience_s=0.5))
    assert run.summary.completed == 12
    assert all(isinstance(body["prompt"], list) and body["ignore_eos"] for _, _, body in server.asked)
    said = pytest.raises(MemboundError, match=f"not for its form: status {status}: no room; measure it when")
    with serving(lambda exchange: exchange.error(status, "no room")) as server, said:
        measure(scenario(), Endpoint.of(server.url, patience_s=0.1))
    assert len(server.asked) == 5 and all(body == server.asked[0][2] for _, _, body in server.asked)


def test_answers_that_end_early_are_said(serving, well, scenario) -> None:
    async def short(exchange) -> None:
        await exchange.head()
        await exchange.event(exchange.token(finish="stop"))
        await exchange.end(exchange.usage(1))

    with serving(short) as server:
        run = measure(scenario(output_tokens={"kind": "fixed", "tokens": 8}), Endpoint.of(server.url))
    assert run.summary.completed == 12
    assert run.summary.output_tokens_per_s == pytest.approx(12 / run.summary.duration_s)
    assert any("12% of the tokens asked for" in note for note in run.provenance.notes)


def test_the_key_is_sent_and_in_no_record(serving, well, scenario, monkeypatch) -> None:
    async def talkative(exchange) -> None:
        if exchange.number > 4:
            await exchange.error(500, f"your key is {exchange.headers.get('authorization')}")
        else:
            await well(exchange)

    monkeypatch.setenv("SOME_KEY", "s3cr3t-of-mine")
    with serving(talkative) as server:
        run = measure(scenario(), Endpoint.of(server.url, api_key_env="SOME_KEY"))
    assert all(headers["authorization"] == "Bearer s3cr3t-of-mine" for _, headers, _ in server.asked)
    assert "s3cr3t" not in repr(run.to_json()) + repr(run.requests["reason"].tolist())
    assert any("(key)" in reason for reason in run.requests["reason"])


def test_a_run_ends_at_once_when_its_watcher_ends_it(serving, well, scenario) -> None:
    class Ended(Exception):
        pass

    async def hangs_in_the_run(exchange) -> None:
        await well(exchange, before_s=60.0 if exchange.number > 2 else 0.0)

    def stop(fraction: float, message: str) -> None:
        if "4 under way" in message:
            raise Ended

    began_s = time.monotonic()
    with serving(hangs_in_the_run) as server, pytest.raises(Ended):
        measure(scenario(), Endpoint.of(server.url), stop)
    assert time.monotonic() - began_s < 40  # the server takes 60 s
