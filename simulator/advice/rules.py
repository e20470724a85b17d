"""Which first move does the decision guide name at an operating point? Rules R0 to R8, each with its condition.

The rules are rough and quick to follow by hand; the advisor costs every move and says whether it agrees. Seconds are
those that the bare roofs ask of a decode step: t_w for weights, t_kv for the cache, t_c for arithmetic, t_n for links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from membound.roofline.techniques import TECHNIQUES

# What R6 calls many prompt tokens for each output token.
LONG_PROMPTS = 4.0
# What R8 calls a small model: the largest that it was measured with, LLaMA3-8B of 8.03 billion, is one.
SMALL_MODEL_PARAMS = 8.05e9
GUIDE = "the decision guide of membound's claims ledger, section (c)"


@dataclass(frozen=True)
class DraftingOdds:
    """Speculation at the operating point: guesses a step, the chance of the first, and what one costs against a
    plain step."""

    name: str
    guesses: float
    alpha: float
    cost: float


@dataclass(frozen=True)
class Situation:
    """What the rules look at. `seconds` are t_w, t_kv, t_c and t_n of a decode step by bound.

    `ridge_tokens` of a step make arithmetic on weights take as long as reading them, in the formats that they have.
    `prompt_share` is the share of the engine's time that prompts take; `bottleneck` takes most of it, prompts and
    decode steps together.
    """

    batch: float
    seconds: dict[str, float]
    bottleneck: str
    fits: bool
    fits_in_4_bits: bool
    queued: float
    overload_rps: float
    limited_by_cache: bool
    ridge_tokens: float
    params: float
    devices: int
    prompts_per_output: float
    prompt_share: float
    tpot_slo_is_strict: bool
    link_keeps_up: bool
    reuses_cache: bool
    has_experts: bool
    drafting: tuple[DraftingOdds, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether more is asked than is served at once."""
        return self.queued > 0 or self.overload_rps > 0


@dataclass(frozen=True)
class Rule:
    """A rule of the guide: where it holds it names first moves, in their order. `why` says what makes it hold."""

    id: str
    condition: str
    advice: str
    first_moves: tuple[str, ...]
    holds: Callable[[Situation], bool]
    why: Callable[[Situation], str]
    source: str = GUIDE


_SPECULATION = ("eagle", "mtp", "draft_model_speculation", "medusa", "ngram_speculation")


def attacks(bound: str) -> tuple[str, ...]:
    """The techniques that make a bound smaller, or use what it paid for more than once."""
    return tuple(name for name, technique in TECHNIQUES.items() if bound in technique.attacks)


def _milliseconds(situation: Situation) -> str:
    names = {"memory_weights": "weights", "memory_kv": "KV cache", "compute": "arithmetic", "link": "links"}
    return ", ".join(f"{names[bound]} {seconds * 1e3:.3g} ms" for bound, seconds in situation.seconds.items())


def _weights_bind(s: Situation) -> bool:
    return s.fits and s.batch <= 4 and s.seconds["memory_weights"] > 3 * s.seconds["compute"]


def losing_drafts(s: Situation) -> list[DraftingOdds]:
    """The drafters whose verification is bound by arithmetic, or whose guesses are right too rarely for their cost."""
    return [d for d in s.drafting if s.batch * (1.0 + d.guesses) > s.ridge_tokens or d.alpha <= d.cost]


RULES: tuple[Rule, ...] = (
    Rule(
        "R0",
        "always",
        "attack what takes most of the time, and do not multiply the gains of single techniques",
        (),
        lambda s: s.fits,
        lambda s: (
            f"prompts take {s.prompt_share:.0%} of the time, and the roofs ask of a decode step {_milliseconds(s)}"
        ),
    ),
    Rule(
        "R1",
        "few sequences, and reading weights takes over 3 times as long as arithmetic",
        "4-bit weights, or speculation whose acceptance is above what a guess costs",
        ("weight_quantization", *_SPECULATION),
        _weights_bind,
        lambda s: (
            f"batch {s.batch:.0f}, and reading weights takes "
            f"{s.seconds['memory_weights'] / max(s.seconds['compute'], 1e-12):.0f} times as long as arithmetic"
        ),
    ),
    Rule(
        "R2",
        "where requests wait and the KV cache limits how many are served at once",
        "continuous batching, a paged and quantized KV cache, a prefix cache",
        ("continuous_batching", "kv_quantization", "weight_quantization", "prefix_caching"),
        lambda s: s.fits and s.waits and s.limited_by_cache,
        lambda s: (
            f"{s.queued:.0f} requests wait while memory holds {s.batch:.0f}"
            if s.queued
            else f"{s.overload_rps:.3g} requests a second come beyond what {s.batch:.0f} at once can be served"
        ),
    ),
    Rule(
        "R3",
        "where memory is too small",
        "fewer bits of weights, then of the KV cache, then eviction where nothing is reused",
        ("w8a8", "int8_weights", "weight_quantization", "kv_quantization"),
        lambda s: not s.fits and s.fits_in_4_bits,
        lambda s: "weights and one sequence exceed the memory of the device",
    ),
    Rule(
        "R4",
        "where the weights exceed memory even in 4 bits",
        "more devices; for a sparse mixture of experts also experts in the memory of the host",
        ("tensor_parallel",),
        lambda s: not s.fits and not s.fits_in_4_bits,
        lambda s: "4-bit weights do not fit either" + (", but few of its experts are active" if s.has_experts else ""),
    ),
    Rule(
        "R5",
        "where guesses fill the arithmetic units, or are right too rarely for what they cost",
        "no speculation, or fewer guesses",
        (),
        lambda s: s.fits and bool(losing_drafts(s)),
        lambda s: ", ".join(
            f"{d.name} verifies {s.batch * (1 + d.guesses):.0f} tokens a step, while arithmetic takes as long as "
            f"reading weights at {s.ridge_tokens:.0f}; its first guess is right in "
            f"{d.alpha:.0%} of steps, and one costs {d.cost:.0%} of a step"
            for d in losing_drafts(s)
        ),
    ),
    Rule(
        "R6",
        f"for prompts {LONG_PROMPTS:.0f} times as long as outputs on 8 devices with a strict bound on TPOT and a link "
        "that keeps up",
        "prompts and outputs on engines of their own",
        ("disaggregation",),
        lambda s: (
            s.fits
            and s.prompts_per_output >= LONG_PROMPTS
            and s.devices >= 8
            and s.tpot_slo_is_strict
            and s.link_keeps_up
        ),
        lambda s: (
            f"{s.prompts_per_output:.1f} prompt tokens for each output token on {s.devices} devices, and others' "
            "prompts break the TPOT"
        ),
    ),
    Rule(
        "R7",
        "where later requests come back to their KV cache",
        "quantize the cache or select pages; do not evict by what one query looks at",
        ("prefix_caching", "kv_quantization"),
        lambda s: s.fits and s.reuses_cache,
        lambda s: "conversations come back to their cache",
    ),
    Rule(
        "R8",
        f"for models of at most {SMALL_MODEL_PARAMS / 1e9:.2f} billion parameters",
        "stay at 4 bits of weights or more",
        (),
        lambda s: s.params <= SMALL_MODEL_PARAMS,
        lambda s: f"there are {s.params / 1e9:.2f} billion",
        f"{GUIDE}; Huang et al., arXiv 2404.14047, table 1: perplexity of LLaMA3-8B 6.1 in 16 bits, 210 to 1.7e6 in 2",
    ),
)
