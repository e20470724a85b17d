"""What does a step with guesses yield, what does it cost, and how many guesses are worth it?

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023: with acceptance a and g guesses
a step emits E = (1 - a^(g+1)) / (1 - a) tokens, and is E / (g c + v) times as fast as plain decoding. c is what a guess
costs and v what verification costs, both against a plain step of the same batch. The paper takes v = 1; here c and v
come from the roofline, so that they grow with the batch, and with the distinct experts of a mixture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from membound.roofline.acceptance import AcceptanceProfile
from membound.roofline.cost import step_cost
from membound.roofline.engines import get_profile
from membound.roofline.errors import MemboundError
from membound.roofline.memory import kv_bytes, weights_bytes
from membound.roofline.model_files import resolve_model
from membound.roofline.models import GatedFfn, ModelSpec, MoeFfn, catalog
from membound.roofline.models.layers import LayerOverride
from membound.roofline.operator_time import Times
from membound.roofline.operators import elementwise, linear
from membound.roofline.parallel import Parallelism
from membound.roofline.precision_plan import PrecisionPlan
from membound.roofline.scenario import Scenario
from membound.roofline.shape import Count, StepShape
from membound.roofline.step import check_parallel, step_weight_bytes
from membound.roofline.tasks import acceptance_of, found_of
from membound.roofline.techniques import Drafts, EagleDrafts, EngineSetup, MedusaDrafts, ModelDrafts, SelfDrafts, Size
from membound.roofline.techniques.weights import weights_in
from membound.roofline.token_tree import TokenTree

# Vocabularies differ by padding within a family; by more than this they are not the same.
_SAME_VOCABULARY = 0.02
MOST_GUESSES = 32
# Nodes of the trees with which the tables of accepted tokens were made, to which a profile applies: EAGLE's paper and
# Medusa's (from memory). Smaller trees accept less of the same content.
_TABLED_NODES = {"eagle": 25, "medusa": 63}
# Kernels between two passes of a drafter that no graph holds, as the next pass depends on what they find: top-k or
# argmax, gathering embeddings and hidden states, positions, slots, lengths (assumed; `validation/speedups.py` counts
# them as one layer and a half of an eager engine).
GLUE_KERNELS = 12
# Nodes that a pass of a drafter continues, at which passes are tabulated.
_PASSES = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0])
# Logits of a guess are written in fp32, and read for its probabilities and for the choice (assumed).
_ACCEPT_BYTES = 12.0


def expected_tokens(alpha: float, gamma: int) -> float:
    """E of Leviathan et al., equation 1: tokens of a step with `gamma` guesses, each right with chance `alpha`."""
    return gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def chain_speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """E / (g c + v); theorem 3.8 of Leviathan et al. where v = 1."""
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def stationary_gamma(alpha: float, c: float) -> float:
    """The real g at which E / (g c + 1) is largest: (-A - W(-e^-A)) / u - 1, u = -ln a, A = 1 + u (1/c - 1).

    W is the lower branch of Lambert's function. With y = -W it is y - ln y = A, so that nothing underflows, and
    g = ln(y) / u - 1. Below 0 where no guess is worth its cost, infinite where guesses are free or always right.
    """
    if alpha <= 0.0:
        return -1.0
    if alpha >= 1.0 or c <= 0.0:
        return math.inf
    u = -math.log(alpha)
    a = 1.0 + u * (1.0 / c - 1.0)
    if a <= 1.0:
        return -1.0
    y = a + math.log(a) + 1.0
    for _ in range(50):  # Newton; y - ln y is convex, and the start lies above the root
        step = (y - math.log(y) - a) / (1.0 - 1.0 / y)
        y -= step
        if step <= 1e-14 * y:
            break
    return math.log(y) / u - 1.0


def best_chain(alpha: float, c: float, most: int = MOST_GUESSES) -> int:
    """The whole number of guesses with the largest E / (g c + 1), 0 where none is worth it."""
    real = min(max(stationary_gamma(alpha, c), 0.0), float(most))
    return max((math.floor(real), math.ceil(real)), key=lambda gamma: chain_speedup(alpha, gamma, c))


class Best(NamedTuple):
    """The length of drafts with the largest gain, and that gain; elementwise for arrays."""

    gamma: Count
    speedup: Count


@dataclass(frozen=True)
class Speculation:
    """The drafts of a set-up at work for a model: what a step yields, and what it costs on a device.

    `profile` is the content's acceptance, position by position of what a step emits: that of a tree's guesses together,
    as tables of accepted tokens give it. Without it that of the drafts holds. Shapes are those of a plain step, in
    which each decoding sequence has one new token.
    """

    model: ModelSpec
    setup: EngineSetup
    profile: AcceptanceProfile | None = None

    @property
    def drafts(self) -> Drafts:
        """What drafts; raises MemboundError for a set-up without speculation."""
        if self.setup.drafts is None:
            raise MemboundError("this set-up does not speculate; add a technique such as ngram_speculation or eagle")
        return self.setup.drafts

    @cached_property
    def plain(self) -> EngineSetup:
        """The set-up without speculation: what is verified is costed with it."""
        return replace(self.setup, drafts=None)

    @cached_property
    def tree(self) -> TokenTree:
        """The guesses of a step that has any."""
        return self.drafts.tree

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """The chance that a step with guesses accepts at least 1, 2 .. gamma of them."""
        tree, drafts = self.tree, self.drafts
        if self.profile is None or not tree.nodes:
            return tree.acceptance_by_depth
        chances = np.asarray(self.profile.acceptance_by_position(drafts.gamma, drafts.hit_rate))
        if drafts.nodes is not None:
            tabled = replace(drafts, nodes=max(drafts.gamma, _TABLED_NODES[drafts.kind])).tree.acceptance_by_depth
            depth = min(tree.depth, len(tabled))
            share = np.asarray(tree.acceptance_by_depth[:depth]) / np.maximum(np.asarray(tabled[:depth]), 1e-12)
            chances = np.minimum.accumulate(np.minimum(chances[:depth] * share, 1.0))
        return tuple(map(float, chances))

    @property
    def expected_tokens(self) -> float:
        """Tokens that a step emits for each sequence: one, and the accepted guesses of those that have any."""
        return 1.0 + self.drafts.hit_rate * sum(self.acceptance_by_depth)

    @property
    def verified_tokens(self) -> float:
        """Guesses that a step verifies for each sequence, on average over those without any."""
        return self.drafts.hit_rate * self.tree.nodes

    def plain_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of the step without guesses."""
        return step_cost(self.model, self.plain, times, shape).time_s

    def verify_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of the model's own step over the guesses."""
        return step_cost(self.model, self.plain, times, with_guesses(shape, self.verified_tokens)).time_s

    def verify_each_s(self, times: Times, shape: StepShape, guesses: Count) -> Count:
        """The same for other numbers of guesses, one an element of the shape."""
        found = with_guesses(shape, self.drafts.hit_rate * np.asarray(guesses))
        seconds = step_cost(self.model, self.plain, times, found).time_s
        return np.broadcast_to(seconds, np.shape(guesses))

    def draft_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds in which the drafter proposes, and its guesses are sampled and accepted or not.

        It reads the step's prompts too, in order to have them cached. What the engine's own tokens take to be sampled
        is in its profile; on a CPU the host's operator counts all rows.
        """
        if not self.tree.nodes:
            return 0.0
        return self._drafter.seconds(times, shape, self.tree) + self._accept_s(times, shape)

    def draft_table(self, times: Times, shape: StepShape) -> Callable[[Speculation], float]:
        """`draft_s` of this step for speculation of other sizes, from one table of the drafter's passes."""
        passes_s = self._drafter.table(times, shape)

        def draft_s(other: Speculation) -> float:
            if passes_s is None:
                return float(other.draft_s(times, shape))
            return passes_s(other.tree) + float(other._accept_s(times, shape))

        return draft_s

    def _accept_s(self, times: Times, shape: StepShape) -> Count:
        if times.hardware.kind == "cpu":
            return 0.0
        logits = self.verified_tokens * shape.decode_part.sequences * self.model.vocab
        moved = elementwise("accept", "scores", 1, logits, _ACCEPT_BYTES * logits)
        decodes = np.asarray(logits) > 0
        return np.where(decodes, times.of(moved, 0.0).time_s + _glue_s(times, self.setup), 0.0)[()]

    def step_s(self, times: Times, shape: StepShape) -> Count:
        """Seconds of a step: drafting, then verification."""
        return self.draft_s(times, shape) + self.verify_s(times, shape)

    def speedup(self, times: Times, shape: StepShape) -> Count:
        """How many times as fast as plain decoding; below 1 where the guesses cost more than they save."""
        return self.expected_tokens * self.plain_s(times, shape) / self.step_s(times, shape)

    def cost_ratio(self, times: Times, shape: StepShape) -> Count:
        """c: what a guess at one position costs, against a plain step."""
        return self.draft_s(times, shape) / max(self.drafts.gamma, 1) / self.plain_s(times, shape)

    def verify_ratio(self, times: Times, shape: StepShape) -> Count:
        """v: what verification costs, against a plain step."""
        return self.verify_s(times, shape) / self.plain_s(times, shape)

    def with_gamma(self, gamma: int) -> Speculation:
        """The same drafter with another length of drafts; a tree keeps its nodes, 0 switches speculation off."""
        return replace(self, setup=replace(self.setup, drafts=replace(self.drafts, gamma=gamma)))

    def with_size(self, size: Size) -> Speculation:
        """The same drafter with another length, or another tree."""
        drafts = replace(self.drafts, gamma=size.depth, nodes=size.nodes)
        return replace(self, setup=replace(self.setup, drafts=drafts))

    def best_gamma(self, times: Times, shape: StepShape, most: int = 16) -> Best:
        """The length of drafts with the largest gain at this step (or each of many), 0 where plain decoding wins."""
        gains = [np.asarray(self.with_gamma(gamma).speedup(times, shape)) for gamma in range(most + 1)]
        table = np.stack(np.broadcast_arrays(*gains))
        best, gain = table.argmax(axis=0), table.max(axis=0)
        return Best(best.astype(float), gain) if best.ndim else Best(int(best), float(gain))

    @property
    def drafter_weights_bytes(self) -> float:
        """Bytes that the drafter adds to the weights of one device."""
        return self._drafter.weights_bytes()

    @property
    def drafter_reads(self) -> bool:
        """Whether the drafter reads prompts into a cache of its own before it guesses."""
        return self._drafter.reads

    def drafter_kv_bytes(self, kv_tokens: Count, sequences: Count = 1.0) -> Count:
        """Bytes that the drafter adds to the caches of one device."""
        return self._drafter.kv_bytes(kv_tokens, sequences)

    @cached_property
    def _drafter(self) -> _Drafter:
        drafts, model = self.drafts, self.model
        if drafts.kind == "ngram":
            return _Drafter()
        if isinstance(drafts, ModelDrafts):
            spec = draft_model(model, drafts.draft)
            return _DraftModel(
                spec, replace(self.plain, precision=_drafting_formats(model, spec, self.plain, drafts.format))
            )
        if isinstance(drafts, SelfDrafts):
            return _FirstLayers(first_layers(model, drafts.layers), self.plain)
        if isinstance(drafts, MedusaDrafts):
            return _Heads(model, _own_head(self.plain), drafts.gamma, drafts.guessable)
        if drafts.kind == "mtp":
            if not model.mtp_layers:
                raise MemboundError(f"'{model.name}' has no module for multi-token prediction; take eagle or medusa")
            return _Module(one_layer(model, dense=False), self.plain)
        layer = one_layer(model, dense=True)
        if isinstance(drafts, EagleDrafts) and drafts.guessable is not None:
            layer = layer.model_copy(update={"vocab": min(drafts.guessable, model.vocab)})
        return _Module(layer, _own_head(self.plain))


