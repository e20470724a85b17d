"""Does serving prompts and outputs apart gain what DistServe's authors measured, as their artifact sets it up?"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from membound.simulator.agreement.published import Case, Range
from membound.simulator.agreement.serving import Tokens, capacity, lognormal, serving, step_error
from membound.simulator.run import run

Slo = dict[str, float]


def deciles(*tokens: int) -> Tokens:
    return {"kind": "quantiles", "shares": [share / 10 for share in range(11)], "tokens": tokens}


# Of the first 131 requests of a run of vLLM at 1.5 a second that the paper's artifact has (simdistserve/benchmarks/
# alignment/data-ground-truth/opt-13b-sharegpt); the longest outputs are cut to what a context of 2,048 leaves of them.
SHAREGPT = (
    deciles(10, 143, 337, 476, 630, 799, 931, 1134, 1348, 1539, 2003),
    deciles(2, 7, 11, 18, 29, 42, 75, 205, 279, 445, 509),
)
DISTSERVE: dict[str, tuple[str, int, Slo, tuple[Tokens, Tokens]]] = {
    "chatbot": ("OPT-13B", 1, {"ttft_s": 0.25, "tpot_s": 0.1}, SHAREGPT),
    "code": ("OPT-66B", 4, {"ttft_s": 0.125, "tpot_s": 0.2}, (lognormal(171, 0.4, 1024), lognormal(98, 0.6, 512))),
    "summary": ("OPT-66B", 4, {"ttft_s": 15.0, "tpot_s": 0.15}, (lognormal(1738, 0.3, 1900), lognormal(91, 0.6, 140))),
}


class Pools(NamedTuple):
    """An engine for prompts and one for outputs, with the tensor parallelism of each and the latter's stages."""

    prefill_tp: int
    decode_tp: int
    decode_pp: int


@cache
def goodput_per_gpu(workload: str, pools: Pools | None, slower: float) -> float:
    """Requests a second and GPU of which 90 % meet both objectives."""
    model, tp, slo, lengths = DISTSERVE[workload]
    engine: dict[str, Any] = {"max_batched_tokens": 16384, "profile": "vllm-2023"}
    gpus = tp
    if pools:
        gpus = pools.prefill_tp + pools.decode_tp * pools.decode_pp
        engine = {
            "max_batched_tokens": 8192,
            "profile": "fastertransformer",
            "disaggregation": {
                "prefill_parallel": {"tp": pools.prefill_tp},
                "decode_parallel": {"tp": pools.decode_tp, "pp": pools.decode_pp},
                "link_bytes_per_s": 300e9,
            },
        }
    at = serving(
        model, "A100-SXM4-80GB", *lengths, {"tp": tp}, {name: bound / slower for name, bound in slo.items()},
        max_num_seqs=1024, batching="prefill_first", **engine,
    )  # fmt: skip
    start_rps = {"chatbot": 2.8, "code": 0.55, "summary": 0.37}[workload] * gpus
    # The artifact's plots take the least rate of a figure where even that is too much.
    least_rps = {"chatbot": 0.25, "code": 0.125, "summary": 0.0625}[workload] * gpus * slower

    def good(rate_rps: float) -> bool:
        return rate_rps <= least_rps or run(at(rate_rps, 300)).summary.slo_attainment >= 0.9

    return capacity(good, start_rps) / gpus / slower


def distserve_gain(workload: str, pools: Pools, slower: float) -> float:
    """Two engines against one that does both."""
    return goodput_per_gpu(workload, pools, slower) / goodput_per_gpu(workload, None, slower)


def distserve() -> list[Case]:
    source = "Zhong et al., OSDI 2024, and its artifact (LLMServe/DistServe: evaluation, simdistserve); A1-58"
    error = step_error("A100-SXM4-80GB", "vllm-2023")
    same = (
        "goodput a GPU at 90 % attainment, KV over NVLink; parallelism, objectives and limits of the artifact, whose "
        "engine's steps are taken to be FasterTransformer's: 17 % above what it fitted for a prompt of 171 tokens, 11 "
        "% for one of 755, within 6 % for decodes"
    )
    lengths = "lognormal lengths (means from memory, sigmas assumed)"
    baseline = "vLLM of 2023 (prompts first, not chunked)"
    whole: dict[str, Any] = {"source": source, "how": "simulated", "error": error, "baseline": baseline}
    return [
        Case(
            "distserve-chatbot", "prompts and outputs apart", published=Range.of(4.6), within=2.5, **whole,
            conditions="OPT-13B, TTFT 0.25 s and TPOT 0.1 s, A100-80GB, vLLM with TP 1, prompts with TP 2 and outputs "
            f"with TP 1, lengths as deciles of the artifact's own run; {same}; the artifact's plot prints 4.6x",
            value=lambda slower: distserve_gain("chatbot", Pools(2, 1, 1), slower),
            why="a prompt of 1,500 tokens alone takes the whole bound on one GPU, so that what is left at 90 % hangs "
            "on some per cent of a step's time; in the artifact's run of vLLM at 1.5 requests a second 84 % had "
            "their first token in time, here 85 %",
        ),
        Case(
            "distserve-code", "prompts and outputs apart", published=Range.of(5.7), within=4.5, **whole,
            conditions="OPT-66B on HumanEval, TTFT 0.125 s and TPOT 0.2 s, vLLM with TP 4, prompts with TP 4 and "
            f"outputs with TP 2 and two stages; {lengths}; {same}",
            value=lambda slower: distserve_gain("code", Pools(4, 2, 2), slower),
            why="our vLLM serves more within the bound than theirs did. By the steps that the artifact fitted (a "
            "prompt of 171 tokens takes vLLM 58 ms and its own engine 51 ms, a decode step 33 ms) vLLM answers in less "
            "than half of the bound when it is idle, and in 91 ms after a step of decode; so what made theirs miss the "
            "bound is not in these steps: the server, its workers behind Ray, or longer prompts, of which nothing is "
            "published. The agreement of 0.59 that stood here rested on three and five engines for prompts; the paper "
            "ran one",
        ),
        Case(
            "distserve-summary", "prompts and outputs apart", published=Range.of(4.3), within=4.0, **whole,
            conditions="OPT-66B on LongBench, TTFT 15 s and TPOT 0.15 s, vLLM with TP 4, prompts with TP 4 and outputs "
            f"with TP 2 and two stages; {lengths}; {same}",
            value=lambda slower: distserve_gain("summary", Pools(4, 2, 2), slower),
            why="our vLLM serves more than theirs did; 4.3x is of a figure whose lengths were not seen",
        ),
    ]  # fmt: skip
