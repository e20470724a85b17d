"""Which length of drafts, or which tree of guesses, gains most at an operating point?

Leviathan et al., ICML 2023, section 3.5, choose the length for a constant acceptance and cost; here each size is costed
by the roofline at the batch in question, so that drafts grow shorter as the batch fills the matrix unit, until none is
worth its cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import acceptance_of
from membound.roofline.scenario.workload import TextPrompts
from membound.roofline.shape import StepShape
from membound.roofline.speculation.draft_models import draft_model
from membound.roofline.speculation.published import acceptance_for
from membound.roofline.speculation.steps import Speculation, speculation_of
from membound.roofline.techniques import ModelDrafts, Size, Speculative, Technique
from membound.roofline.times.engines import get_profile
from membound.roofline.times.known import times_for
from membound.roofline.times.operator import Times

# The setting without which vLLM verifies chains alone (pull request 20401 added trees; issue 18327 is still open).
TREES_OF_VLLM = "speculative_token_tree"

# Of the sizes that tables hold for the best so many are costed alone where caches make the tables coarse.
FINALISTS = 3


class Choice(NamedTuple):
    """The size that gains most and its gain over plain steps; no size where plain steps are at least as fast."""

    size: Size | None
    speedup: float


def best_size(speculation: Speculation, times: Times, shape: StepShape, sizes: Iterable[Size]) -> Choice:
    """Of `sizes` the one with the largest gain at this step, exact for the size that is returned."""
    tried = list(sizes)
    seconds = _tabulated(speculation, times, shape, tried)
    sized = [speculation.with_size(size) for size in tried]
    gains = np.array([one.expected_tokens / s for one, s in zip(sized, seconds, strict=True)])
    finalists = np.argsort(-gains, kind="stable")[: FINALISTS if times.needs_working_set else 1]
    plain_s = float(speculation.plain_s(times, shape))
    exact = {int(at): sized[at].expected_tokens * plain_s / float(sized[at].step_s(times, shape)) for at in finalists}
    best = max(exact, key=exact.__getitem__)
    return Choice(tried[best], exact[best]) if exact[best] > 1.0 else Choice(None, 1.0)


def served_sizes(technique: Speculative, profile: str) -> Iterator[Size]:
    """Of the sizes that the technique allows those that the profile's engine takes unasked.

    vLLM verifies chains, as it has trees only where `speculative_token_tree` spells one out: a tree_size that a
    scenario gives.
    """
    chains = get_profile(profile).library == "vllm" and len(technique.size_fields) > 1 and not technique.given.nodes
    if not chains:
        yield from technique.sizes()
        return
    for depth in sorted({size.depth for size in technique.sizes()}):
        yield Size(depth, depth)


def _tabulated(speculation: Speculation, times: Times, shape: StepShape, sizes: Sequence[Size]) -> list[float]:
    """Seconds of a step for each size, from one table of verification and one of the drafter's passes."""
    guesses = np.array(sorted({float(size.nodes or size.depth) for size in sizes}))
    many = shape.filled(len(guesses))
    verify_s = np.asarray(speculation.verify_each_s(times, many, guesses))
    seconds = []
    draft_s = speculation.draft_table(times, shape)
    for size in sizes:
        verified = float(verify_s[np.searchsorted(guesses, size.nodes or size.depth)])
        seconds.append(verified + draft_s(speculation.with_size(size)))
    return seconds


def drafting_of(technique: Speculative, speculation: Speculation, scenario: Scenario, chosen: bool) -> dict[str, Any]:
    """The parameters that a step speculates with, and where its acceptance comes from."""
    drafts = speculation.drafts
    said: dict[str, Any] = {"technique": technique.name, "off": False, "chosen": chosen, "depth": drafts.gamma}
    if drafts.nodes is not None:
        said["tree_size"] = drafts.nodes
        if drafts.nodes > drafts.gamma and get_profile(scenario.engine.profile).library == "vllm":
            said["asked_by"] = TREES_OF_VLLM
    said["replayed"] = _replayed(technique, scenario)
    said |= {"alpha": drafts.alpha, "decay": drafts.decay, "hit_rate": drafts.hit_rate}
    if isinstance(drafts, ModelDrafts):
        said["draft"] = draft_model(speculation.model, drafts.draft).name
    source = acceptance_source(technique, scenario)
    if speculation.profile is not None:
        said["alpha"] = float(speculation.acceptance_by_depth[0])
        said["decay"] = None
    return said | {
        "tokens_per_step": speculation.expected_tokens,
        "acceptance_error": speculation.acceptance_error,
        "alpha_from": source,
    }


def acceptance_source(technique: Technique, scenario: Scenario) -> str:
    """Where the chance that a guess is right comes from."""
    workload = scenario.workload
    if workload.acceptance is not None:
        return "the scenario's workload.acceptance"
    if isinstance(technique, Speculative) and acceptance_of(workload, technique.drafts().kind) is not None:
        return f"task profile '{workload.task}'"
    default = type(technique).model_fields["alpha"].default
    assumed = "assumed: the technique's default" if getattr(technique, "alpha", None) == default else "the scenario"
    if isinstance(technique, Speculative) and technique.drafts().assumed:
        counted = acceptance_for(resolve_model(scenario.model), technique.drafts(), workload.task)
        assumed = assumed if counted is None else counted.source
    if scenario.temperature > 0:
        assumed += f", which the temperature of {scenario.temperature:g} does not change"
    return f"{assumed}; a simulation replays the recorded text" if _replayed(technique, scenario) else assumed


def _replayed(technique: Technique, scenario: Scenario) -> bool:
    """Whether a simulation knows what would be drafted."""
    return isinstance(scenario.workload.prompts, TextPrompts) and technique.name == "ngram_speculation"


def with_drafts(
    scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, shape: StepShape
) -> tuple[Scenario, str | None]:
    """The scenario with a size for its drafts, the best in a step of this shape where it names none, and why that one.

    None where the scenario does not speculate.
    """
    technique = next((one for one in scenario.techniques if isinstance(one, Speculative)), None)
    if technique is None:
        return scenario, None
    if not technique.is_open:
        return scenario, f"{technique.name} drafts {_size_said(technique.size)}, as the scenario says"
    speculation = speculation_of(scenario, model)
    assert speculation is not None, "the scenario speculates"
    times = times_for(hardware, scenario.setup.profile)
    best = best_size(speculation, times, shape, served_sizes(technique, scenario.engine.profile)).size
    sized = technique.sized(best or technique.usual_size)
    why = "the best here" if best else "as usual, since no draft is worth its cost here"
    kept = tuple(one for one in scenario.techniques if one is not technique)
    return scenario.with_techniques((*kept, sized)), f"{technique.name} drafts {_size_said(sized.size)}, {why}"


def _size_said(size: Size) -> str:
    tree = "" if size.nodes is None else f" in a tree of {size.nodes}"
    return f"{size.depth} deep{tree}"