def _drafting_formats(model: ModelSpec, spec: ModelSpec, setup: EngineSetup, format: str | None) -> PrecisionPlan:
    """A drafter is published in formats of its own; a technique that sets the model's weights sets its too."""
    if format is not None:
        return replace(weights_in(format).apply(EngineSetup()).precision, kv=setup.kv)
    plan, published = setup.precision, model.published
    if (plan.weights, plan.exceptions) != (published.weights, published.exceptions):
        return plan
    return replace(spec.published, kv=plan.kv)


def _glue_s(times: Times, setup: EngineSetup) -> float:
    """Seconds in which the host launches what stands between two passes; a CPU calls it at once."""
    return 0.0 if times.hardware.kind == "cpu" else GLUE_KERNELS * get_profile(setup.profile).launch_s


def speculation_of(scenario: Scenario, model: ModelSpec | None = None) -> Speculation | None:
    """The speculation of a scenario with its workload's acceptance; None where it has none."""
    setup, workload = scenario.setup, scenario.workload
    if setup.drafts is None:
        return None
    content = setup.drafts.content
    found = found_of(workload, content)
    if found is not None:
        setup = replace(setup, drafts=replace(setup.drafts, hit_rate=found))
    profile = acceptance_of(workload, content)
    return Speculation(model or resolve_model(scenario.model), setup, profile)


