"""What does `membound stack --json` print?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from membound.roofline.results.comparison import UNITS
from membound.roofline.techniques import Technique
from membound.simulator.stacking.game import StackStep
from membound.simulator.stacking.stacking import Stack


def to_json(stacks: Sequence[Stack], techniques: Sequence[Technique]) -> dict[str, Any]:
    """Every point's stack; gains are ratios to the named baseline."""
    about = {technique.name: technique for technique in techniques}
    baselines = {step.technique: step.baseline for stack in stacks for step in stack.alone}
    return {
        "techniques": [
            {
                "name": technique.name,
                "title": technique.title,
                "baseline": baselines.get(technique.name, technique.baseline),
                "family": technique.family,
                "lossless": technique.lossless,
                "parameters": technique.model_dump(mode="json", exclude={"name"}),
            }
            for technique in techniques
        ],
        "stacks": [_stack_json(stack, about) for stack in stacks],
    }


def _stack_json(stack: Stack, about: dict[str, Technique]) -> dict[str, Any]:
    def rows(steps: Sequence[StackStep] | None) -> list[dict[str, Any]] | None:
        return None if steps is None else [_step_json(step, about[step.technique]) for step in steps]

    together, product = stack.together, stack.product
    return {
        "point": stack.point,
        "metric": stack.metric,
        "unit": UNITS[stack.metric],
        "baseline": "the plain engine: none of the techniques",
        "conditions": stack.conditions,
        "reason": stack.reason,
        "notes": list(stack.notes),
        "plain": None if stack.plain is None else stack.plain.document(),
        "members": list(stack.members),
        "alone": rows(stack.alone),
        "given_order": rows(stack.given_order),
        "greedy_order": rows(stack.greedy_order),
        "best_order": rows(stack.best_order),
        "together": together,
        "product": product,
        "ratio": together / product if together is not None and product is not None else None,
        "lossless": all(about[name].lossless for name in stack.members),
        "shapley_ln_gain": stack.shapley,
        "best_subset": {"techniques": list(stack.best_subset), "gain": stack.best_subset_gain},
        "pairs": [
            {
                "techniques": [pair.first, pair.second],
                "product": pair.product,
                "real": pair.real,
                "ratio": pair.ratio,
                "reason": pair.reason,
            }
            for pair in stack.pairs
        ],
    }


def _step_json(step: StackStep, technique: Technique) -> dict[str, Any]:
    return {
        "technique": step.technique,
        "baseline": step.baseline,
        "gain": step.gain,
        "low": step.low,
        "high": step.high,
        "together": step.together,
        "lossless": technique.lossless,
        "batch": step.batch,
        "bottleneck_before": step.bottleneck_before,
        "bottleneck_after": step.bottleneck_after,
        "reason": step.reason,
        "parameters": technique.model_dump(mode="json", exclude={"name"}),
        "drafting": step.drafting,
    }
