"""Can a model, and its experts, be divided over the devices of a deployment?"""

from __future__ import annotations

from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.techniques import EngineSetup


def check_parallel(model: ModelSpec, setup: EngineSetup) -> None:
    """Raises MemboundError where a deployment cannot divide this model."""
    parallel = setup.parallel
    if parallel.pp > model.layers:
        raise MemboundError(f"parallel.pp is {parallel.pp}, more than the {model.layers} layers of '{model.name}'")
    has_experts = bool(model.mixtures)
    if parallel.ep > 1 and not has_experts:
        raise MemboundError(f"parallel.ep is {parallel.ep}, but '{model.name}' has no experts; leave it at 1")
    if setup.expert_storage is not None and not has_experts:
        raise MemboundError(f"expert_offload moves routed experts, and '{model.name}' has none; leave it out")
    if setup.overlap is not None and not (parallel.tp > 1 or parallel.cp > 1 or (parallel.dp > 1 and has_experts)):
        raise MemboundError(
            f"dual_batch_overlap hides messages between the devices of a layer, and '{model.name}' has none here; "
            "give parallel.tp, or parallel.dp with parallel.ep for a mixture of experts, or leave it out"
        )
    if setup.redundant_experts is not None and not has_experts:
        raise MemboundError(f"expert_balancing places routed experts, and '{model.name}' has none; leave it out")
    if setup.redundant_experts is not None and parallel.ep == 1:
        raise MemboundError(
            "expert_balancing places experts on the devices of expert parallelism, and parallel.ep is 1; give more, or "
            "leave it out"
        )
    for group in model.groups():
        group.attention.linears(model.hidden, parallel.tp)
        if isinstance(group.ffn, MoeFfn):
            _check_experts(group.ffn, setup, model.name)


def _check_experts(ffn: MoeFfn, setup: EngineSetup, name: str) -> None:
    if setup.parallel.exact:
        raise MemboundError(f"parallel.exact is true, but '{name}' sums its experts over devices; leave it out")
    ep, redundant = setup.parallel.ep, setup.redundant_experts
    if redundant is not None and ffn.choice == "expert":
        raise MemboundError(f"the experts of '{name}' each take equally many tokens; leave expert_balancing out")
    if (ffn.experts + (redundant or 0)) % ep:
        copies = "" if redundant is None else f" and {redundant} redundant ones"
        raise MemboundError(f"parallel.ep is {ep}, which does not divide the {ffn.experts} experts{copies} of '{name}'")
