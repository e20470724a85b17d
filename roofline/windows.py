"""How far back do a model's layers look?"""

from __future__ import annotations

from membound.roofline.models import ModelSpec
from membound.roofline.models.attention import GroupedQueryAttention, LatentAttention
from membound.roofline.techniques import EngineSetup


def windows_of(model: ModelSpec, setup: EngineSetup) -> tuple[int, ...]:
    """The tokens of a sequence that layers see at most, shortest first; empty where all see the whole of it.

    A layer's own window, what a sparse indexer chooses, and the budget of a cache that does not keep or read all.
    """
    found: set[int] = set()
    for mixer in (mixer for group in model.groups() for mixer in group.mixers):
        window, budget = mixer.window, setup.budget_of(mixer.kind)
        if isinstance(mixer, GroupedQueryAttention | LatentAttention) and mixer.indexer is not None:
            window = mixer.indexer.top_k
        if window is not None:
            found.add(window)
        if budget is not None and not (window is not None and window <= budget.tokens):
            found.add(budget.tokens)
    return tuple(sorted(found))
