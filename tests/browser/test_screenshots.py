"""Are the pictures of the pages what a reader would see: settled, whole, small, and of runs that were measured?"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from screenshots import README, README_FOLDER, VIEWS, WIDE, newest_measured, path_of, picture, smaller

from membound.app.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MOST_BYTES = 250_000


def _size(png: bytes) -> tuple[int, int]:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return image.size


@pytest.mark.parametrize("whole", [False, True])
def test_a_page_is_pictured_in_its_first_screen_or_whole(chromium: Any, dashboard: Any, whole: bool) -> None:
    narrow = next(view for view in VIEWS if view.name == "en-narrow")
    png = picture(chromium, dashboard, "explore", narrow, whole)
    width, height = _size(png)
    assert width == narrow.size[0] and (height > 2 * narrow.size[1] if whole else height == narrow.size[1])
    assert len(smaller(png)) < len(png) / 2 and _size(smaller(png)) == (width, height)


def test_live_shows_the_comparison_with_most_that_was_measured_here(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert path_of("live", store) == "/live" and path_of("start", store) == "/"

    def kept(measured: list[float | None]) -> str:
        rows = [{"technique": "eagle", "measured": value} for value in measured]
        rows.append({"technique": "baseline", "measured": 1.0})
        return store.save_run(
            kind="compare", label="x", digest="d", scenario_yaml="", summary={}, comparison={"comparisons": rows}
        )

    kept([None])
    assert newest_measured(store) is None, "nothing of it was measured but its baseline"
    most = kept([1.5, 2.0])
    kept([1.5, None])
    assert newest_measured(store) == most and path_of("live", store) == f"/live?run={most}"


@pytest.mark.parametrize("name", README)
def test_the_pictures_of_the_readme_are_there_and_small(name: str) -> None:
    png = (README_FOLDER / f"{name}.png").read_bytes()
    width, height = _size(png)
    assert len(png) < MOST_BYTES and width == WIDE[0] and WIDE[1] < 1.5 * height < 3 * WIDE[1]
