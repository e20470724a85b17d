"""Which technique should come next at this operating point, why, and at what price?

Every move is costed on the engine as the scenario has it: techniques that it lacks are added (or take the place of what
they exclude), those that it has are compared with the engine without them. The rules of the decision guide name first
moves by hand; where they hold, the advice says whether costing agrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from membound.roofline.comparison import UNITS
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.memory import kv_bytes
from membound.roofline.model_files import resolve_model
from membound.roofline.models import ModelSpec
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.techniques import (
    W8A8,
    ContinuousBatching,
    DraftModelSpeculation,
    Eagle,
    FlashAttention,
    GainMetric,
    Int8Weights,
    KvQuantization,
    Medusa,
    MlaAbsorption,
    Mtp,
    NgramSpeculation,
    Sparsity24,
    Technique,
    WeightQuantization,
    engine_setup,
)
from membound.roofline.times import times_for
from membound.roofline.workload import SessionPrompts
from membound.simulator.costing import ClosedForm, Costing, Served, simulated
from membound.simulator.rules import RULES, Drafting, Rule, Situation, attacks, losing_drafts
from membound.simulator.steady import Load, SpeculatingDeployment, Steady, deployment_of, load_of
from membound.simulator.sweep import Workers

# A gain below this is not worth a line of what not to combine.
NOTICEABLE = 1.02
# Together less than this share of the product: two moves that save the same.
OVERLAP = 0.9
PAIRED = 6
MOST_TENSOR_PARALLEL = 64
State = Literal["add", "on", "instead"]


@dataclass(frozen=True)
class Quality:
    """What a technique costs in quality; `rank` 0 is lossless, and higher costs more."""

    rank: int
    note: str
    source: str


_LOSSLESS = Quality(0, "lossless: the same tokens", "by construction; `membound measure` checks it")
_UNKNOWN_8 = Quality(1, "lossy: measure its price with `membound compare`", "no figure in the ledger")
_QUALITY: dict[str, Quality] = {
    "int8_weights": Quality(
        1, "KL 0.005 nats to bf16, 96.8 % equal top-1 tokens (SmolLM2-135M)", "measured: README, live-cpu"
    ),
    "w8a8": _UNKNOWN_8,
    "weight_quantization:8": _UNKNOWN_8,
    "weight_quantization:4": Quality(
        2, "perplexity +0.9 % (LLaMA-1-7B, Q4_K_M against F16)", "llama.cpp PR 1684; claims A1-44"
    ),
    "weight_quantization:2": Quality(
        4, "perplexity 6.1 becomes 210 to 1.7e6 at 2 bits (LLaMA3-8B)", "arXiv 2404.14047, table 1; claims A1-48"
    ),
    "kv_quantization:8": _UNKNOWN_8,
    "kv_quantization:4": Quality(2, "lossy: measure its price with `membound compare`", "no figure in the ledger"),
    "kv_quantization:2": Quality(
        3,
        "CoQA 63.88 to 63.05, GSM8K 13.50 to 12.74 with 2-bit KIVI (Llama-2-7B)",
        "arXiv 2402.02750, table 3; claims A2-14",
    ),
    "sparsity_2_4": Quality(
        3,
        "perplexity 5.12 to 10.2 (Llama-2-7B), 3.12 to 5.40 (70B), SparseGPT without fine-tuning",
        "Wanda's table; claims A2-16 and A2-18",
    ),
}


def quality_of(technique: Technique) -> Quality:
    """The price of a technique in quality, with its source."""
    if technique.lossless:
        return _LOSSLESS
    if technique.name in _QUALITY:
        return _QUALITY[technique.name]
    setup = engine_setup((technique,))
    width = setup.kv.width if technique.layer == "kv" else setup.weights.width
    bits = next((bits for bits in (2, 4, 8) if width <= bits + 0.5), 8)
    return _QUALITY[f"{technique.name}:{bits}"]


@dataclass(frozen=True)
class Move:
    """Something to change. `before` and `after` are the engines that are compared; `instead_of` names what goes."""

    name: str
    title: str
    state: State
    before: Scenario
    after: Scenario | None
    baseline: str
    quality: Quality
    instead_of: tuple[str, ...] = ()
    price: str = ""
    technique: Technique | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Advised:
    """A move with its gains; None where it is not possible, and `reason` says why."""

    move: Move
    gain: float | None
    other_gain: float | None
    low: float | None
    high: float | None
    before: Served | None
    after: Served | None
    why: str


@dataclass(frozen=True)
class Followed:
    """A rule that holds: the moves it names, and whether the first two by gain have one of them."""

    rule: Rule
    why: str
    agrees: bool | None


@dataclass(frozen=True)
class Conflict:
    """Moves that should not be added up: they exclude each other, or their gains overlap."""

    moves: tuple[str, ...]
    product: float | None
    real: float | None
    reason: str


@dataclass(frozen=True)
class Advice:
    """Everything that is said of an operating point; moves are in the order of their gains."""

    scenario: Scenario
    hardware: HardwareSpec
    metric: GainMetric
    now: Served | None
    situation: Situation
    moves: tuple[Advised, ...]
    rules: tuple[Followed, ...]
    conflicts: tuple[Conflict, ...]
    conditions: str
    by: str


# --- moves ---


def _variants(model: ModelSpec, hardware: HardwareSpec) -> Iterator[Technique]:
    """One of each kind of technique that may help, in the format that the device is made for."""
    yield WeightQuantization(name="weight_quantization", format="int4")
    if hardware.kind == "cpu":
        yield Int8Weights()
    else:
        yield W8A8(format="fp8" if hardware.computes_in("fp8") else "int8")
    yield Sparsity24()
    yield KvQuantization(format="int8" if hardware.kind == "cpu" else "fp8")
    yield FlashAttention()
    if any(group.attention.kind == "mla" for group in model.groups()):
        yield MlaAbsorption()
    yield ContinuousBatching()
    yield from (NgramSpeculation(), DraftModelSpeculation(), Medusa(), Eagle())
    if model.mtp_layers:
        yield Mtp()


def _excludes(one: Technique, other: Technique) -> bool:
    try:
        engine_setup((one, other))
    except MemboundError:
        return True
    return False


def moves_of(scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, tokens: float) -> Iterator[Move]:
    """Everything that can be changed in one step, where a request has `tokens` tokens."""
    has = {technique.name for technique in scenario.techniques}
    for own in scenario.techniques:
        rest = tuple(other for other in scenario.techniques if other is not own)
        yield _technique_move(own, "on", scenario.with_techniques(rest), scenario)
    for technique in _variants(model, hardware):
        if technique.name in has or (technique.usual and technique.name not in scenario.without):
            continue
        rivals = tuple(other for other in scenario.techniques if _excludes(other, technique))
        kept = tuple(other for other in scenario.techniques if other not in rivals)
        state: State = "instead" if rivals else "add"
        after = scenario.with_techniques((*kept, technique))
        yield _technique_move(technique, state, scenario, after, tuple(rival.name for rival in rivals))
    yield _wider(scenario, model, hardware, tokens)
    yield from _engine_moves(scenario)


def _technique_move(
    technique: Technique, state: State, before: Scenario, after: Scenario, instead_of: tuple[str, ...] = ()
) -> Move:
    baseline = f"the engine with {', '.join(instead_of)}" if instead_of else technique.baseline
    quality = quality_of(technique)
    return Move(
        technique.name, technique.title, state, before, after, baseline, quality, instead_of, technique=technique
    )


def _wider(scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, tokens: float) -> Move:
    """Twice the tensor parallelism; where the model does not fit, as many times as it takes."""
    tp, after, reason = scenario.parallel.tp, None, None
    wider = 2 * tp
    try:
        after = scenario.with_value("parallel.tp", wider)
        while wider < MOST_TENSOR_PARALLEL and deployment_of(after, model, hardware).largest_batch(tokens) < 1.0:
            wider *= 2
            after = scenario.with_value("parallel.tp", wider)
    except MemboundError as error:
        after, reason = None, str(error)
    devices = scenario.parallel.devices
    price = f"{devices * wider // tp} devices instead of {devices}"
    title, baseline = f"tensor parallelism {wider}", f"tensor parallelism {tp}"
    return Move("tensor_parallel", title, "add", scenario, after, baseline, _LOSSLESS, price=price, reason=reason)


def _engine_moves(scenario: Scenario) -> Iterator[Move]:
    """Settings of the engine whose gain only a simulation knows."""
    if isinstance(scenario.workload.prompts, SessionPrompts) and not scenario.engine.prefix_caching:
        after = scenario.with_value("engine.prefix_caching", True)
        yield Move("prefix_caching", "prefix cache", "add", scenario, after, "prompts computed in full", _LOSSLESS)


# --- costing ---


def advise(
    scenario: Scenario,
    *,
    metric: GainMetric | None = None,
    simulate: bool = False,
    workers: Workers | None = None,
    progress: Callable[[float, str], None] = lambda fraction, message: None,
) -> Advice:
    """What to do next at the scenario's operating point; raises MemboundError where the scenario names something
    unknown."""
    scenario = scenario.model_copy(update={"sweep": ()})
    model, hardware = resolve_model(scenario.model), get_hardware(scenario.hardware)
    deployment = deployment_of(scenario, model, hardware)
    load = load_of(scenario, deployment)
    situation = situation_of(scenario, deployment, load)
    metric = metric or ("output_tokens_per_s" if situation.waits else "tpot_s")
    error = times_for(hardware, scenario.engine.profile).relative_error

    costing = Costing(simulated, workers or Workers()) if simulate else Costing(ClosedForm(load))
    moves = list(moves_of(scenario, model, hardware, load.lengths.prompt_tokens + load.lengths.output_tokens))
    costing.ahead([end for move in moves for end in (move.before, move.after) if end], progress)
    prompts = situation.prompt_share
    advised = sorted((_advised(move, costing, metric, error, prompts) for move in moves), key=_by_gain)
    now = costing.served(scenario)
    return Advice(
        scenario,
        hardware,
        metric,
        None if isinstance(now, str) else now,
        situation,
        tuple(advised),
        tuple(_followed(situation, advised)),
        tuple(_conflicts(advised, costing, metric)),
        _conditions(scenario, hardware, load),
        "simulation" if simulate else "closed form",
    )


def _by_gain(advised: Advised) -> tuple[Any, ...]:
    """Moves with gains first, the largest first; then what makes a model fit, the least loss first; then the rest."""
    if advised.gain is not None:
        return (0, -advised.gain)
    return (1, advised.move.quality.rank, advised.after.tpot_s) if advised.after else (2, advised.move.quality.rank)


def _advised(move: Move, costing: Costing, metric: GainMetric, error: float, prompt_share: float) -> Advised:
    if move.after is None:
        return Advised(move, None, None, None, None, None, None, move.reason or "")
    before, after = costing.served(move.before), costing.served(move.after)
    if isinstance(after, str):
        return Advised(move, None, None, None, None, None, None, after)
    if isinstance(before, str):
        return Advised(move, None, None, None, None, None, after, f"makes it fit: without it, {before}")
    other: GainMetric = "output_tokens_per_s" if metric == "tpot_s" else "tpot_s"
    gain = after.better(before, metric)
    why = _why(move, before, after, prompt_share)
    return Advised(move, gain, after.better(before, other), gain / (1 + error), gain * (1 + error), before, after, why)


_BOUND_WORDS = {
    "memory_weights": "reading weights",
    "memory_kv": "reading the KV cache",
    "compute": "arithmetic",
    "link": "links between devices",
    "overhead": "overhead",
    "idle": "waiting for requests",
    "drafting": "drafting",
}
_FASTER_ARITHMETIC = ("w8a8", "sparsity_2_4")
_TARGETS = {"weights": "memory_weights", "kv": "memory_kv"}


def _why(move: Move, before: Served, after: Served, prompt_share: float) -> str:
    """One sentence with the numbers that make the gain what it is."""
    binds = f"{_BOUND_WORDS[before.bottleneck]} is {before.shares[before.bottleneck]:.0%} of a decode step"
    if prompt_share >= 0.5 and (move.technique is None or move.technique.name in _FASTER_ARITHMETIC):
        return f"prompts, which arithmetic binds, take {prompt_share:.0%} of the time; {binds}"
    if after.batch > 1.05 * before.batch:
        return f"{binds}; memory holds {after.batch:.0f} sequences instead of {before.batch:.0f}"
    technique = move.technique
    if technique is not None and technique.layer in _TARGETS:
        target = _TARGETS[technique.layer]
        if technique.name in _FASTER_ARITHMETIC and before.shares["compute"] > before.shares[target]:
            target = "compute"
        share = f"{_BOUND_WORDS[target]} is {before.shares[target]:.0%} of a decode step"
        same = "the largest part" if before.bottleneck == target else f"while {binds}"
        return f"{share}, {same}"
    if technique is not None and technique.layer == "steps":
        drafts = after.shares.get("drafting", 0.0)
        drafting = f", of which {drafts:.0%} drafting" if drafts >= 0.005 else ""
        return (
            f"{binds}; several tokens share a step{drafting}, which is then bound by {_BOUND_WORDS[after.bottleneck]}"
        )
    if technique is not None and technique.layer == "schedule":
        return f"{binds}; seats that fall free are filled at once"
    return binds


# --- the situation that rules look at ---


def situation_of(scenario: Scenario, deployment: SpeculatingDeployment, load: Load) -> Situation:
    """The operating point in the terms of the rules."""
    steady = Steady(deployment, load)
    lengths, setup, hardware = load.lengths, scenario.setup, deployment.hardware
    whole = lengths.prompt_tokens + lengths.output_tokens
    fits = deployment.largest_batch(whole) >= 1.0
    decode_s = deployment.decode_s(steady.batch, lengths.context)
    strict = scenario.slo.tpot_s is not None and decode_s <= scenario.slo.tpot_s < steady.tpot_s
    return Situation(
        batch=steady.batch,
        seconds=roof_seconds(deployment, steady.batch, lengths.context),
        fits=fits,
        fits_in_4_bits=_fits_in_4_bits(scenario, deployment, whole),
        overload_rps=load.overload_rps,
        queued=max(0.0, load.concurrency - steady.batch),
        limited_by_cache=deployment.largest_batch(lengths.context) <= steady.batch + 1.0,
        ridge_tokens=_ridge_tokens(hardware),
        weight_bits=setup.weights.width,
        params=float(deployment.model.params),
        devices=scenario.parallel.devices,
        prompts_per_output=lengths.prompt_tokens / max(lengths.output_tokens, 1.0),
        prompt_share=steady.prompt_share,
        tpot_slo_is_strict=strict,
        link_keeps_up=_link_keeps_up(deployment, lengths.prompt_tokens),
        reuses_cache=isinstance(scenario.workload.prompts, SessionPrompts),
        has_experts=any(isinstance(group.ffn, MoeFfn) for group in deployment.model.groups()),
        drafting=tuple(_drafting(scenario, deployment, steady.batch, lengths.context)),
    )


def roof_seconds(deployment: SpeculatingDeployment, batch: float, context: float) -> dict[str, float]:
    """t_w, t_kv, t_c and t_n: what the bare roofs ask of a decode step of plain tokens."""
    plain = replace(deployment, speculation=None)
    seconds = dict.fromkeys(("memory_weights", "memory_kv", "compute", "link"), 0.0)
    for cost in plain.verify_cost(batch, context).operators:
        op, time = cost.operator, cost.time
        reads = "memory_kv" if op.kind in ("attention", "recurrent") else "memory_weights"
        seconds[reads] += float(time.memory_s) * op.calls
        seconds["compute"] += float(time.compute_s) * op.calls
        seconds["link"] += float(time.link_s) * op.calls
    return seconds


def _ridge_tokens(hardware: HardwareSpec) -> float:
    """Tokens at which 16-bit weights take as long to multiply as to read: 2 FLOPs a weight of 2 bytes."""
    if hardware.calibration is not None:
        return hardware.calibration.matrix_flops("bf16") / hardware.calibration.memory_bandwidth
    dtype = "bf16" if hardware.computes_in("bf16") else next(iter(hardware.matrix_flops), "fp32")
    return hardware.peak_flops(dtype) / hardware.bandwidth_bytes_per_s


def _fits_in_4_bits(scenario: Scenario, deployment: SpeculatingDeployment, tokens: float) -> bool:
    narrow = tuple(t for t in scenario.techniques if t.layer != "weights" and t.layer != "steps")
    smallest = (*narrow, WeightQuantization(name="weight_quantization", format="int4"))
    setup = scenario.with_techniques(smallest).setup
    return replace(deployment, setup=setup, speculation=None).largest_batch(tokens) >= 1.0


def _link_keeps_up(deployment: SpeculatingDeployment, prompt_tokens: float) -> bool:
    """Whether the link between nodes carries a prompt's cache in the time that another prompt takes to compute."""
    link = deployment.hardware.scale_out
    if link is None:
        return False
    cache = float(kv_bytes(deployment.model, deployment.setup, prompt_tokens))
    return cache / link.bandwidth_bytes_per_s <= deployment.prefill_s(1.0, prompt_tokens)


