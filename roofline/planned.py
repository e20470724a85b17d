"""In which formats are the weights of each group of layers?"""

from __future__ import annotations

from collections import Counter

from membound.roofline.models import ModelSpec
from membound.roofline.models.layers import LayerGroup
from membound.roofline.precision.plan import PrecisionPlan


def planned_groups(model: ModelSpec, plan: PrecisionPlan) -> list[tuple[LayerGroup, PrecisionPlan]]:
    """Equal layers merged, apart from those that the plan keeps in 16 bits; their counts sum to the model's layers."""
    if not plan.plain_first_layers and not plan.plain_last_layers:
        return [(group, plan) for group in model.groups()]
    kept = plan.of_kept_layers()
    plans = (kept if plan.keeps(index, model.layers) else plan for index in range(model.layers))
    counts = Counter(zip(model.stack, plans, strict=True))
    return [(LayerGroup(count, *layer), formats) for (layer, formats), count in counts.items()]
