"""Who is served when: how steps are filled, who goes first, who is turned away."""

from membound.simulator.scheduling.policies.admission import Admission, Everybody, InTime, ShortQueue, Strict
from membound.simulator.scheduling.policies.batching import (
    BATCHINGS,
    Batching,
    ChunkedPrefill,
    ContinuousBatching,
    PrefillFirst,
    StaticBatching,
)
from membound.simulator.scheduling.policies.order import (
    EarliestDeadline,
    FirstCome,
    LeastSlack,
    Order,
    PriorityWithAgeing,
)

__all__ = [
    "BATCHINGS",
    "Admission",
    "Batching",
    "ChunkedPrefill",
    "ContinuousBatching",
    "EarliestDeadline",
    "Everybody",
    "FirstCome",
    "InTime",
    "LeastSlack",
    "Order",
    "PrefillFirst",
    "PriorityWithAgeing",
    "ShortQueue",
    "StaticBatching",
    "Strict",
]