def _drafting(
    scenario: Scenario, deployment: SpeculatingDeployment, batch: float, context: float
) -> Iterator[Drafting]:
    """The speculation of the scenario, else that by prompt lookup and EAGLE."""
    has = [technique for technique in scenario.techniques if technique.layer == "steps"]
    for technique in has or [NgramSpeculation(), Eagle()]:
        kept = tuple(other for other in scenario.techniques if other.layer != "steps")
        try:
            tried = deployment_of(scenario.with_techniques((*kept, technique)), deployment.model, deployment.hardware)
        except MemboundError:
            continue
        if tried.speculation is None:
            continue
        shape = StepShape.decode(batch, context)
        cost = float(tried.speculation.cost_ratio(tried.times, shape))
        alpha = tried.speculation.acceptance_by_depth[0]
        yield Drafting(technique.name, tried.speculation.verified_tokens, alpha, cost)


# --- rules and conflicts ---


def _followed(situation: Situation, advised: Sequence[Advised]) -> Iterator[Followed]:
    """The rules that hold, and whether costing agrees: one of the two best techniques is a first move of the rule.

    R0 names what attacks the bottleneck; R5 is right where the speculation that it names is slower than none.
    """
    techniques = [one for one in advised if one.move.technique is not None and one.move.state != "on"]
    costed = [one for one in techniques if one.gain is not None] or [one for one in advised if one.after is not None]
    best = [one.move.name for one in costed][:2]
    gains = {one.move.name: one.gain for one in advised if one.gain is not None}
    for rule in RULES:
        if not rule.holds(situation):
            continue
        wanted = attacks(situation.bottleneck) if rule.id == "R0" else rule.first_moves
        known = set(wanted) & {one.move.name for one in costed}
        agrees = bool(known & set(best)) if known else None
        if rule.id == "R5":
            slower = [gains[one.name] < 1.0 for one in losing_drafts(situation) if one.name in gains]
            agrees = all(slower) if slower else None
        yield Followed(replace(rule, first_moves=wanted), rule.why(situation), agrees)


