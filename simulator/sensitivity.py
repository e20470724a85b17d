"""What does a deployment's rate depend on, and which inputs would change the answer?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from membound.roofline.hardware import HardwareSpec
from membound.simulator.candidates import Demand, Replica, replica_of
from membound.simulator.search import Deployed, Objective, screened_best

# By how much resources and inputs are changed.
PERTURBED = 0.1


@dataclass(frozen=True)
class Sensitivity:
    """How far the most that a replica serves within the objective moves with each resource, and what would change.

    `elasticity` is the relative change for a relative change of 10 %: 1 where the resource alone decides.
    """

    elasticity: dict[str, float]
    screened_answer: str
    answer_changes: dict[str, str]

    @property
    def binds(self) -> str | None:
        """The resource that the answer depends on most."""
        best = max(self.elasticity, key=self.elasticity.__getitem__)
        return best if self.elasticity[best] > 0.01 else None


_RESOURCES: dict[str, Callable[[HardwareSpec, float], HardwareSpec]] = {
    "memory": lambda spec, by: spec.model_copy(update={"memory_bytes": int(spec.memory_bytes * by)}),
    "bandwidth": lambda spec, by: spec.model_copy(update={"bandwidth_bytes_per_s": spec.bandwidth_bytes_per_s * by}),
    "compute": lambda spec, by: spec.model_copy(
        update={
            "matrix_flops": {dtype: rate * by for dtype, rate in spec.matrix_flops.items()},
            "sparse_flops": {dtype: rate * by for dtype, rate in spec.sparse_flops.items()},
        }
    ),
    "link": lambda spec, by: spec.model_copy(
        update={
            name: link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * by})
            for name in ("scale_up", "scale_out")
            if (link := getattr(spec, name)) is not None
        }
    ),
}


def sensitivity_of(best: Deployed, replicas: Sequence[Replica], objective: Objective) -> Sensitivity:
    """What the best deployment's rate depends on, and which inputs would change the answer of the closed forms."""
    replica, demand = best.replica, best.demand
    before = _most(best, replica)
    elasticity = {}
    for name, scaled in _RESOURCES.items():
        changed = _rebuilt(replica, scaled(replica.hardware, 1.0 + PERTURBED))
        after = _most(best, changed)
        elasticity[name] = (after / before - 1.0) / PERTURBED if before > 0 else 0.0
    answer = screened_best(replicas, demand, objective)
    changes = {}
    for name, changed_demand in _perturbed(demand):
        other = screened_best(replicas, changed_demand, objective)
        if _place(other) != _place(answer):
            changes[name] = _said(other)
    return Sensitivity(elasticity, _said(answer), changes)


def _most(deployed: Deployed, replica: Replica) -> float:
    """The most load that the deployment serves within the objective if this is its replica."""
    demand, prompts = deployed.demand, deployed.prompt_engines
    if prompts:
        return replica.most_of_pools(demand, prompts, deployed.replicas)
    return replica.most_load(demand, tails=True) or replica.most_load(demand, tails=False)


def _said(deployed: Deployed | None) -> str:
    return "nothing" if deployed is None else f"{deployed.gpus} x {deployed.replica.hardware.name}"


def _rebuilt(replica: Replica, hardware: HardwareSpec) -> Replica:
    return replica_of(replica.scenario, hardware, replica.precision, replica.parallel, replica.lengths)


def _perturbed(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """The demand with each of its inputs a tenth higher and lower."""
    for sign, by in (("+10 %", 1.0 + PERTURBED), ("-10 %", 1.0 - PERTURBED)):
        if demand.rate_rps is not None:
            yield f"rate {sign}", replace(demand, rate_rps=demand.rate_rps * by)
        if demand.concurrency is not None:
            yield f"concurrency {sign}", replace(demand, concurrency=demand.concurrency * by)
        for bound in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(demand.slo, bound)
            if value is not None:
                slo = demand.slo.model_copy(update={bound: value * by})
                yield f"slo.{bound} {sign}", replace(demand, slo=slo)


def _place(deployed: Deployed | None) -> tuple[str, int] | None:
    return None if deployed is None else (deployed.replica.hardware.name, deployed.gpus)
