"""Does a page that watches a run follow it by asking for little, and not run again itself?"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate
from membound.app.jobs import process_born
from membound.app.store import Report, Store

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SHORT = (Path(__file__).parent / "short.yaml").read_text("utf-8")
EN, ZH = Translate("en"), Translate("zh")
TIMEOUT_MS = 60_000
ROW = {
    "technique": "int8_weights", "baseline": "bf16 weights", "metric": "tpot_s", "unit": "ratio", "point": {},
    "predicted": 1.8, "low": 1.6, "high": 2.0, "measured": None, "spread": None, "error": None,
    "verdict": "not measured", "lossless": False, "quality": None, "bottleneck_before": "memory_weights",
    "bottleneck_after": "compute", "samples": [], "conditions": "a test",
}  # fmt: skip
CHART = "document.querySelector('.membound-chart')"


@pytest.fixture
def job(dashboard: Any) -> Iterator[str]:
    """A run whose worker says nothing: the test speaks for it."""
    store = dashboard.store
    job_id: str = store.submit_job("simulate", {"scenario": SHORT})
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
    store.attach_worker(job_id, worker.pid, process_born(worker.pid))
    store.start_job(job_id)
    yield job_id
    store.finish_job(job_id, "cancelled")
    worker.kill()
    worker.wait()


def _tell(store: Store, job_id: str, number: int, *others: Report) -> None:
    now = time.time()
    told: list[Report] = [
        (now, "live", {"t": float(number), "tokens_per_s": 100.0 + number, "running": 2, "kv_utilization": 0.5}),
        (now, "text", {"request": number, "prompt": "A prompt,", "text": f" <i>and</i> text {number}"}),
    ]
    store.report(job_id, [*told, *others], (number / 100, f"{number} of 100"))


def test_a_page_follows_a_run_without_running_again(session: Callable[..., Any], dashboard: Any, job: str) -> None:
    _tell(dashboard.store, job, 1)
    tab = session(locale="zh-CN")
    frames: list[int] = []
    tab.page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(len(frame))))
    tab.open(f"/live?job={job}").drawn(TIMEOUT_MS)
    before = -1
    while before != len(frames):  # until the page has said all
        before = len(frames)
        tab.page.wait_for_timeout(1000)
    for number in (2, 3, 4):
        _tell(dashboard.store, job, number)
        tab.page.locator(".membound-written", has_text=f"<i>and</i> text {number}").wait_for(timeout=TIMEOUT_MS)
    tab.page.locator(".membound-job", has_text="4 / 100").wait_for(timeout=TIMEOUT_MS)
    rates = tab.page.evaluate(f"{CHART}._fullData.find(({{ meta }}) => meta === 'tokens_per_s').y.slice(-3)")
    assert list(rates) == [102.0, 103.0, 104.0] and len(frames) == before

    _tell(dashboard.store, job, 5, (time.time(), "row", ROW))
    tab.sees(ZH("live.rows"), TIMEOUT_MS)
    assert len(frames) > before, "a table is the page's own"
    dashboard.store.finish_job(job, "cancelled")
    tab.sees(ZH("job.cancelled"), TIMEOUT_MS)
    tab.settle()


def test_a_run_that_nobody_sees_is_not_asked_for(session: Callable[..., Any], dashboard: Any, job: str) -> None:
    tab = session()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url) if "/news?" in request.url else None)
    tab.open(f"/live?job={job}")
    assert tab.page.locator(".membound-chart").count() == 0, "a chart of nothing has no axes"
    _tell(dashboard.store, job, 6)
    tab.drawn(TIMEOUT_MS)
    tab.page.wait_for_function("performance.getEntriesByType('resource').some(({ name }) => /news/.test(name))")
    hidden = "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }})"
    tab.page.evaluate(hidden.format("true"))
    tab.page.wait_for_timeout(1500)
    before = len(asked)
    tab.page.wait_for_timeout(2500)
    assert len(asked) == before
    tab.page.evaluate(hidden.format("false"))
    _tell(dashboard.store, job, 7)
    tab.page.locator(".membound-written", has_text="text 7").wait_for(timeout=TIMEOUT_MS)

    tab.page.locator("[data-testid=stTopNavLink]", has_text=EN("nav.validate")).click()
    tab.page.wait_for_url(re.compile("/validate"), timeout=TIMEOUT_MS)
    tab.settle()
    tab.page.wait_for_timeout(1500)
    before = len(asked)
    tab.page.wait_for_timeout(2500)
    assert len(asked) == before, "another page follows no run"


def test_a_run_is_followed_through_another_language_and_a_reload_and_cancelled_twice_ends_once(
    session: Callable[..., Any], dashboard: Any, job: str
) -> None:
    _tell(dashboard.store, job, 1)
    one, two = (session().open(f"/live?job={job}") for _ in range(2))
    one.choose("中文", "中文")
    one.sees(ZH("live.text"), TIMEOUT_MS)
    _tell(dashboard.store, job, 2)
    one.page.locator(".membound-job", has_text="2 / 100").wait_for(timeout=TIMEOUT_MS)
    one.page.reload()
    one.settle()
    _tell(dashboard.store, job, 3)
    for tab, words in ((one, "3 / 100"), (two, "3 of 100")):
        tab.page.locator(".membound-job", has_text=words).wait_for(timeout=TIMEOUT_MS)
    one.click(ZH("job.cancel"))
    two.click(EN("job.cancel"))
    for tab, t in ((one, ZH), (two, EN)):
        tab.sees(t("job.cancelled"), TIMEOUT_MS)
        tab.settle()
    assert dashboard.store.job(job).state == "cancelled"
