"""What is all that anything needs to run?"""

from membound.roofline.scenario.scenario import (
    Scenario,
    Slo,
    check_path,
    load_scenario,
    parse_scenario,
    scenario_of_text,
    shipped_scenarios,
)

__all__ = [
    "Scenario",
    "Slo",
    "check_path",
    "load_scenario",
    "parse_scenario",
    "scenario_of_text",
    "shipped_scenarios",
]