def checked_speculation(scenario: Scenario, model: ModelSpec) -> Speculation | None:
    """The speculation of the scenario's replica; raises MemboundError where it cannot be divided or drafted so."""
    check_parallel(model, scenario.setup)
    speculation = speculation_of(scenario, model)
    if speculation is not None:
        _ = speculation.drafter_weights_bytes  # a drafter that this model cannot have is refused here
    return speculation


def with_guesses(shape: StepShape, guesses: Count) -> StepShape:
    """A step in which each decoding sequence brings `guesses` more tokens behind those that it has cached."""
    if np.all(np.asarray(guesses) == 0):
        return shape
    part = shape.decode_part
    sequences = part.sequences
    tokens = part.tokens + guesses * sequences
    cached = part.kv_tokens - part.tokens
    each = tokens / np.maximum(sequences, 1e-9)
    return StepShape(
        shape.prefill_tokens + tokens,
        shape.sequences,
        shape.prefill_kv_tokens + cached + tokens,
        shape.prefill_attended + each * cached + tokens * (each + 1.0) / 2.0,
        shape.logits_rows + guesses * sequences,
        shape.prefill_tokens,
        shape.prefill_sequences,
        shape.prefill_kv_tokens,
        shape.prefill_attended,
    )


def draft_model(model: ModelSpec, name: str | None) -> ModelSpec:
    """The model that drafts for `model`: the one of that name, else the smallest of its family.

    Raises MemboundError where the vocabularies differ, where it is the larger one, or where the family has no smaller
    model.
    """
    if name is None:
        return _smallest_of_family(model)
    draft = resolve_model(name)
    if draft.params > model.params:
        raise MemboundError(
            f"draft is '{draft.name}' of {draft.params / 1e9:.3g} billion parameters, more than the "
            f"{model.params / 1e9:.3g} of '{model.name}'; give a smaller model"
        )
    if not _same_vocabulary(draft, model):
        raise MemboundError(
            f"draft is '{draft.name}', whose vocabulary has {draft.vocab} tokens, but that of '{model.name}' has "
            f"{model.vocab}; give a model with the same tokenizer"
        )
    return draft


