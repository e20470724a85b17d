"""What does it cost to propose guesses?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from membound.roofline.cost import StepCost, step_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.memory import CacheTerms, cache_terms, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.operators import linear
from membound.roofline.parallel import Parallelism
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.shape import Count, StepShape
from membound.roofline.speculation.draft_models import draft_model, first_layers, one_layer
from membound.roofline.speculation.token_tree import TokenTree
from membound.roofline.step import step_weight_bytes
from membound.roofline.techniques import Drafts, EagleDrafts, EngineSetup, MedusaDrafts, ModelDrafts, SelfDrafts
from membound.roofline.techniques.weights import weights_in
from membound.roofline.times.engines import get_profile
from membound.roofline.times.operator import Times

# Kernels between two passes of a drafter that no graph holds, as the next pass depends on what they find: top-k or
# argmax, gathering embeddings and hidden states, positions, slots, lengths (assumed; `validation/speedups.py` counts
# them as one layer and a half of an eager engine).
GLUE_KERNELS = 12
# Nodes that a pass of a drafter continues, at which passes are tabulated.
_PASSES = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0])


def drafter_of(model: ModelSpec, drafts: Drafts, setup: EngineSetup) -> DrafterCost:
    """What drafts for `model` with the set-up in which its guesses are verified.

    Raises MemboundError where the model cannot have such a drafter.
    """
    if drafts.kind == "ngram":
        return DrafterCost()
    if isinstance(drafts, ModelDrafts):
        spec = draft_model(model, drafts.draft)
        return DraftModel(spec, replace(setup, precision=_drafting_formats(model, spec, setup, drafts.format)))
    if isinstance(drafts, SelfDrafts):
        return FirstLayers(first_layers(model, drafts.layers), setup)
    if isinstance(drafts, MedusaDrafts):
        return Heads(model, _own_head(setup), drafts.gamma, drafts.guessable)
    if drafts.kind == "mtp":
        if not model.mtp_layers:
            raise MemboundError(f"'{model.name}' has no module for multi-token prediction; take eagle or medusa")
        return Module(one_layer(model, dense=False), setup)
    layer = one_layer(model, dense=True)
    if isinstance(drafts, EagleDrafts) and drafts.guessable is not None:
        layer = layer.model_copy(update={"vocab": min(drafts.guessable, model.vocab)})
    return Module(layer, _own_head(setup))


def glue_s(times: Times, setup: EngineSetup) -> float:
    """Seconds in which the host launches what stands between two passes; a CPU calls it at once."""
    return 0.0 if times.hardware.kind == "cpu" else GLUE_KERNELS * get_profile(setup.profile).launch_s


class DrafterCost:
    """What proposing costs; prompt lookup costs nothing that counts."""

    reads = False

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        return 0.0

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        """`seconds` of one step of decode for any tree; None where each is quick to cost alone."""
        return None

    def weights_bytes(self) -> float:
        return 0.0

    def cache_terms(self) -> CacheTerms:
        """What its own caches hold of each sequence."""
        return CacheTerms((), 0.0)


class DraftModel(DrafterCost):
    """A model of its own: one of its steps for each depth of the tree, over the nodes that it continues."""

    reads = True

    def __init__(self, spec: ModelSpec, setup: EngineSetup) -> None:
        self.spec = spec
        self.setup = replace(setup, parallel=_drafting_parallel(spec, setup))

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        first, *others = tree.expanded_by_depth
        cost, more_s = self.reading(times, shape.with_guesses(first - 1))
        return self._passes_s(times, shape, others, cost.time_s + more_s)

    def reading(self, times: Times, shape: StepShape) -> tuple[StepCost, Count]:
        """The first pass, over prompts too, and seconds beside those of its operators.

        It waits for the host as the model's own step does, which learns what was accepted and prepares the drafter's
        batch; those that follow are captured in a graph and wait no more.
        """
        cost = step_cost(self.spec, self.setup, times, shape)
        return cost, self._joining_s(times, shape) + glue_s(times, self.setup)

    def _passes_s(self, times: Times, shape: StepShape, expanded: Sequence[int], before_s: Count) -> Count:
        """`before_s` and a pass for each depth's expanded nodes, over the sequences that decode."""
        decode = shape.decoding
        decodes = np.asarray(decode.sequences) > 0
        between_s = glue_s(times, self.setup)
        total: Any = before_s
        if np.any(decodes):
            for nodes, passes in Counter(expanded).items():
                total = total + passes * decodes * (self._pass_s(times, decode.with_guesses(nodes - 1)) + between_s)
        return total

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        many = shape.filled(len(_PASSES))
        between_s = glue_s(times, self.setup)
        cost, more_s = self.reading(times, shape)
        first_s = float(cost.time_s + more_s)
        others_s = np.broadcast_to(self._pass_s(times, many.with_guesses(_PASSES - 1.0)), _PASSES.shape) + between_s
        return lambda tree: first_s + float(np.interp(tree.expanded_by_depth[1:], _PASSES, others_s).sum())

    def _pass_s(self, times: Times, shape: StepShape) -> Count:
        """A pass behind the first."""
        cost = step_cost(self.spec, self.setup, times, shape)
        seconds = cost.time_s + self._joining_s(times, shape)
        if times.hardware.kind == "cpu" or not get_profile(self.setup.profile).graphs:
            return seconds
        host = sum(times.of(item.operator, 0.0).time_s for item in cost.operators if item.operator.kind == "host")
        return seconds - host

    def _joining_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of what a pass computes beside the layers of a model."""
        return 0.0

    def weights_bytes(self) -> float:
        return weights_bytes(self.spec, self.setup)

    def cache_terms(self) -> CacheTerms:
        return cache_terms(self.spec, self.setup)


class FirstLayers(DraftModel):
    """The model's own first layers, whose weights and caches are there, as are K and V of everything that was read."""

    reads = False

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        return self._passes_s(times, shape, tree.expanded_by_depth, np.zeros(np.shape(shape.sequences))[()])

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        return None

    def weights_bytes(self) -> float:
        return 0.0

    def cache_terms(self) -> CacheTerms:
        return CacheTerms((), 0.0)


