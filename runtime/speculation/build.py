"""Which drafter does a scenario ask for, and on which models does it run?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from membound.roofline.errors import MemboundError
from membound.roofline.model_files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.speculation import draft_model, first_layers
from membound.roofline.techniques import DrafterKind, ModelDrafts, SelfDrafts
from membound.roofline.techniques.weights import weights_in
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.ragged import MOST_IN_TREE
from membound.runtime.speculation.base import Chooser, Proposer
from membound.runtime.speculation.model import ModelProposer

RUNNING: tuple[DrafterKind, ...] = ("ngram", "draft_model", "self")


@dataclass(frozen=True)
class DraftHost:
    """What a drafter lives on: the model, its cache of `num_blocks` blocks, and how to load another scenario's."""

    decoder: Decoder
    cache: KvCache
    num_blocks: int
    block_size: int
    load: Callable[[Scenario], Decoder]


def proposer_for(scenario: Scenario, host: DraftHost) -> Proposer | None:
    """The scenario's drafter where it computes; None where it looks tokens up, or where there is none.

    Raises MemboundError for a drafter that this model cannot have.
    """
    drafts = scenario.setup.drafts
    if drafts is None or drafts.kind == "ngram":
        return None
    if scenario.setup.parallel.devices > 1:
        raise MemboundError(
            f"speculation by {drafts.kind} drafts in one process, but parallel asks for "
            f"{scenario.setup.parallel.devices}; remove one of them, or take ngram_speculation"
        )
    if drafts.nodes is not None and drafts.nodes >= MOST_IN_TREE:
        raise MemboundError(
            f"field 'tree_size' of {drafts.kind} is {drafts.nodes}, but the runtime verifies trees of at most "
            f"{MOST_IN_TREE - 1} guesses; give fewer"
        )
    if not all(hasattr(layer, "move_tokens") for layer in host.cache):
        raise MemboundError(
            f"speculation by {drafts.kind} takes back K and V of single tokens, which the cache of '{scenario.model}' "
            "as set up here cannot; take another kv_quantization, or ngram_speculation"
        )
    choose = Chooser(scenario.temperature, scenario.workload.seed, host.decoder.device)
    if isinstance(drafts, SelfDrafts):
        layers = first_layers(host.decoder.spec, drafts.layers).layers
        return ModelProposer(host.decoder, host.cache, host.block_size, drafts.gamma, choose, layers)
    if isinstance(drafts, ModelDrafts):
        decoder = host.load(_draft_scenario(scenario, drafts))
        _check_vocabulary(decoder, host.decoder)
        cache = decoder.new_cache(host.num_blocks, host.block_size)
        return ModelProposer(decoder, cache, host.block_size, drafts.gamma, choose)
    raise MemboundError(f"speculation by {drafts.kind} is predicted, not measured yet; take self_speculation")


def _draft_scenario(scenario: Scenario, drafts: ModelDrafts) -> Scenario:
    """The scenario whose decoder drafts: another model, and of the techniques those that set weights."""
    spec = draft_model(resolve_model(scenario.model), drafts.draft)
    name = drafts.draft or spec.name
    techniques = tuple(one for one in scenario.techniques if one.sets_weights)
    if drafts.format is not None:
        techniques = (weights_in(drafts.format),)
    changed = scenario.model_copy(update={"model": name, "weights": _weights_of(scenario, drafts, name)})
    return changed.with_techniques(techniques)


def _weights_of(scenario: Scenario, drafts: ModelDrafts, name: str) -> str:
    if drafts.weights is not None:
        return drafts.weights
    if name == scenario.model or scenario.weights == "random":
        return scenario.weights
    if Path(name).exists():
        return name
    raise MemboundError(
        f"draft_model_speculation drafts with '{name}', whose weights nobody named; give its field 'weights': "
        "'random', 'pretrained', or the path of a GGUF or of a safetensors folder"
    )


def _check_vocabulary(draft: Decoder, target: Decoder) -> None:
    if draft.embed.shape[0] != target.embed.shape[0]:
        raise MemboundError(
            f"draft '{draft.spec.name}' has {draft.embed.shape[0]} tokens in its vocabulary, but "
            f"'{target.spec.name}' has {target.embed.shape[0]}; give a model with the same tokenizer"
        )
