"""Which replicas serve, who sends a request to which, and what happens when there are too few or one fails?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from membound.roofline.parallel import Parallelism
from membound.roofline.part import Part
from membound.roofline.times.engines import get_profile

RouterName = Literal["round_robin", "random", "least_loaded", "power_of_two", "prefix_aware"]
Seconds = Annotated[float, Field(gt=0, le=1e9)]

DEFAULT_LOAD_BOUND = 1.25
MOST_REPLICAS = 10_000


class Autoscaling(Part):
    """How many replicas a group has, as Kubernetes' autoscaler decides it: what they do now over what each should.

    Every `interval_s` the group wants as many replicas as bring the unanswered requests of each to `target_queue`, or
    the share of the time that they are busy to `target_utilization`. A new one serves after `cold_start_s`. Where fewer
    were wanted at all times of the last `scale_in_after_s`, replicas take no more requests and leave when they have
    answered theirs, those that have least to do first.
    """

    min_replicas: int = Field(1, ge=0, le=MOST_REPLICAS)
    max_replicas: int = Field(ge=1, le=MOST_REPLICAS)
    target_queue: float | None = Field(None, gt=0, le=1e6, description="unanswered requests of each replica")
    target_utilization: float | None = Field(None, gt=0, le=1, description="share of the time that a replica is busy")
    interval_s: Seconds = 10.0
    cold_start_s: float = Field(60.0, ge=0, le=1e9)
    scale_in_after_s: float = Field(300.0, ge=0, le=1e9)

    @model_validator(mode="after")
    def _has_one_target(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, more than max_replicas, {self.max_replicas}")
        if (self.target_queue is None) == (self.target_utilization is None):
            raise ValueError("give one of target_queue and target_utilization")
        return self


class ReplicaGroup(Part):
    """`count` equal replicas; device, parallelism and engine profile are the scenario's where they are not given."""

    count: int = Field(1, ge=0, le=MOST_REPLICAS, description="when the run begins")
    hardware: str | None = None
    parallel: Parallelism | None = None
    profile: str | None = None
    autoscaling: Autoscaling | None = None

    @field_validator("profile")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        return None if name is None else get_profile(name).name

    @model_validator(mode="after")
    def _can_serve(self) -> ReplicaGroup:
        scaling = self.autoscaling
        if scaling is None and not self.count:
            raise ValueError("count is 0 and there is no autoscaling, so the group never serves; remove it")
        if scaling is not None and not scaling.min_replicas <= self.count <= scaling.max_replicas:
            raise ValueError(
                f"count is {self.count}, but autoscaling allows {scaling.min_replicas} to {scaling.max_replicas}"
            )
        return self


class Outage(Part):
    """The replica of this number (from 0, in the order of the groups) fails at a time, for a time or for ever."""

    replica: int = Field(ge=0)
    at_s: float = Field(ge=0, le=1e12)
    for_s: Seconds | None = Field(None, description="until it serves again; for ever where it is not given")


class Failures(Part):
    """When replicas fail, and what becomes of their requests.

    Either at the times of `outages`, or at random: a replica works for an exponential time of mean `mtbf_s`, and is
    back after one of mean `mttr_s`, with nothing in its memory. What it had not answered begins anew elsewhere
    (`retry`), goes on elsewhere after its emitted tokens, which are computed again (`resume`), or is `failed`; a
    request that was lost more than `most_retries` times fails too.
    """

    outages: tuple[Outage, ...] = Field((), max_length=100_000)
    mtbf_s: Seconds | None = None
    mttr_s: Seconds | None = None
    on_failure: Literal["retry", "resume", "fail"] = "retry"
    most_retries: int | None = Field(None, ge=1, le=1000, description="5 where it is not given")

    @model_validator(mode="after")
    def _happens(self) -> Failures:
        if (self.mtbf_s is None) != (self.mttr_s is None):
            raise ValueError("mtbf_s and mttr_s belong together; give both, or outages")
        if (self.mtbf_s is None) != bool(self.outages):
            raise ValueError("give either outages or mtbf_s with mttr_s")
        if self.on_failure == "fail" and self.most_retries is not None:
            raise ValueError(f"most_retries is {self.most_retries}, but on_failure is 'fail'; remove one of them")
        free_s: dict[int, float] = {}
        for outage in sorted(self.outages, key=lambda outage: outage.at_s):
            if outage.at_s < free_s.get(outage.replica, 0.0):
                raise ValueError(f"outages has replica {outage.replica} fail at {outage.at_s:g} s, when it is down")
            free_s[outage.replica] = float("inf") if outage.for_s is None else outage.at_s + outage.for_s
        return self


class Cluster(Part):
    """Replicas behind a router; load is the tokens, prompts and outputs, of the requests that a replica has to answer.

    `prefix_aware` sends a request to the replica that has most of its prompt cached, unless that has more than
    `load_bound` times the mean load and one step's tokens besides. `power_of_two` draws two replicas and takes the less
    loaded one.
    """

    router: RouterName = "least_loaded"
    load_bound: float | None = Field(None, ge=1, le=1000, description="1.25 where it is not given")
    groups: tuple[ReplicaGroup, ...] = Field(min_length=1, max_length=1000)
    failures: Failures | None = None

    @model_validator(mode="after")
    def _no_idle_option(self) -> Cluster:
        if self.load_bound is not None and self.router != "prefix_aware":
            raise ValueError(
                f"load_bound is {self.load_bound:g}, but router is '{self.router}'; only 'prefix_aware' has a bound"
            )
        most = sum(group.autoscaling.max_replicas if group.autoscaling else group.count for group in self.groups)
        if most > MOST_REPLICAS:
            raise ValueError(f"groups have up to {most} replicas, more than {MOST_REPLICAS}; make it fewer")
        replicas = sum(group.count for group in self.groups)
        for outage in self.failures.outages if self.failures else ():
            if outage.replica >= replicas:
                raise ValueError(f"outages names replica {outage.replica}; the run begins with 0 to {replicas - 1}")
        return self
