"""Can up to four configurations be compared on Explore, from a link too, and is a user's own device offered?"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some
from streamlit.testing.v1 import AppTest

from membound.app.configurations import Configuration, read, told_apart
from membound.app.figures import moving_roofline, roofline
from membound.app.i18n import Translate
from membound.app.views import pins
from membound.roofline import hardware, models
from membound.roofline.operating_point import PHASES
from membound.roofline.techniques import TECHNIQUES

T = Translate("en")
LLAMA = Configuration("Llama-3.1-8B", "H100-SXM5", "decode", 2048, 8, 1, 4, ())
DEVICES = ["local", *hardware.catalog(), "My, device: 1+1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    return tmp_path


def _explore(**query: str) -> AppTest:
    at = AppTest.from_string("from membound.app.views import explore\nexplore.page()", default_timeout=60)
    for key, value in query.items():
        at.query_params[key] = value
    return at.run()


def _query(at: AppTest, key: str) -> str:
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


counts = some.integers(1, 10_000_000)


@given(
    some.builds(
        Configuration,
        some.sampled_from(list(models.catalog())),
        some.sampled_from(DEVICES),
        some.sampled_from(PHASES),
        *[counts] * 4,
        some.lists(some.sampled_from(list(TECHNIQUES)), unique=True, max_size=3).map(tuple),
    )
)
def test_a_configuration_is_read_as_it_was_written(configuration: Configuration) -> None:
    written = configuration.written()
    assert "," not in written and read(written, DEVICES) == configuration


@given(some.text(max_size=80) | some.text(":+,~%20abH0123", max_size=80))
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert read(text, DEVICES) is None


@pytest.mark.parametrize("device", ["/etc/passwd.yaml", "../x.yaml", "%2Fetc%2Fx.yaml", "no such device"])
def test_no_link_opens_a_file(device: str) -> None:
    assert read(LLAMA.written().replace("H100-SXM5", device), DEVICES) is None


def test_configurations_are_told_apart_by_what_differs() -> None:
    other = read(LLAMA.written().replace(":8:", ":64:"), DEVICES)
    assert other is not None and told_apart([LLAMA, other]) == ["batch"] and told_apart([LLAMA, LLAMA]) == ["batch"]


def test_a_pinned_configuration_stays_while_the_present_one_changes(home: Path) -> None:
    at = _explore()
    assert not at.table
    at.button(key="pin").click().run()
    assert at.button(key="pin").disabled, "the present one is pinned already"
    at.segmented_control(key="batch").set_value(64).run()
    at.button(key="pin").click().run()
    at.selectbox(key="hw").set_value("H200-SXM").run()
    table = at.table[0].value
    assert list(table[T("pins.mark")]) == [T("pins.present"), "A", "B"]
    assert "H200-SXM" in table[T("pins.configuration")][0] and "H100-SXM5" in table[T("pins.configuration")][1]
    again = _explore(pins=_query(at, "pins"), hw="H200-SXM", batch="64")
    assert again.table[0].value.equals(table) and not again.exception
    at.button(key="unpin_A").click().run()
    left = at.table[0].value
    assert len(left) == 2 and left[T("metric.step")][1] == table[T("metric.step")][2]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_four_are_compared_at_most_and_each_has_its_shape(home: Path, language: str) -> None:
    written = [LLAMA.written().replace(":8:", f":{batch}:") for batch in (1, 2, 4, 16, 32)]
    at = _explore(pins=",".join(written), lang=language)
    assert not at.exception and not at.error
    assert len(at.table[0].value) == 1 + pins.MOST_PINS and at.button(key="pin").disabled
    symbols = [roofline.STEP_SYMBOLS[moving_roofline.PINNED_FROM + number] for number in range(pins.MOST_PINS)]
    assert len(set(symbols) | set(roofline.STEP_SYMBOLS[: moving_roofline.PINNED_FROM])) == pins.MOST_PINS + 2


def test_a_pin_whose_device_cannot_be_had_says_why(home: Path) -> None:
    at = _explore(pins=LLAMA.written().replace("H100-SXM5", "local"))
    assert not at.exception and "calibrate" in at.table[0].value[T("metric.step")][1]


def test_another_devices_roofs_are_drawn_and_in_view(home: Path) -> None:
    t = Translate("en")
    present, other = LLAMA, Configuration("Llama-3.1-8B", "RTX-4090", "decode", 2048, 8, 1, 4, ())
    rows = [
        pins.Row("now", present, present.point()),
        pins.Row("A", other, other.point()),
    ]
    (drawn,) = pins.placed(rows, t)
    assert drawn.roofs is not None
    point = present.point()
    places = [moving_roofline.Place(8, (roofline.PlacedStep("this", "", point.cost),))]
    fig = moving_roofline.moving_figure(roofline.roofs_of(point.hardware), places, 8, t, pinned=[drawn])
    low, high = (10**exponent for exponent in fig.layout.yaxis.range)
    seen = [trace for trace in fig.data if trace.name in (drawn.step.series, t("pins.roofs", device=drawn.device))]
    assert len(seen) == 2 and all(low <= rate <= high for trace in seen for rate in list(trace.y)[-1:])
    assert all(frame.traces[0] > list(fig.data).index(seen[-1]) for frame in fig.frames), "pins do not move"


@pytest.fixture
def own(home: Path) -> str:
    """A device of the user's own, named in `hardware/` of the home."""
    sheet = yaml.safe_load((resources.files("membound.data") / "hardware" / "l4.yaml").read_text("utf-8"))
    sheet |= {"name": "Lab-X1", "aliases": []}
    (home / "hardware").mkdir()
    (home / "hardware" / "lab.yaml").write_text(yaml.safe_dump(sheet), "utf-8")
    (home / "hardware" / "broken.yaml").write_text("name: [", "utf-8")
    return "Lab-X1"


def test_a_users_own_device_is_offered_wherever_a_device_is_chosen(home: Path, own: str) -> None:
    titled = T("choice.own_device", device=own)
    at = _explore(hw=own)
    assert not at.error and at.selectbox(key="hw").value == own and titled in at.selectbox(key="hw").options
    for page in ("techniques", "stack", "simulate"):
        at = AppTest.from_string(f"from membound.app.views import {page}\n{page}.page()", default_timeout=60)
        at.query_params["hw"] = own
        at.run()
        assert not at.exception and at.selectbox(key="hw").value == own, page
    at = AppTest.from_string("from membound.app.views import plan\nplan.page()", default_timeout=60)
    at.query_params["plan_devices"] = own
    at.run()
    assert not at.exception and own in at.multiselect[0].options
    at = AppTest.from_string("from membound.app.views import live\nlive.page()", default_timeout=60)
    at.query_params["scenario"], at.query_params["machine"] = "plan-70b", "endpoint"
    assert titled in at.run().selectbox(key="taken").options


def test_a_folder_that_cannot_be_read_does_not_take_the_catalog_away(home: Path) -> None:
    (home / "hardware").write_text("a file", "utf-8")
    assert "H100-SXM5" in _explore().selectbox(key="hw").options
    shutil.rmtree(home / "calibration", ignore_errors=True)