def _conflicts(advised: Sequence[Advised], costing: Costing, metric: GainMetric) -> Iterator[Conflict]:
    """Of the moves that gain most: those that exclude each other, and those whose gains overlap."""
    worth = [
        one
        for one in advised
        if one.gain is not None and one.gain >= NOTICEABLE and one.move.state != "on" and one.move.technique
    ][:PAIRED]
    for layer in ("weights", "steps"):
        rivals = [one.move.technique for one in worth if one.move.technique and one.move.technique.layer == layer]
        excluded = [one for one in rivals if any(_excludes(one, other) for other in rivals if other is not one)]
        if excluded:
            yield Conflict(tuple(one.name for one in excluded), None, None, "they exclude each other: take one of them")
    for one, other in itertools.combinations(worth, 2):
        first, second = one.move.technique, other.move.technique
        assert first is not None and second is not None and one.gain is not None and other.gain is not None
        if _excludes(first, second):
            continue
        gone = {*one.move.instead_of, *other.move.instead_of}
        kept = tuple(t for t in one.move.before.techniques if t.name not in gone)
        found = costing.served(one.move.before.with_techniques((*kept, first, second)))
        product = one.gain * other.gain
        if isinstance(found, str):
            yield Conflict((first.name, second.name), product, None, found)
            continue
        assert one.before is not None
        real = found.better(one.before, metric)
        if real < max(one.gain, other.gain):
            reason = "together they are slower than the better of them alone"
        elif real < OVERLAP * product:
            reason = "their gains overlap: do not multiply them"
        else:
            continue
        yield Conflict((first.name, second.name), product, real, reason)


