"""Which part of the model does each operator of a step belong to?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from membound.roofline.cost import OperatorCost
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator

Group = Literal["attention", "ffn", "elementwise", "communication", "lm_head", "host"]
GROUPS: tuple[Group, ...] = get_args(Group)
_GROUP_OF_KIND: dict[str, Group] = {
    "attention": "attention",
    "recurrent": "attention",
    "scores": "attention",
    "moe": "ffn",
    "collective": "communication",
    "host": "host",
}


@dataclass(frozen=True)
class OperatorGroup:
    """The operators of a step that serve one end, with their seconds, amounts and the bound of most of their time."""

    name: Group
    operators: tuple[OperatorCost, ...]
    time_s: float
    flops: float
    bytes: float
    link_bytes: float
    bound: str


def grouped(
    model: ModelSpec, costs: Sequence[OperatorCost], bound_seconds: Sequence[dict[str, float]]
) -> tuple[OperatorGroup, ...]:
    """A step's operators by what they serve, each with its seconds by bound; groups without any are left out."""
    ffn_linears = {name for group in model.groups() for name, _, _ in group.ffn.linears(model.hidden, 1)}
    for beside in model.besides:
        linears = beside.layer_linears(model.hidden) + beside.step_linears(model.hidden, model.layers)
        ffn_linears |= {name for name, _, _ in linears}
    members: dict[Group, list[int]] = {group: [] for group in GROUPS}
    for index, cost in enumerate(costs):
        members[_group_of(cost.operator, ffn_linears)].append(index)
    return tuple(
        _group(name, [costs[index] for index in indices], [bound_seconds[index] for index in indices])
        for name, indices in members.items()
        if indices
    )


def _group(name: Group, costs: Sequence[OperatorCost], bound_seconds: Sequence[dict[str, float]]) -> OperatorGroup:
    seconds: dict[str, float] = {}
    for by_bound in bound_seconds:
        for bound, value in by_bound.items():
            seconds[bound] = seconds.get(bound, 0.0) + value

    def total(amount: str) -> float:
        return sum(float(getattr(cost.operator, amount)) * cost.operator.calls for cost in costs)

    return OperatorGroup(
        name,
        tuple(costs),
        time_s=sum(seconds.values()),
        flops=total("flops"),
        bytes=total("bytes"),
        link_bytes=total("link_bytes"),
        bound=max(seconds, key=seconds.__getitem__),
    )


def _group_of(operator: Operator, ffn_linears: set[str]) -> Group:
    """What an operator serves; in a model of several kinds of layers names carry the number of theirs (`2.qkv`)."""
    if operator.kind != "linear":
        return _GROUP_OF_KIND.get(operator.kind, "elementwise")
    if operator.name == "lm_head":
        return "lm_head"
    return "ffn" if operator.name.rsplit(".", 1)[-1] in ffn_linears else "attention"
