"""Which drafts does an engine take where its scenario leaves their length open?

The best size is that at the engine's own batch and context; where plain steps are at least as fast, speculation is off
and the engine is that without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.speculation.draft_choice import best_size, drafting_of, served_sizes
from membound.roofline.speculation.steps import speculation_of
from membound.roofline.techniques import Speculative
from membound.simulator.deployment import SpeculatingDeployment, deployment_of
from membound.simulator.load import Load
from membound.simulator.steady import Steady, load_of


class SizedDrafts(NamedTuple):
    """A scenario whose drafts have a size, and what they are; None where nothing speculates."""

    scenario: Scenario
    parameters: dict[str, Any] | None


def with_best_drafts(scenario: Scenario, load: Load | None = None, *, at_busiest: bool = False) -> SizedDrafts:
    """The scenario with the best size for what is open in its speculation, at its batch under `load` (else its own)."""
    technique = next((one for one in scenario.techniques if isinstance(one, Speculative)), None)
    if technique is None:
        return SizedDrafts(scenario, None)
    model = resolve_model(scenario.model)
    if technique.is_open:
        deployment = deployment_of(scenario, model, get_hardware(scenario.hardware))
        sized = best_technique(technique, deployment, load or load_of(scenario, deployment, at_busiest=at_busiest))
        kept = tuple(one for one in scenario.techniques if one is not technique)
        if sized is None:
            return SizedDrafts(
                scenario.with_techniques(kept), {"technique": technique.name, "off": True, "chosen": True}
            )
        scenario = scenario.with_techniques((*kept, sized))
    speculation = speculation_of(scenario, model)
    assert speculation is not None, "the scenario speculates"
    return SizedDrafts(scenario, drafting_of(technique, speculation, scenario, technique.is_open))


def best_technique(technique: Speculative, deployment: SpeculatingDeployment, load: Load) -> Speculative | None:
    """The technique with the size that gains most in a decode step of this deployment; None where none gains."""
    assert deployment.speculation is not None, "the deployment speculates"
    steady = Steady(deployment, load)
    shape = deployment.decode_shape(steady.batch, load.lengths.context)
    sizes = served_sizes(technique, deployment.setup.profile)
    found = best_size(deployment.speculation, deployment.times, shape, sizes)
    return None if found.size is None else technique.sized(found.size)