def _conditions(scenario: Scenario, hardware: HardwareSpec, load: Load) -> str:
    lengths, devices = load.lengths, scenario.parallel.devices
    where = f"{devices} x {hardware.name}" if devices > 1 else hardware.name
    return (
        f"{scenario.model} on {where}, {load.concurrency:.0f} requests under way, {lengths.prompt_tokens:.0f} tokens "
        f"in and {lengths.output_tokens:.0f} out, engine profile '{scenario.engine.profile}'"
    )


# --- what `membound advise --json` prints ---


def to_json(advice: Advice) -> dict[str, Any]:
    situation = advice.situation
    return {
        "scenario": advice.scenario.model_dump(mode="json"),
        "conditions": advice.conditions,
        "by": advice.by,
        "metric": advice.metric,
        "unit": UNITS[advice.metric],
        "now": None if advice.now is None else advice.now._asdict(),
        "bottleneck": situation.bottleneck,
        "roof_seconds": situation.seconds,
        "situation": {
            "batch": situation.batch,
            "fits": situation.fits,
            "queued": situation.queued,
            "overload_rps": situation.overload_rps,
            "ridge_tokens": situation.ridge_tokens,
            "prompts_per_output": situation.prompts_per_output,
            "prompt_share": situation.prompt_share,
        },
        "moves": [_move_json(one) for one in advice.moves],
        "rules": [
            {
                "id": one.rule.id,
                "condition": one.rule.condition,
                "advice": one.rule.advice,
                "first_moves": list(one.rule.first_moves),
                "why": one.why,
                "agrees": one.agrees,
                "source": one.rule.source,
            }
            for one in advice.rules
        ],
        "do_not_combine": [
            {"moves": list(c.moves), "product": c.product, "real": c.real, "reason": c.reason} for c in advice.conflicts
        ],
    }


def _move_json(one: Advised) -> dict[str, Any]:
    move = one.move
    parameters = {} if move.technique is None else move.technique.model_dump(mode="json", exclude={"name"})
    return {
        "move": move.name,
        "title": move.title,
        "state": move.state,
        "instead_of": list(move.instead_of),
        "parameters": parameters,
        "baseline": move.baseline,
        "gain": one.gain,
        "low": one.low,
        "high": one.high,
        "other_gain": one.other_gain,
        "possible": one.after is not None,
        "lossless": move.quality.rank == 0,
        "quality": {"rank": move.quality.rank, "note": move.quality.note, "source": move.quality.source},
        "price": move.price or None,
        "bottleneck_before": None if one.before is None else one.before.bottleneck,
        "bottleneck_after": None if one.after is None else one.after.bottleneck,
        "reason": one.why,
    }
