"""Does everything that a scenario names apply to its model?"""

from __future__ import annotations

from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import EngineSetup


def has_kv_cache(model: ModelSpec) -> bool:
    """Whether its tokens leave something in a cache; recurrent states do not grow with them."""
    return model.kv_bytes_per_token(16.0) > 0.0


def check_applicable(model: ModelSpec, setup: EngineSetup) -> None:
    """Raises MemboundError for what would change nothing or cannot be, as the model lacks what it is about."""
    if setup.expert_skew and not model.mixtures:
        field = "expert_loads" if isinstance(setup.expert_skew, tuple) else "expert_skew"
        raise MemboundError(f"field '{field}' is about routed experts, and '{model.name}' has none; leave it out")
    if setup.kv_budget is not None and "mla" in model.mixer_kinds:
        raise MemboundError(
            "kv_eviction chooses tokens for each KV head, and latent attention (MLA) has one latent for all heads; "
            "leave it out"
        )
    if has_kv_cache(model):
        return
    named = "kv_quantization" if setup.kv.width < 16 else "kv_eviction" if setup.kv_budget is not None else None
    if named is not None:
        raise MemboundError(
            f"{named} needs a cache of keys and values, which '{model.name}' does not have; leave it out"
        )
