"""Does a run of a part of a day say which, and how much less or more arrives then than in the mean?"""

from __future__ import annotations

import math
import re

import pytest

from membound.roofline.scenario import parse_scenario
from membound.roofline.scenario.workload import HourlyArrivals, PoissonArrivals, SineArrivals
from membound.simulator.run import run
from membound.simulator.scheduling.workload.covered import covered_said


def test_a_run_of_the_night_says_so() -> None:
    asked = parse_scenario(
        {
            "name": "day",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "techniques": [{"name": "continuous_batching"}],
            "workload": {
                "arrivals": {"kind": "sine", "rate_rps": 12, "swing": 0.8},
                "requests": 500,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
                "output_tokens": {"kind": "fixed", "tokens": 4},
            },
        }
    )
    found = run(asked)
    (said,) = (note for note in found.provenance.notes if "of the day" in note)
    rate, mean = (float(number) for number in re.findall(r"([\d.]+) arrivals/s, of a mean of ([\d.]+)", said)[0])
    assert said.startswith("the requests cover 00:00 to 00:0") and mean == 12
    counted = asked.workload.requests / float(found.requests["arrival_s"].max())
    assert rate == pytest.approx(counted, rel=4 / math.sqrt(500)) and rate < mean / 2


def test_the_part_is_on_the_clock_from_where_the_run_begins() -> None:
    noon = SineArrivals(rate_rps=10, swing=0.5, start_s=43_200)
    assert (covered_said(noon, 3_600) or "").startswith("the requests cover 12:00 to 13:00 of the day")
    late = noon.model_copy(update={"start_s": 86_400.0 + 84_600})
    assert "23:30 to 00:30 of the day" in (covered_said(late, 3_600) or "")
    parts = HourlyArrivals(rates_rps=(1.0, 3.0), part_s=10.0)
    assert "0 to 10 s of each 20 s: 1 arrivals/s, of a mean of 2" in (covered_said(parts, 10.0) or "")


def test_whole_periods_and_arrivals_without_one_have_nothing_to_say() -> None:
    assert covered_said(SineArrivals(rate_rps=10, swing=0.5, period_s=60), 61.0) is None
    assert covered_said(PoissonArrivals(rate_rps=10), 61.0) is None
