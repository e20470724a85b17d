"""Which drafter does a scenario ask for, and on which models does it run?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from membound.kernels.base import Kernels
from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.speculation.draft_models import draft_model, first_layers
from membound.roofline.techniques import (
    EagleDrafts,
    HeadDrafts,
    MedusaDrafts,
    ModelDrafts,
    MtpDrafts,
    SelfDrafts,
)
from membound.roofline.techniques.weights import weights_in
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.loading.weights import Weights
from membound.runtime.ragged import MOST_IN_TREE
from membound.runtime.sampling import Sampler, sampler_for
from membound.runtime.speculation.base import Chooser, Proposer
from membound.runtime.speculation.eagle import EagleProposer, FeatureHead
from membound.runtime.speculation.heads import Head, load_head, random_head, shipped_head
from membound.runtime.speculation.medusa import MedusaHeads, MedusaProposer
from membound.runtime.speculation.model import ModelProposer
from membound.runtime.supported import recurrent
from membound.simulator.scheduling.prefix import mixed_hash

DRAWS_GUESSES = 1  # mixed into the seed of the run, with which the sampler verifies


@dataclass(frozen=True)
class DraftHost:
    """What a drafter lives on: the model, its cache of `num_blocks` blocks, and how to load another scenario's."""

    decoder: Decoder
    weights: Weights
    cache: KvCache
    num_blocks: int
    block_size: int
    load: Callable[[Scenario], Decoder]

    def outer_weights(self) -> Weights:
        """The model's, without its layers, where its decoder computes: they were loaded on the host."""
        return replace(self.weights, layers=()).to(self.decoder.device)


def undividable_drafts(scenario: Scenario) -> str | None:
    """Why a scenario that divides its model cannot draft as it asks, in one sentence; None where it can."""
    drafts, devices = scenario.setup.drafts, scenario.setup.parallel.devices
    if drafts is None or drafts.kind == "ngram" or devices == 1:
        return None
    return (
        f"speculation by {drafts.kind} drafts in one process, but parallel asks for {devices}; remove one of them, or "
        "take ngram_speculation"
    )


def proposer_for(scenario: Scenario, host: DraftHost) -> Proposer | None:
    """The scenario's drafter where it computes; None where it looks tokens up, or where there is none.

    Raises MemboundError for a drafter that this model cannot have.
    """
    drafts = scenario.setup.drafts
    if drafts is None or drafts.kind == "ngram":
        return None
    if drafts.nodes is not None and drafts.nodes >= MOST_IN_TREE:
        raise MemboundError(
            f"field 'tree_size' of {drafts.kind} is {drafts.nodes}, but the runtime verifies trees of at most "
            f"{MOST_IN_TREE - 1} guesses; give fewer"
        )
    # Rejection keeps the model's distribution only where its numbers tell nothing of those that drew the guess.
    choose = Chooser(scenario.temperature, mixed_hash(scenario.workload.seed, DRAWS_GUESSES), host.decoder.device)
    spec = host.decoder.spec
    if isinstance(drafts, SelfDrafts):
        layers = first_layers(spec, drafts.layers).layers
        return ModelProposer(host.decoder, host.cache, host.block_size, drafts.gamma, choose, layers)
    if isinstance(drafts, ModelDrafts):
        decoder = host.load(_draft_scenario(scenario, drafts))
        _check_vocabulary(decoder, host.decoder)
        if recurrent(decoder.spec):
            raise MemboundError(
                f"draft '{decoder.spec.name}' keeps a recurrent state, from which what it wrote ahead cannot be taken "
                "back; give field 'draft' a model of attention, or take ngram_speculation"
            )
        cache = decoder.new_cache(host.num_blocks, host.block_size)
        return ModelProposer(decoder, cache, host.block_size, drafts.gamma, choose)
    if isinstance(drafts, MedusaDrafts):
        heads = MedusaHeads(_head(scenario, drafts, spec), host.outer_weights().lm_head, host.decoder.kernels)
        _check_depth("heads", drafts, len(heads.residuals))
        return MedusaProposer(heads, drafts.gamma, drafts.tokens)
    if isinstance(drafts, EagleDrafts):
        layer = FeatureHead(_head(scenario, drafts, spec), spec, host.outer_weights(), host.decoder.kernels)
        return EagleProposer(layer, host.num_blocks, host.block_size, drafts.gamma, drafts.tokens, drafts.branches)
    if isinstance(drafts, MtpDrafts):
        module = FeatureHead(_mtp_module(scenario, spec), spec, host.outer_weights(), host.decoder.kernels, dense=False)
        return EagleProposer(module, host.num_blocks, host.block_size, drafts.gamma, drafts.gamma, 1)
    raise AssertionError(f"nothing drafts as {drafts.kind}")


def sampler_of(scenario: Scenario, device: str, kernels: Kernels) -> Sampler:
    """The sampler that verifies the scenario's drafts as its technique says."""
    drafts = scenario.setup.drafts
    typical = isinstance(drafts, HeadDrafts) and drafts.typical
    return sampler_for(scenario.temperature, scenario.workload.seed, device, typical=typical, kernels=kernels)


def _head(scenario: Scenario, drafts: HeadDrafts, spec: ModelSpec) -> Head:
    """The head that a scenario names or membound brings; for random weights a random one, which is right for timing."""
    if drafts.head is None and scenario.weights == "random":
        return random_head(drafts.kind, spec, drafts.gamma, drafts.guessable or spec.vocab, scenario.workload.seed)
    head = load_head(Path(drafts.head) if drafts.head else shipped_head(drafts.kind, spec), drafts.kind, spec)
    if drafts.guessable not in (None, len(head.tokens)):
        raise MemboundError(
            f"field 'guessable' of {drafts.kind} is {drafts.guessable}, but its head can guess {len(head.tokens)} "
            "tokens; give that number"
        )
    return head


def _mtp_module(scenario: Scenario, spec: ModelSpec) -> Head:
    """The model's own module for the token after the next, in its shape: files' modules are not loaded."""
    if not spec.mtp_layers:
        raise MemboundError(f"'{spec.name}' has no module for multi-token prediction; take eagle or medusa")
    if scenario.weights != "random":
        raise MemboundError(
            f"field 'weights' is '{scenario.weights}', but the runtime loads no modules for multi-token prediction; "
            "set it to 'random', which is right for timing, or take eagle or medusa"
        )
    return random_head("mtp", spec, 1, spec.vocab, scenario.workload.seed)


def _check_depth(field: str, drafts: HeadDrafts, most: int) -> None:
    if drafts.gamma > most:
        raise MemboundError(f"field '{field}' of {drafts.kind} is {drafts.gamma}, but the file has {most}; give fewer")


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
