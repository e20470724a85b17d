"""What does `membound predict --json` print of an operating point?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from membound.roofline.cost import OperatorCost
from membound.roofline.models.layers import LayerGroup
from membound.roofline.techniques import remarks

if TYPE_CHECKING:
    from membound.roofline.operating_point import OperatingPoint, Ridge
    from membound.roofline.operator_groups import OperatorGroup

# Elements of 16 bits in two vector loads of 16 bytes; dimensions of a head that attention kernels are made for.
ALIGNED, WARP = 16, 32


def point_json(point: OperatingPoint) -> dict[str, Any]:
    """What `membound predict --json` prints of the step: its time by operator, its bounds, memory and origin."""
    cost, hardware = point.cost, point.hardware
    at = {"phase": point.phase, "batch": point.batch, "context": point.context, "drafts": point.drafts}
    step = {
        "time_s": point.time_s,
        "low_s": float(cost.low_s),
        "high_s": float(cost.high_s),
        "relative_error": float(cost.relative_error),
        "tokens_per_s": point.tokens_per_s,
        "flops": float(cost.flops),
        "bytes": float(cost.bytes),
        "arithmetic_intensity": float(cost.arithmetic_intensity),
        "bottleneck": point.bottleneck,
        "bottleneck_share": point.shares,
    }
    if point.phase == "verify":
        step |= {"breakeven_tokens": point.breakeven_tokens(), "most_tokens": point.most_tokens}
        if (token := point.emitted_token()) is not None:
            step["emitted_token"] = token._asdict()
    groups = point.groups
    group_of = {id(item): group.name for group in groups for item in group.operators}
    return {
        "point": at,
        "model": {"name": point.model.name, "layers": _layers_json(point.model.groups())},
        "step": step,
        "groups": [_group_json(group, point.time_s) for group in groups],
        "operators": [
            _operator_json(item, point.time_s, max(seconds, key=seconds.__getitem__), group_of[id(item)])
            for item, seconds in zip(cost.operators, point.bound_seconds, strict=True)
        ],
        "ridge": _ridge_json(point.ridge),
        "formats": point.formats.to_json(),
        "memory": _memory_json(point),
        "parallel": {**point.setup.parallel.model_dump(), "devices": point.setup.parallel.devices},
        "pipeline": _pipeline_json(point),
        "origin": _origin_json(point),
        "remarks": _remarks(point),
        "hardware": {"name": hardware.name, "calibrated": point.calibrated, "source": hardware.source},
    }


def _remarks(point: OperatingPoint) -> list[str]:
    """What is not as the scenario's words suggest, a sentence each."""
    said = [] if point.drafting is None else [point.drafting]
    return said if point.calibrated else [*said, *remarks(point.setup, point.hardware), *_odd_sizes(point)]


def _odd_sizes(point: OperatingPoint) -> Iterator[str]:
    """Sizes unlike those of the tables that the times are fitted on, which their kernels pad or load slower."""
    operators = [cost.operator for cost in point.cost.operators]
    linears = [op for op in operators if op.kind == "linear" and op.name != "lm_head"]
    sizes = sorted({size for op in linears for size in (op.n, op.k) if size % ALIGNED})
    if sizes:
        listed = ", ".join(str(size) for size in sizes)
        yield (
            f"matrices with sizes that are no multiple of {ALIGNED} ({listed}) were not measured: their times are "
            "inferred from aligned ones, and kernels that pad them or load them piecewise take longer"
        )
    mixers = (mixer for group in point.model.groups() for mixer in group.mixers)
    dims = {mixer.head_dim for mixer in mixers if hasattr(mixer, "head_dim")}
    if odd := sorted(dim for dim in dims if dim % WARP):
        listed = ", ".join(str(dim) for dim in odd)
        yield (
            f"attention heads of {listed} dimensions were not measured: their times are inferred from heads that "
            f"are multiples of {WARP}, to which kernels pad them"
        )


def _pipeline_json(point: OperatingPoint) -> dict[str, float]:
    """Micro-batches under way, and the share of their time that a pipeline's stages wait for one."""
    micro = float(point.setup.parallel.micro_batches_of(point.batch))
    return {"micro_batches": micro, "bubble": max(0.0, 1.0 - micro / point.setup.parallel.pp)}


def _memory_json(point: OperatingPoint) -> dict[str, Any]:
    memory = point.memory
    return {
        "weights_bytes": memory.weights_bytes,
        "weights_by_part": point.weights_by_part,
        "kv_bytes": memory.kv_bytes,
        "state_bytes": point.state_bytes,
        "activation_bytes": memory.activation_bytes,
        "total_bytes": memory.total_bytes,
        "device_bytes": point.hardware.memory_bytes,
        "usable_bytes": point.usable_bytes,
        "free_bytes": point.free_bytes,
        "fits": point.fits,
        "remedy": point.remedy() or None,
        "largest_batch": point.largest_batch(),
        "largest_context": point.largest_context(),
    }


def _origin_json(point: OperatingPoint) -> dict[str, Any]:
    origin = point.origin
    return {
        "kind": origin.kind,
        "measured_share": origin.measured_share,
        "inherited_from": list(origin.inherited_from),
        "engine": point.setup.profile,
        "kernels": [kernel.to_json() for kernel in origin.kernels],
    }


def _layers_json(groups: tuple[LayerGroup, ...]) -> list[dict[str, Any]]:
    return [
        {
            "count": group.count,
            "attention": " + ".join(mixer.kind for mixer in group.mixers),
            "window": next((mixer.window for mixer in group.mixers if mixer.window is not None), None),
            "ffn": group.ffn.kind,
        }
        for group in groups
    ]


def _group_json(group: OperatorGroup, step_s: float) -> dict[str, Any]:
    return {
        "name": group.name,
        "operators": [item.operator.name for item in group.operators],
        "time_s": group.time_s,
        "share": group.time_s / step_s,
        "flops": group.flops,
        "bytes": group.bytes,
        "link_bytes": group.link_bytes,
        "bound": _bound(group.bound, group.operators),
    }


def _bound(bound: str, items: Sequence[OperatorCost]) -> str:
    """The bound with what memory moves named as it is: norms and activation functions read no weights to speak of.

    The shares of a step know no such bound: there what is not the cache's counts with the weights.
    """
    weights = sum(float(item.operator.weight_bytes) * item.operator.calls for item in items)
    activations = sum(float(item.operator.activation_bytes) * item.operator.calls for item in items)
    return "memory_activations" if bound == "memory_weights" and activations > weights else bound


def _operator_json(item: OperatorCost, step_s: float, bound: str, group: str) -> dict[str, Any]:
    op, total_s = item.operator, float(item.total_s)
    return {
        "name": op.name,
        "group": group,
        "calls": op.calls,
        "flops": float(op.flops) * op.calls,
        "weight_bytes": float(op.weight_bytes) * op.calls,
        "kv_bytes": float(op.kv_bytes) * op.calls,
        "activation_bytes": float(op.activation_bytes) * op.calls,
        "link_bytes": float(op.link_bytes) * op.calls,
        "time_s": total_s,
        "share": total_s / step_s,
        "bound": _bound(bound, (item,)),
    }


def _ridge_json(ridge: Ridge) -> dict[str, Any]:
    return {
        "dtype": ridge.dtype,
        "flops_per_s": ridge.flops_per_s,
        "bytes_per_s": ridge.bytes_per_s,
        "flops_per_byte": ridge.flops_per_byte,
        "distance": ridge.distance,
    }
