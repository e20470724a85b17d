"""Does the other process answer what a page asks, once, and again after it was killed?"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from membound.app.engine_choice import EngineChoice, effects_of
from membound.app.views import background
from membound.roofline.errors import MemboundError

LLAMA = EngineChoice("Llama-3.1-8B", "H100-SXM5", 1, "graphs", 8, 2048, "tpot_s")


def test_an_answer_comes_from_another_process_once_and_is_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    first, second = (background.ask(LLAMA.key, effects_of, LLAMA, ("weight_quantization",)) for _ in range(2))
    assert first is second
    (effect,) = first.result(timeout=120).values()
    (here,) = effects_of(LLAMA, ("weight_quantization",)).values()
    assert effect.gain("tpot_s") == here.gain("tpot_s") and effect.technique == here.technique


def test_a_sweep_is_the_same_question_at_each_of_its_points_and_for_each_metric() -> None:
    other = LLAMA.at(batch=64)
    assert (
        LLAMA.sweep_key("batch")
        == other.sweep_key("batch")
        == replace(other, metric="output_tokens_per_s").sweep_key("batch")
    )
    assert LLAMA.sweep_key("ctx") != other.sweep_key("ctx") and LLAMA.sweep_key("ctx") != LLAMA.sweep_key("batch")
    assert LLAMA.at(context=4096).sweep_key("batch") != LLAMA.sweep_key("batch")
    assert LLAMA.effects_key != other.effects_key and LLAMA.key != replace(LLAMA, metric="output_tokens_per_s").key


@pytest.mark.parametrize("many", range(12))
def test_what_is_asked_in_parts_comes_back_in_its_order_and_in_no_more_parts_than_are_computed_at_once(
    many: int,
) -> None:
    parts = background.parts_of(range(many))
    assert background.in_order(parts) == list(range(many)) and len(parts) == min(many, background.PROCESSES)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


def test_parts_are_waited_for_together() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    for at, future in enumerate(futures):
        future.set_result(at)
    assert background.answers(futures, "parts") == [0, 1]


def test_what_cannot_be_is_refused_with_its_sentence() -> None:
    unknown = LLAMA.having(("w8a8", "weight_quantization"))
    with pytest.raises(MemboundError, match="weights cannot be"):
        background.ask(unknown.key, effects_of, unknown, ("eagle",)).result(timeout=120)


def test_a_process_that_is_killed_is_replaced() -> None:
    killed = background.ask("pid", os.getpid).result(timeout=120)
    assert killed != os.getpid()
    broken = background.ask("kill", os.kill, killed, signal.SIGKILL)
    broken.exception(timeout=120)
    again = background.ask("kill", os.getpid)
    assert again.result(timeout=120) not in (killed, os.getpid())


def test_a_process_that_is_killed_under_a_page_is_one_sentence() -> None:
    broken: Future[int] = Future()
    broken.set_exception(BrokenProcessPool())
    with pytest.raises(MemboundError, match="reload the page"):
        background.answer(broken, "kill")
