"""Which engines does a chart of a comparison show? Said of the scenario that was compared, not of the usual one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from membound.app.i18n import Translate
from membound.roofline.errors import MemboundError
from membound.roofline.results.comparison import Comparison
from membound.roofline.scenario import scenario_of_text
from membound.simulator.scheduling.build import batching_of


def of_baseline(scenario_yaml: str, conditions: str, t: Translate) -> str:
    """`Plain engine: bf16 weights, static batching, one token a step`, at each point where they differ."""
    engines = t("sign.semicolon").join(
        t("comparison.engine", weights=weights, batching=t(f"simulate.policy_{batching}"))
        for weights, batching in _plain_engines(scenario_yaml)
    )
    named = "comparison.baseline_caption" if engines else "comparison.unknown_caption"
    return t(named, engine=engines, conditions=conditions)


def of_gains(scenario_yaml: str, rows: Sequence[Comparison], conditions: str, t: Translate) -> str:
    """What each gain is of: a technique alone, or an engine with all that its row names."""
    alone = _alone(scenario_yaml)
    if alone is None:
        alone = not any(" + " in row.technique for row in rows)
    return t("comparison.caption", each=t("comparison.alone" if alone else "comparison.engines"), conditions=conditions)


@lru_cache(maxsize=64)
def _plain_engines(scenario_yaml: str) -> tuple[tuple[str, str], ...]:
    """Formats of the weights and batching of the engine without what is compared; none of a scenario that is none."""
    try:
        plain = [scenario.with_techniques(()) for _, scenario in scenario_of_text(scenario_yaml).points()]
        engines = [(one.setup.precision.weights.name, batching_of(one.engine, one.setup).name) for one in plain]
    except MemboundError:
        return ()
    return tuple(dict.fromkeys(engines))


@lru_cache(maxsize=64)
def _alone(scenario_yaml: str) -> bool | None:
    """Whether each engine that is compared has one technique more than the plain one and nothing else."""
    try:
        compared = scenario_of_text(scenario_yaml).compared()
    except MemboundError:
        return None
    return all(len(one.techniques) == 1 and not one.beside and not one.set for one in compared)
