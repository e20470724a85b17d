"""What is predicted for a cluster is not measured here, and the runtime says so."""

from __future__ import annotations

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import load_scenario, parse_scenario
from membound.runtime.engine import Runtime


def test_a_cluster_is_refused_in_one_sentence():
    document = load_scenario("live-cpu").model_dump(mode="json") | {"cluster": {"groups": [{"count": 2}]}}
    with pytest.raises(MemboundError, match="field 'cluster' is predicted, not measured yet"):
        Runtime().run(parse_scenario(document), get_hardware("H100-SXM5"))
