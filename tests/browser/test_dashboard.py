"""Does a person with a real browser get what the pages promise? Runs on Chromium against the real server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from membound.app.doctor import find_browser
from membound.app.i18n import Translate
from membound.app.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HERE = Path(__file__).parent
SHORT = (HERE / "short.yaml").read_text("utf-8")
LONG = re.sub(r"requests: \d+", "requests: 4000", SHORT).replace("browser-short", "browser-long")
CALIBRATION = HERE.parent / "app" / "calibration.json"
IDLE = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
DRAWN = ".js-plotly-plot .nsewdrag"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
RUN_TIMEOUT_MS, PAGE_TIMEOUT_MS = 180_000, 60_000
EN, ZH = Translate("en"), Translate("zh")


class Server:
    """The command `membound dashboard` in its own process group, with a store of its own."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.environment = environment
        self.store = Store(home)
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "membound.app.cli", "dashboard", "--no-browser", "--port", "0"]
        own = {"MEMBOUND_HOME": str(self.home), "MEMBOUND_SLOT": str(self.home / "slot.lock")}
        environment = {**os.environ, **self.environment, **own}
        self.process = subprocess.Popen(
            command, cwd=self.home, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None
        self.url = found.group().rstrip("/")
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the dashboard does not answer")

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill the server and what it started: a test that failed leaves no measurement behind."""
        self.kill()
        for job in self.store.jobs(active=True):
            if job.pid is not None:
                os.killpg(job.pid, signal.SIGKILL)


class Tab:
    """A page of one browser session that notes whatever a person should never meet."""

    def __init__(self, context: Any, server: Server) -> None:
        self.server = server
        self.page = context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._request)

    def open(self, path: str) -> Tab:
        self.page.goto(self.server.url + path, timeout=PAGE_TIMEOUT_MS)
        return self.settle()

    def settle(self) -> Tab:
        self.page.wait_for_selector(IDLE, timeout=PAGE_TIMEOUT_MS)
        self.check()
        return self

    def sees(self, words: str, timeout: float = PAGE_TIMEOUT_MS) -> None:
        self.page.get_by_text(words).first.wait_for(timeout=timeout)

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click(timeout=PAGE_TIMEOUT_MS)

    def choose(self, option: str) -> None:
        group = self.page.locator("[data-testid=stButtonGroup]")
        group.get_by_text(option, exact=True).first.click(timeout=PAGE_TIMEOUT_MS)

    def check(self) -> None:
        assert self.page.locator("[data-testid=stException]").count() == 0
        assert self.page.get_by_text("This page failed").count() == 0
        assert self.problems == []

    def _console(self, message: Any) -> None:
        # Streamlit looks for its health below a deep link first and does not find it there.
        probe = "/_stcore/" in str(message.location.get("url", ""))
        if message.type == "error" and not probe and "ERR_NAME_NOT_RESOLVED" not in message.text:
            self.problems.append(f"console: {message.text} {message.location}")

    def _request(self, request: Any) -> None:
        own = (self.server.url, self.server.url.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(own):
            self.problems.append(f"outside request: {request.url}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(find_browser()), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Chromium, whose sessions end with the test that opened them."""
    yield chromium
    for context in chromium.contexts:
        context.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    (home / "calibration").mkdir()
    shutil.copy(CALIBRATION, home / "calibration" / "local.json")
    running = Server(home)
    running.start()
    yield running
    running.end()


def _session(browser: Any, server: Server, **options: Any) -> Tab:
    return Tab(
        browser.new_context(**({"locale": "en-US", "viewport": {"width": 1360, "height": 900}} | options)), server
    )


def _paste(tab: Tab, scenario: str) -> None:
    tab.open("/live?scenario=own")
    draft = tab.page.get_by_label(EN("live.paste"))
    draft.fill(scenario)
    draft.press("Control+Enter")
    tab.sees("2 users in a closed loop")
    tab.settle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("name", "path"), [("start", "/"), ("explore", "/explore"), ("live", "/live")])
def test_every_page_opens(browser: Any, server: Server, name: str, path: str, language: str, scheme: str) -> None:
    locale = {"en": "en-US", "zh": "zh-CN"}[language]
    tab = _session(browser, server, locale=locale, color_scheme=scheme).open(path)
    tab.sees({"en": EN, "zh": ZH}[language](f"{name}.title"))
    if name != "live":
        tab.page.wait_for_selector(DRAWN, timeout=PAGE_TIMEOUT_MS)
    tab.page.wait_for_function(f"document.documentElement.lang === '{language}'", timeout=PAGE_TIMEOUT_MS)
    tab.settle()


