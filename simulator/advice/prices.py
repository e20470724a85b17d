"""What does a technique cost in quality, and who says so?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.roofline.techniques import KvEviction, Technique, engine_setup

# From so much on a price in quality is heavy: who takes it gets another model, whatever it gains.
HEAVY = 0.25


@dataclass(frozen=True)
class Quality:
    """What a technique costs in quality; `rank` 0 is lossless, and higher costs more.

    `brief` is the figure of the note in a few words, and `loss` how much worse it is relatively: perplexity that is so
    much higher, points or equal tokens that are so much fewer.
    """

    rank: int
    note: str
    source: str
    brief: str = "lossless"
    loss: float = 0.0

    @property
    def heavy(self) -> bool:
        return self.loss >= HEAVY


def _perplexity(rank: int, before: float, after: float, note: str, source: str) -> Quality:
    loss = after / before - 1.0
    times = f"perplexity x{after / before:.0f}" if loss > 9.0 else f"perplexity +{loss:.{0 if loss >= 0.1 else 1}%}"
    return Quality(rank, f"perplexity {note}", source, times, loss)


def _points(rank: int, before: float, after: float, note: str, source: str) -> Quality:
    loss = 1.0 - after / before
    return Quality(rank, note, source, f"points -{loss:.1%}", loss)


LOSSLESS = Quality(0, "lossless: the same tokens", "by construction; `membound measure` checks it")

# By technique, and what of it decides: the kind of number, the bits or the policy. A small model loses more than a
# large one, so that figures of SmolLM2-135M are upper bounds for most.
_QUALITY: dict[tuple[str, str], Quality] = {
    ("int8_weights", ""): Quality(
        1,
        "KL 0.005 nats to bf16, 96.8 % equal top-1 tokens (SmolLM2-135M)",
        "measured: README, live-cpu",
        "3.2 % of top-1 tokens",
        0.032,
    ),
    ("w8a8", "fp8"): _points(
        1,
        73.48,
        73.19,
        "Open LLM Leaderboard average 73.48 to 73.19 (Mixtral-8x7B-Instruct-v0.1, fp8)",
        "neuralmagic/Mixtral-8x7B-Instruct-v0.1-FP8 README.md; lossless at all sizes of Llama-3.1: arXiv 2411.02355",
    ),
    ("w8a8", "int8"): Quality(
        1, "1 to 3 % of accuracy (Llama-3.1, int8, tuned)", "arXiv 2411.02355, abstract", "points -1 to -3 %", 0.03
    ),
    ("weight_quantization", "8"): _points(
        1,
        68.69,
        68.54,
        "Open LLM Leaderboard average 68.69 to 68.54 (Meta-Llama-3-8B-Instruct, int8)",
        "neuralmagic/Meta-Llama-3-8B-Instruct-quantized.w8a16 README.md",
    ),
    ("weight_quantization", "4"): _perplexity(
        2, 1.0, 1.009, "+0.9 % (LLaMA-1-7B, Q4_K_M against F16)", "llama.cpp PR 1684; claims A1-44"
    ),
    ("weight_quantization", "3"): _perplexity(
        3, 13.1, 21.7, "13.1 to 21.7 (SmolLM2-135M, 3 bits with GPTQ)", "measured: data/measurements/README.md, Quality"
    ),
    ("weight_quantization", "2"): _perplexity(
        4, 6.1, 210, "6.1 becomes 210 to 1.7e6 at 2 bits (LLaMA3-8B)", "arXiv 2404.14047, table 1; claims A1-48"
    ),
    ("kv_quantization", "8"): _perplexity(
        1, 10.2, 10.3, "10.2 to 10.3 (SmolLM2-135M, fp8)", "measured: data/measurements/README.md, long-context-cpu"
    ),
    ("kv_quantization", "4"): _perplexity(
        2, 10.2, 12.1, "10.2 to 12.1 (SmolLM2-135M, int4)", "measured: data/measurements/README.md, long-context-cpu"
    ),
    ("kv_quantization", "kivi4"): _points(
        2,
        43.54,
        43.53,
        "LongBench average 43.54 to 43.53 (Mistral-7B-Instruct-v0.2, KIVI with 4 bits)",
        "jy-yuan/KIVI docs/long_bench.md, table 2",
    ),
    ("kv_quantization", "2"): _points(
        3,
        43.54,
        42.43,
        "LongBench average 43.54 to 42.43 (Mistral-7B-Instruct-v0.2, KIVI with 2 bits)",
        "jy-yuan/KIVI docs/long_bench.md, table 2",
    ),
    **{
        ("kv_eviction", policy): _perplexity(
            3,
            15.1,
            perplexity,
            f"15.1 to {perplexity} with 512 of 2,000 tokens (SmolLM2-135M); worse where a question comes "
            "after its context was evicted",
            "measured: data/measurements/README.md, long-context-cpu; claims X3",
        )
        for policy, perplexity in (("streaming", 15.5), ("h2o", 16.8), ("snapkv", 17.5))
    },
    ("kv_eviction", "quest"): _perplexity(
        2,
        15.1,
        15.7,
        "15.1 to 15.7 with 512 of 2,000 tokens (SmolLM2-135M)",
        "measured: data/measurements/README.md, long-context-cpu",
    ),
    **{
        (name, "typical"): Quality(
            1,
            "the same tokens at temperature 0; above it, others than the model would draw",
            "by construction: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1",
            "other draws",
        )
        for name in ("medusa", "eagle")
    },
    ("sparsity_2_4", ""): _perplexity(
        3,
        5.12,
        10.2,
        "5.12 to 10.2 (Llama-2-7B), 3.12 to 5.40 (70B), SparseGPT without fine-tuning",
        "Wanda's table; claims A2-16 and A2-18",
    ),
}


def quality_of(technique: Technique) -> Quality:
    """The price of a technique in quality, with its source: of the published or measured figures the nearest one."""
    return LOSSLESS if technique.lossless else _QUALITY[technique.name, _kind_of(technique)]


def _kind_of(technique: Technique) -> str:
    """What decides about the price among the forms of a technique."""
    if isinstance(technique, KvEviction):
        return technique.policy
    setup = engine_setup((technique,))
    match technique.name:
        case "w8a8":
            return "int8" if setup.weights.name.startswith("int") else "fp8"
        case "kv_quantization" if setup.kv.name.startswith("kivi4"):
            return "kivi4"
        case "kv_quantization":
            return _bits(setup.kv.width, (2, 4, 8))
        case "weight_quantization":
            return _bits(setup.weights.width, (2, 3, 4, 8))
        case "medusa" | "eagle":
            return "typical"
    return ""


def _bits(width: float, known: tuple[int, ...]) -> str:
    """The figure for a format of so many bits: that of the next known width."""
    return str(next((bits for bits in known if width <= bits + 0.5), known[-1]))
