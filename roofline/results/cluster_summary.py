"""What did each replica of a cluster do, what happened to it, and what did it cost?"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

EventKind = Literal["start", "up", "drain", "release", "failure"]


class ReplicaSummary(BaseModel):
    """One replica: the requests that ended there, and its share of time and money.

    `up_s` is the time in which it took requests or answered its last ones, `utilization` the share of it in which it
    had any. It is paid for from its start until it is released, also while it starts or has failed; `cost_usd` is None
    where the device has no price.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica: int
    group: int
    hardware: str
    devices: int
    requests: int
    completed: int
    output_tokens: int
    up_s: float
    busy_s: float
    utilization: float
    kv_utilization: float
    prefix_hit_rate: float | None
    failures: int
    device_hours: float
    price_usd_per_h: float | None
    price_date: str | None
    cost_usd: float | None


class ClusterEvent(BaseModel):
    """A replica started, served (again), took no more requests, was given back, or failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time_s: float
    replica: int
    kind: EventKind


class ClusterSummary(BaseModel):
    """The cluster as a whole; `events` are the first of `event_count`.

    What failures cost: `retries` of requests, the `lost_tokens` that had been computed for them and are gone, and the
    `lost_output_tokens` that had been emitted and are emitted again or never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    router: str
    replicas: tuple[ReplicaSummary, ...]
    most_replicas: int
    mean_replicas: float
    failures: int
    retries: int
    lost_tokens: int
    lost_output_tokens: int
    device_hours: float
    cost_usd: float | None
    event_count: int
    events: tuple[ClusterEvent, ...]