def test_a_newcomer_gets_the_roofline_without_asking_and_measures_with_one_click(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    server = Server(tmp_path, MEMBOUND_TASKS="calibrate=fake_tasks:calibrate", PYTHONPATH=str(HERE))
    server.start()
    try:
        one, two = _session(browser, server).open("/"), _session(browser, server).open("/")
        one.page.locator("[data-testid=stProgress]", has_text="bandwidth of memory").wait_for(timeout=PAGE_TIMEOUT_MS)
        for tab in (one, two):
            tab.page.wait_for_selector(DRAWN, timeout=PAGE_TIMEOUT_MS)
            tab.sees("Decode on this machine is bound by")
        assert len(server.store.jobs("calibrate")) == 1

        one.click(EN("start.measure"))
        one.sees(EN("live.rows"), RUN_TIMEOUT_MS)
        one.page.locator("[data-testid=stText]", has_text="assistant").wait_for(timeout=RUN_TIMEOUT_MS)
        one.page.reload()
        one.click(EN("job.cancel"))
        one.sees(EN("job.cancelled"), RUN_TIMEOUT_MS)
        for tab in (one, two):
            tab.settle()
    finally:
        server.end()


def test_the_language_switch_holds_on_every_page(browser: Any, server: Server) -> None:
    tab = _session(browser, server).open("/")
    tab.choose("中文")
    tab.sees(ZH("start.title"))
    assert "lang=zh" in tab.page.url
    tab.page.locator("[data-testid=stTopNavLink]", has_text=ZH("nav.explore")).click()
    tab.sees(ZH("explore.title"))
    tab.settle()


def test_a_link_to_explore_is_the_page(browser: Any, server: Server) -> None:
    tab = _session(browser, server).open("/explore")
    tab.choose("8-bit weights")
    tab.page.wait_for_url(re.compile("with=int8_weights"), timeout=PAGE_TIMEOUT_MS)
    tab.choose("64")
    tab.page.wait_for_url(re.compile("batch=64"), timeout=PAGE_TIMEOUT_MS)
    tab.settle()
    answer = tab.page.get_by_role("heading", level=2).first.inner_text()
    other = _session(browser, server).open(tab.page.url.removeprefix(server.url))
    other.sees(answer)
    assert "with=int8_weights" in tab.page.url
    other.check()


def test_a_wrong_scenario_is_one_sentence_in_an_error_box(browser: Any, server: Server) -> None:
    tab = _session(browser, server).open("/live?scenario=own")
    draft = tab.page.get_by_label(EN("live.paste"))
    draft.fill(f"{SHORT}nonsense: 1\n")
    draft.press("Control+Enter")
    tab.page.locator("[data-testid=stAlert]", has_text="nonsense").wait_for(timeout=PAGE_TIMEOUT_MS)
    assert tab.page.get_by_role("button", name=EN("live.run"), exact=True).is_disabled()
    tab.check()


def test_a_run_is_watched_cancelled_and_found_again(browser: Any, server: Server) -> None:
    pytest.importorskip("torch")
    tab = _session(browser, server)
    _paste(tab, LONG)
    tab.click(EN("live.run"))
    tab.page.wait_for_url(re.compile("job="), timeout=PAGE_TIMEOUT_MS)
    job_id = re.search(r"job=([\w-]+)", tab.page.url).group(1)  # type: ignore[union-attr]
    tab.page.locator("[data-testid=stProgress]", has_text="cell 1 of").wait_for(timeout=RUN_TIMEOUT_MS)
    tab.page.wait_for_selector(".membound-live-chart .nsewdrag", timeout=RUN_TIMEOUT_MS)
    tab.page.wait_for_function(
        "document.querySelector('.membound-live-chart')?._fullData?.[0]?.y?.length > 1", timeout=RUN_TIMEOUT_MS
    )
    tab.check()

    tab.page.reload()
    tab.page.locator("[data-testid=stProgress]").first.wait_for(timeout=PAGE_TIMEOUT_MS)
    watcher = _session(browser, server).open(f"/live?job={job_id}")
    tab.click(EN("job.cancel"))
    for session in (tab, watcher):
        session.sees(EN("job.cancelled"), RUN_TIMEOUT_MS)
        session.settle()
    assert server.store.job(job_id).state == "cancelled"


def test_a_finished_run_outlives_the_reload_and_the_server(browser: Any, server: Server) -> None:
    pytest.importorskip("torch")
    tab = _session(browser, server)
    _paste(tab, SHORT)
    tab.click(EN("live.run"))
    tab.page.wait_for_url(re.compile("job="), timeout=PAGE_TIMEOUT_MS)
    tab.sees(EN("results.gains"), RUN_TIMEOUT_MS)
    tab.settle()
    tab.page.reload()
    tab.sees(EN("results.gains"))
    path = tab.page.url.removeprefix(server.url)
    tab.check()

    server.kill()
    server.start()
    again = _session(browser, server).open(path)
    again.sees(EN("results.gains"))
    with again.page.expect_download() as download:
        again.page.get_by_role("button", name=EN("download.json")).click()
    assert '"comparisons"' in download.value.path().read_text("utf-8")
    again.settle()


def test_two_sessions_keep_their_drafts_and_share_the_history(browser: Any, server: Server) -> None:
    one, two = _session(browser, server), _session(browser, server)
    _paste(one, SHORT)
    two.open("/live?scenario=own")
    assert two.page.get_by_label(EN("live.paste")).input_value() == ""
    job_id = server.store.submit_job("simulate", {"scenario": SHORT.replace("browser-short", "shared")})
    server.store.finish_job(job_id, "cancelled")
    for session in (one, two):
        session.page.reload()
        session.sees("Simulate only · shared")
        session.settle()