def first_layers(model: ModelSpec, layers: int | None) -> ModelSpec:
    """The model cut behind its first layers, three quarters of them unless said otherwise.

    Raises MemboundError where that leaves none out.
    """
    layers = max(1, model.layers * 3 // 4) if layers is None else layers
    if layers >= model.layers:
        raise MemboundError(
            f"field 'layers' of self_speculation is {layers}, but '{model.name}' has {model.layers} layers; give fewer"
        )
    kept = enumerate(model.stack[:layers])
    usual = (model.usual_attention, model.usual_ffn)
    overrides = tuple(
        LayerOverride(layers=(index,), attention=layer.attention, ffn=layer.ffn)
        for index, layer in kept
        if (layer.attention, layer.ffn) != usual
    )
    changes = {"name": f"{model.name}, first {layers} layers", "layers": layers, "overrides": overrides}
    return model.model_copy(update=changes)


def _same_vocabulary(a: ModelSpec, b: ModelSpec) -> bool:
    return abs(a.vocab - b.vocab) <= _SAME_VOCABULARY * min(a.vocab, b.vocab)


@lru_cache(maxsize=64)
def _smallest_of_family(model: ModelSpec) -> ModelSpec:
    """The smallest model of the catalog with the same vocabulary and architecture, of at most a quarter of its size."""
    known = [spec for spec in catalog().values() if spec.architecture == model.architecture]
    smaller = [spec for spec in known if _same_vocabulary(spec, model) and spec.params * 4 <= model.params]
    stem = model.name.split("-")[0]
    smaller = [spec for spec in smaller if spec.name.split("-")[0] == stem] or smaller
    if not smaller:
        raise MemboundError(
            f"the catalog has no model of the family of '{model.name}' with a quarter of its size; name one in draft"
        )
    return min(smaller, key=lambda spec: spec.params)


def _own_head(setup: EngineSetup) -> EngineSetup:
    """The set-up of a head that was trained apart from the model: 16 bits unless the plan says otherwise."""
    plan = setup.precision
    head = dict(plan.exceptions).get("draft_head", plan.plain)
    kept = tuple((part, plan.weights_of(part)) for part in ("embedding", "lm_head"))
    return replace(setup, precision=replace(plan, weights=head, exceptions=kept))


def one_layer(model: ModelSpec, *, dense: bool) -> ModelSpec:
    """A model of one layer as the last one of `model`; `dense` gives a mixture's as wide as its active experts."""
    attention, ffn = model.stack[-1]
    if dense and isinstance(ffn, MoeFfn):
        ffn = GatedFfn(intermediate=ffn.top_k * ffn.intermediate + ffn.shared_intermediate)
    changes = {"layers": 1, "overrides": (), "attention": attention, "ffn": ffn}
    return model.model_copy(update={"name": f"{model.name} drafter"} | changes)


class _Drafter:
    """What proposing costs; prompt lookup costs nothing that counts."""

    reads = False

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        return 0.0

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        """`seconds` of one step of decode for any tree; None where each is quick to cost alone."""
        return None

    def weights_bytes(self) -> float:
        return 0.0

    def kv_bytes(self, kv_tokens: Count, sequences: Count) -> Count:
        return 0.0


class _DraftModel(_Drafter):
    """A model of its own: one of its steps for each depth of the tree, over the nodes that it continues."""

    reads = True

    def __init__(self, spec: ModelSpec, setup: EngineSetup) -> None:
        self.spec = spec
        self.setup = replace(setup, parallel=_drafting_parallel(spec, setup))

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        decode = StepShape(*shape.decode_part, shape.decode_part.sequences)
        decodes = np.asarray(decode.sequences) > 0
        first, *others = tree.expanded_by_depth
        glue_s = _glue_s(times, self.setup)
        total: Any = self._pass_s(times, with_guesses(shape, first - 1), prepared=False) + glue_s
        if np.any(decodes):
            for nodes, passes in Counter(others).items():
                total = total + passes * decodes * (self._pass_s(times, with_guesses(decode, nodes - 1)) + glue_s)
        return total

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        many = StepShape(*(np.full(len(_PASSES), column, dtype=np.float64) for column in shape.columns().values()))
        glue_s = _glue_s(times, self.setup)
        first_s = float(self._pass_s(times, shape, prepared=False)) + glue_s
        others_s = np.broadcast_to(self._pass_s(times, with_guesses(many, _PASSES - 1.0)), _PASSES.shape) + glue_s
        return lambda tree: first_s + float(np.interp(tree.expanded_by_depth[1:], _PASSES, others_s).sum())

    def _pass_s(self, times: Times, shape: StepShape, *, prepared: bool = True) -> Count:
        """A step of the drafter.

        The first one waits for the host as the model's own step does, which learns what was accepted and prepares the
        drafter's batch; those that follow are captured in a graph and wait no more.
        """
        cost = step_cost(self.spec, self.setup, times, shape)
        if not prepared or times.hardware.kind == "cpu" or not get_profile(self.setup.profile).graphs:
            return cost.time_s
        host = sum(times.of(item.operator, 0.0).time_s for item in cost.operators if item.operator.kind == "host")
        return cost.time_s - host

    def weights_bytes(self) -> float:
        return weights_bytes(self.spec, self.setup)

    def kv_bytes(self, kv_tokens: Count, sequences: Count) -> Count:
        return kv_bytes(self.spec, self.setup, kv_tokens, sequences)


class _FirstLayers(_DraftModel):
    """The model's own first layers, whose weights and caches are there, as are K and V of everything that was read."""

    reads = False

    def seconds(self, times: Times, shape: StepShape, tree: TokenTree) -> Count:
        decode = StepShape(*shape.decode_part, shape.decode_part.sequences)
        decodes = np.asarray(decode.sequences) > 0
        glue_s, total = _glue_s(times, self.setup), np.zeros(())
        for nodes, passes in Counter(tree.expanded_by_depth).items():
            total = total + passes * decodes * (self._pass_s(times, with_guesses(decode, nodes - 1)) + glue_s)
        return total[()]

    def table(self, times: Times, shape: StepShape) -> Callable[[TokenTree], float] | None:
        return None

    def weights_bytes(self) -> float:
        return 0.0

    def kv_bytes(self, kv_tokens: Count, sequences: Count) -> Count:
        return 0.0


class _Module(_DraftModel):
    """One layer on the model's hidden states, joined with the last token's embedding; it shares both tables."""

    def _pass_s(self, times: Times, shape: StepShape, *, prepared: bool = True) -> Count:
        tp = self.setup.parallel.tp
        hidden, format = self.spec.hidden, self.setup.precision.weights_of("ffn")
        joined = linear(
            "join", 1, shape.tokens, -(-hidden // tp), 2 * hidden, format, times.activation_bytes,
            self.setup.precision.activations_of("ffn"),
        )  # fmt: skip
        weights = step_weight_bytes(self.spec, self.setup)
        return super()._pass_s(times, shape, prepared=prepared) + times.of(joined, weights).time_s

    def weights_bytes(self) -> float:
        """Those of the layer: what a second one would add. And the matrix that joins."""
        two = self.spec.model_copy(update={"layers": 2})
        layer = weights_bytes(two, self.setup) - weights_bytes(self.spec, self.setup)
        hidden, tp = self.spec.hidden, self.setup.parallel.tp
        return layer + self.setup.precision.weights_of("ffn").matrix_bytes(hidden, 2 * hidden) / tp


class _Heads(_Drafter):
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
    has_experts = any(isinstance(group.ffn, MoeFfn) for group in spec.groups())
    wanted = setup.parallel.model_copy(update={"pp": 1, "ep": setup.parallel.ep if has_experts else 1})
    try:
        check_parallel(spec, replace(setup, parallel=wanted))
    except MemboundError:
        return wanted.model_copy(update={"tp": 1, "ep": 1})
    return wanted
