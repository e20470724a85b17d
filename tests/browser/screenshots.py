"""How does every page look, with the runs that were kept here?

    make screenshots                            or
    .venv/bin/python tests/browser/screenshots.py [--home FOLDER] [--out build/screenshots] [--only live ..] [--whole]

Starts the dashboard on a free port with the store of `--home` (that of MEMBOUND_HOME), opens each page on a screen of
1440 x 1000 and on a phone's of 390 x 844, in English and in Chinese, in the light theme and in the dark one, and writes
a PNG of each after it has settled. Live shows the newest comparison of this store that was measured; without one it
shows its empty state. `--whole` takes the whole page in the place of its first screen, `--views` some of the eight ways
to look, and `--readme` writes the three pictures of the README, which end above what they do not show.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driving import IDLE, WAITING, Dashboard, Tab, opened_chromium

from membound.app.home import membound_home
from membound.app.i18n import Translate
from membound.app.store import Store

EN = Translate("en")
PAGES = (
    "start", "explore", "techniques", "stack", "advisor", "simulate", "plan", "live", "experiments", "validate",
)  # fmt: skip
# Pages that answer unasked; Live does so where it is given a run.
ANSWERING = ("start", "explore", "techniques", "stack", "advisor", "simulate", "plan", "validate")
WIDE, NARROW = (1440, 1000), (390, 844)
# The pictures of the README, each with the first thing that it no longer shows.
README = {
    "explore": f"h2:has-text('{EN('explore.sweep')}')",
    "stack": f"h2:has-text('{EN('stack.shares')}')",
    "live": "[data-testid=stDataFrame]",
}
README_FOLDER = Path(__file__).parent / "screenshots"
ANSWER_TIMEOUT_MS = 240_000
# Charts move into place, and fonts come, for so long after all is there.
CALM_MS = 1500
MOST_HEIGHT = 12_000
# Between the end of a picture and what it no longer shows.
MARGIN = 8
COLORS = 256


@dataclass(frozen=True)
class View:
    """How a page is looked at."""

    name: str
    size: tuple[int, int]
    locale: str
    scheme: str


# The first is the README's.
VIEWS = tuple(
    View("-".join(filter(None, (language, narrow, scheme))), size, locale, scheme or "light")
    for (size, narrow), (language, locale), scheme in itertools.product(
        ((WIDE, ""), (NARROW, "narrow")), (("en", "en-US"), ("zh", "zh-CN")), ("", "dark")
    )
)


def path_of(name: str, store: Store) -> str:
    """The page's path; Live with the newest comparison that was measured here, if there is one."""
    if name == "live" and (run_id := newest_measured(store)) is not None:
        return f"/live?run={run_id}"
    return "/" if name == "start" else f"/{name}"


def newest_measured(store: Store) -> str | None:
    """The newest of the comparisons with the most measured gains."""
    best: tuple[int, str] | None = None
    for run in store.runs("compare"):
        rows = (run.comparison() or {}).get("comparisons", [])
        measured = sum(row["technique"] != "baseline" and row["measured"] is not None for row in rows)
        if measured and (best is None or measured > best[0]):
            best = measured, run.id
    return None if best is None else best[1]


def picture(chromium: Any, dashboard: Dashboard, name: str, view: View, whole: bool, above: str | None = None) -> bytes:
    """The page as a PNG, after all that it waited for is there; only what is `above` an element if one is named."""
    width, height = view.size
    context = chromium.new_context(
        locale=view.locale, color_scheme=view.scheme, viewport={"width": width, "height": height}
    )
    try:
        tab = Tab(context, dashboard)
        path = path_of(name, dashboard.store)
        tab.page.goto(dashboard.url + path, timeout=ANSWER_TIMEOUT_MS)
        _wait(tab, name in ANSWERING or "?run=" in path)
        if whole or above:
            tab.page.set_viewport_size({"width": width, "height": _content_height(tab)})
            _wait(tab, False)
        tab.check()
        if above is None:
            return bytes(tab.page.screenshot())
        box = tab.page.locator(above).first.bounding_box()
        assert box is not None, "the element is on the page"
        clip = {"x": 0, "y": 0, "width": width, "height": math.floor(box["y"]) - MARGIN}
        return bytes(tab.page.screenshot(clip=clip))
    finally:
        context.close()


def _wait(tab: Tab, drawn: bool) -> None:
    tab.page.wait_for_selector(IDLE, timeout=ANSWER_TIMEOUT_MS)
    if drawn:
        tab.drawn(ANSWER_TIMEOUT_MS)
    tab.page.wait_for_function(f"!document.querySelector('{WAITING}')", timeout=ANSWER_TIMEOUT_MS)
    tab.page.wait_for_selector(IDLE, timeout=ANSWER_TIMEOUT_MS)
    tab.page.evaluate("document.querySelector('[data-testid=stMain]').scrollTo(0, 0)")
    tab.page.wait_for_timeout(CALM_MS)


def _content_height(tab: Tab) -> int:
    """How high the page is; Streamlit scrolls a part of it, not the document."""
    height = tab.page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    return min(MOST_HEIGHT, math.ceil(height) + 8)


def smaller(png: bytes) -> bytes:
    """The picture with a palette of its own colours: a third of the size, and the same to the eye."""
    from PIL import Image

    written = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        palette = image.convert("RGB").quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(written, "PNG", optimize=True)
    return written.getvalue()


def pictures(
    dashboard: Dashboard, wanted: list[tuple[str, View]], whole: bool, readme: bool
) -> Iterator[tuple[str, bytes]]:
    with opened_chromium() as chromium:
        for name, view in wanted:
            above = README[name] if readme else None
            yield f"{name}-{view.name}", picture(chromium, dashboard, name, view, whole, above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, help="the store (that of MEMBOUND_HOME)")
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"))
    parser.add_argument("--only", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--views", nargs="+", choices=[view.name for view in VIEWS], default=[v.name for v in VIEWS])
    parser.add_argument("--whole", action="store_true", help="the whole page, not its first screen")
    parser.add_argument("--readme", action="store_true", help="the three pictures of the README, and no others")
    options = parser.parse_args()
    views = [view for view in VIEWS if view.name in options.views]
    wanted = [(name, view) for view in views for name in options.only]
    if options.readme:
        wanted = [(name, VIEWS[0]) for name in README]
    folder = README_FOLDER if options.readme else options.out
    folder.mkdir(parents=True, exist_ok=True)
    dashboard = Dashboard(options.home or membound_home())
    try:
        for name, png in pictures(dashboard, wanted, options.whole, options.readme):
            path = folder / f"{name.removesuffix('-en') if options.readme else name}.png"
            path.write_bytes(smaller(png))
            print(f"{path}  {path.stat().st_size / 1000:.0f} kB", flush=True)
    finally:
        dashboard.kill()


if __name__ == "__main__":
    main()
