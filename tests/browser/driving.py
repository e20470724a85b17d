"""How is the dashboard driven: its server as a command, and tabs that note whatever a person should never meet?"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from membound.app.commands.doctor import find_browser
from membound.app.store import Store

IDLE = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
DRAWN = ".js-plotly-plot .nsewdrag"
CHART = ".membound-chart"
WAITING = "[data-testid=stSkeleton]"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
PAGE_TIMEOUT_MS = 60_000
SHOW_CHART = f"""() => {{
  const shown = [...document.querySelectorAll("{CHART}")].find((chart) => chart.checkVisibility());
  shown?.scrollIntoView({{ block: "center" }});
  return Boolean(document.querySelector("{DRAWN}"));
}}"""


def wait_drawn(page: Any, timeout: float = PAGE_TIMEOUT_MS) -> None:
    """Until a page's first chart is drawn, which it is once it is on the screen."""
    page.wait_for_function(SHOW_CHART, timeout=timeout, polling=200)


def free_port() -> int:
    """One that nobody has; the dashboard takes the next where somebody was quicker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Dashboard:
    """The command `membound dashboard` in its own process group, on the store of `home`."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.environment = environment
        self.store = Store(home)
        self.start()

    def start(self) -> None:
        port = str(free_port())
        command = [sys.executable, "-P", "-m", "membound.app.cli", "dashboard", "--no-browser", "--port", port]
        environment = {**os.environ, **self.environment, "MEMBOUND_HOME": str(self.home)}
        self.process = subprocess.Popen(
            command, cwd=self.home, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None
        self.url = found.group().rstrip("/")
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the dashboard does not answer")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill the server and what it started: a test that failed leaves nothing behind."""
        self.kill()
        for job in self.store.jobs(active=True):
            if job.pid is not None:
                os.killpg(job.pid, signal.SIGKILL)


class Tab:
    """A page of one browser session."""

    def __init__(self, context: Any, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self.page = context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._request)

    @property
    def url(self) -> str:
        return self.dashboard.url

    def open(self, path: str) -> Tab:
        self.page.goto(self.url + path, timeout=PAGE_TIMEOUT_MS)
        return self.settle()

    def settle(self) -> Tab:
        """Wait until the page has run and shows all that it waited for."""
        self.page.wait_for_selector(IDLE, timeout=PAGE_TIMEOUT_MS)
        self.page.wait_for_function(f"!document.querySelector('{WAITING}')", timeout=PAGE_TIMEOUT_MS)
        self.page.wait_for_selector(IDLE, timeout=PAGE_TIMEOUT_MS)
        return self.check()

    def drawn(self, timeout: float = PAGE_TIMEOUT_MS) -> Tab:
        wait_drawn(self.page, timeout)
        return self

    def sees(self, words: str | re.Pattern[str], timeout: float = PAGE_TIMEOUT_MS) -> None:
        self.page.get_by_text(words).first.wait_for(timeout=timeout)

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click(timeout=PAGE_TIMEOUT_MS)

    def choose(self, label: str, option: str) -> None:
        """An option of the group of buttons with this label."""
        group = self.page.locator("[data-testid=stButtonGroup]").filter(has_text=label)
        group.get_by_text(option, exact=True).first.click(timeout=PAGE_TIMEOUT_MS)

    def at(self, *parts: str) -> None:
        """Until the address, which follows the page, has all these parts."""
        self.page.wait_for_url(lambda url: all(part in url for part in parts), timeout=PAGE_TIMEOUT_MS)

    def chosen(self, label: str, option: str) -> None:
        """Until this and nothing else is chosen in the group of buttons with this label."""
        group = self.page.locator("[data-testid=stButtonGroup]").filter(has_text=label).first
        only = re.compile(rf"^\s*{re.escape(option)}\s*$")
        group.locator("[data-selected=true]", has_text=only).wait_for(timeout=PAGE_TIMEOUT_MS)
        assert group.locator("[data-selected=true]").count() == 1

    def answers(self, words: str | re.Pattern[str]) -> None:
        """Until this is the page's answer, or part of it."""
        said = self.page.get_by_role("heading", name=words)
        self.page.get_by_role("heading", level=2).first.and_(said).wait_for(timeout=PAGE_TIMEOUT_MS)

    @property
    def answer(self) -> str:
        """The page's answer, its first heading below the title."""
        return str(self.page.get_by_role("heading", level=2).first.inner_text(timeout=PAGE_TIMEOUT_MS))

    def fits(self) -> None:
        """Until nothing of the page is beyond the screen's sides."""
        fits = "document.querySelector('.stMain').scrollWidth <= innerWidth + 1"
        self.page.wait_for_function(fits, timeout=PAGE_TIMEOUT_MS)

    def check(self) -> Tab:
        assert self.page.locator("[data-testid=stException]").count() == 0
        assert self.page.get_by_text("This page failed").count() == 0
        assert self.problems == []
        return self

    def _console(self, message: Any) -> None:
        # Streamlit looks for its health below a deep link first and does not find it there.
        probe = "/_stcore/" in str(message.location.get("url", ""))
        if message.type == "error" and not probe and "ERR_NAME_NOT_RESOLVED" not in message.text:
            self.problems.append(f"console: {message.text} {message.location}")

    def _request(self, request: Any) -> None:
        own = (self.url, self.url.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(own):
            self.problems.append(f"outside request: {request.url}")


@contextmanager
def opened_chromium() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(find_browser()), args=ARGUMENTS)
        yield opened
        opened.close()