class Module(DraftModel):
    """One layer on the model's hidden states, joined with the last token's embedding; it shares both tables."""

    def _joining_s(self, times: Times, shape: StepShape) -> Count:
        tp = self.setup.parallel.tp
        hidden, format = self.spec.hidden, self.setup.precision.weights_of("ffn")
        joined = linear(
            "join", 1, shape.tokens, -(-hidden // tp), 2 * hidden, format, times.activation_bytes,
            self.setup.precision.activations_of("ffn"),
        )  # fmt: skip
        weights = step_weight_bytes(self.spec, self.setup)
        return times.of(joined, weights).time_s

    def weights_bytes(self) -> float:
        """Those of the layer: what a second one would add. And the matrix that joins."""
        two = self.spec.model_copy(update={"layers": 2})
        layer = weights_bytes(two, self.setup) - weights_bytes(self.spec, self.setup)
        hidden, tp = self.spec.hidden, self.setup.parallel.tp
        return layer + self.setup.precision.weights_of("ffn").matrix_bytes(hidden, 2 * hidden) / tp


class Heads(DrafterCost):
    """Medusa's: for each position a matrix over the hidden state, once a step, and an lm_head.

    Each head has an lm_head of its own, or those that can guess few tokens share these rows of the model's.
    """

    def __init__(self, model: ModelSpec, setup: EngineSetup, heads: int, guessable: int | None) -> None:
        self.model, self.setup, self.heads, self.guessable = model, setup, heads, guessable

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        """On the last token of each sequence; the weights come from memory, as the model's own passed in between."""
        plan = self.setup.precision
        weights = step_weight_bytes(self.model, self.setup)
        total: Count = 0.0
        for name, count, rows, n in self._matrices:
            op = linear(
                name, count, rows * shape.sequences, n, self.model.hidden, plan.weights, times.activation_bytes,
                plan.plain,
            )  # fmt: skip
            total = total + times.of(op, weights).time_s * count
        return total

    @property
    def _matrices(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, how many, rows of each sequence that pass each of them, and outputs."""
        hidden, vocab = self.model.hidden, self.model.vocab
        shared = self.guessable is not None
        outputs = min(self.guessable or vocab, vocab)
        lm_head = ("lm_head", 1, self.heads) if shared else ("lm_head", self.heads, 1)
        tp = self.setup.parallel.tp
        return ("residual", self.heads, 1, -(-hidden // tp)), (*lm_head, -(-outputs // tp))

    def weights_bytes(self) -> float:
        format = self.setup.precision.weights
        own = self._matrices[:1] if self.guessable is not None else self._matrices
        return sum(count * format.matrix_bytes(n, self.model.hidden) for _, count, _, n in own)


def _drafting_parallel(spec: ModelSpec, setup: EngineSetup) -> Parallelism:
    """The model's own parallelism within one stage; where that cannot divide the drafter, each device drafts."""
    wanted = setup.parallel.model_copy(update={"pp": 1, "ep": setup.parallel.ep if spec.mixtures else 1})
    try:
        check_parallel(spec, replace(setup, parallel=wanted))
    except MemboundError:
        return wanted.model_copy(update={"tp": 1, "ep": 1})
    return wanted


def _drafting_formats(model: ModelSpec, spec: ModelSpec, setup: EngineSetup, format: str | None) -> PrecisionPlan:
    """A drafter is published in formats of its own; a technique that sets the model's weights sets its too."""
    if format is not None:
        return replace(weights_in(format).apply(EngineSetup()).precision, kv=setup.kv)
    plan, published = setup.precision, model.published
    if (plan.weights, plan.exceptions) != (published.weights, published.exceptions):
        return plan
    return replace(spec.published, kv=plan.kv)


def _own_head(setup: EngineSetup) -> EngineSetup:
    """The set-up of a head that was trained apart from the model: 16 bits unless the plan says otherwise."""
    plan = setup.precision
    head = dict(plan.exceptions).get("draft_head", plan.plain)
    kept = tuple((part, plan.weights_of(part)) for part in ("embedding", "lm_head"))
    return replace(setup, precision=replace(plan, weights=head, exceptions=kept))
