"""Which published gains are a ratio of two steps, and so closed forms, and under which conditions?

Figures are those of the claims ledger (`claims.csv`, ids A1-..), with its baselines. What was not seen in a source is
marked "from memory", what nobody published "assumed".
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import MoeFfn
from membound.roofline.models.files import resolve_model
from membound.roofline.operators import linear
from membound.roofline.parallel import Parallelism
from membound.roofline.precision import PRECISIONS
from membound.roofline.shape import StepShape
from membound.roofline.speculation.published import acceptance_for
from membound.roofline.speculation.steps import Speculation
from membound.roofline.techniques import (
    W8A8,
    DraftModelSpeculation,
    DualBatchOverlap,
    Eagle,
    EngineSetup,
    ExpertBalancing,
    Technique,
    WeightQuantization,
    engine_setup,
)
from membound.roofline.times.known import times_for
from membound.roofline.times.operator import Times
from membound.simulator.agreement.published import Case, Range


@lru_cache(maxsize=32)
def times(hardware: str, profile: str) -> Times:
    return times_for(get_hardware(hardware), profile)


def _setup(profile: str, *techniques: Technique, **parallel: int) -> EngineSetup:
    return replace(engine_setup(techniques), profile=profile, parallel=Parallelism(**parallel))


def su_gain(batch: int, profile: str = "kernels") -> tuple[int, float]:
    """The best draft length up to 8 and its gain."""
    setup = _setup(profile, DraftModelSpeculation(draft="OPT-125M", gamma=4, alpha=0.75))
    best = Speculation(resolve_model("OPT-6.7B"), setup).best_gamma(
        times("RTX-3090", profile), StepShape.decode(float(batch), 256.0), most=8
    )
    return int(best.gamma), float(best.speedup)


def su() -> list[Case]:
    conditions = (
        "OPT-6.7B with OPT-125M, fp16, draft length 0 to 8 chosen for the batch; GPU and engine of the cell were not "
        "seen: RTX 3090, kernels without an engine's overhead, acceptance 0.75 and context 256 are assumed"
    )
    eager = ", ".join(f"{su_gain(batch, 'eager')[1]:.2f}x at {batch}" for batch in (1, 32))
    why = (
        f"an engine that launches each kernel from Python would have {eager}, since drafting then waits for the host; "
        "without the GPU and the engine only the fall can be compared"
    )
    return [
        Case(
            f"su-b{batch}", f"speculation at batch {batch}", "no speculation, same batch", conditions,
            "Su et al., arXiv 2310.18813; A1-06", Range.of(published), "closed form",
            lambda slower, batch=batch: su_gain(batch)[1] / slower,  # type: ignore[misc]
            times("RTX-3090", "kernels").relative_error, within=1.4, why=why,
        )
        for batch, published in ((1, 2.73), (32, 1.31))
    ]  # fmt: skip


def eagle_speculation(profile: str, depth: int) -> Speculation:
    model, technique = resolve_model("Llama-3.1-8B"), Eagle(depth=depth, tree_size=depth)
    counted = acceptance_for(model, technique.drafts())
    assert counted is not None and counted.pair, "others counted EAGLE's drafts for this model"
    return Speculation(model, _setup(profile, technique.model_copy(update={"alpha": counted.alpha})), None, counted)


def eagle_gain(hardware: str, profile: str, depth: int, batch: int) -> float:
    spec = eagle_speculation(profile, depth)
    return float(spec.speedup(times(hardware, profile), StepShape.decode(float(batch), 300.0)))


def eagle_error(hardware: str, profile: str, depth: int) -> float:
    """That of times and that of acceptance, which are independent."""
    error, acceptance = times(hardware, profile).relative_error, eagle_speculation(profile, depth).acceptance_error
    return math.expm1(math.hypot(math.log1p(error), math.log1p(acceptance)))


def eagle_missing_ms(hardware: str, profile: str, depth: int, batch: int, published: float) -> float:
    """Milliseconds that a step with guesses takes there beyond ours, if their plain step takes as long as ours."""
    spec, clock, shape = eagle_speculation(profile, depth), times(hardware, profile), StepShape.decode(batch, 300.0)
    theirs_s = spec.expected_tokens * float(spec.plain_s(clock, shape)) / published
    return 1e3 * (theirs_s - float(spec.step_s(clock, shape)))


def eagle() -> list[Case]:
    tokens = " and ".join(f"{eagle_speculation('vllm', depth).expected_tokens:.2f}" for depth in (3, 2))
    acceptance = (
        f"chains without a tree (from memory), {tokens} tokens a step with the acceptance that others counted of "
        "EAGLE-3 on MT-bench (data/drafts/published.yaml), whose spread is in the interval; context 300 assumed"
    )
    sglang, vllm = (
        eagle_missing_ms(*cell) for cell in (("H100-SXM5", "sglang", 3, 2, 1.81), ("RTX-3090", "vllm", 2, 2, 1.75))
    )
    why = (
        "host work around drafting, which neither engine did beside the device then, is not in the profiles: at batch "
        f"2 their steps take {sglang:.1f} ms (SGLang) and {vllm:.1f} ms (vLLM) more than drafting and verifying here. "
        "vLLM pull request 16035 has the same: with two drafts 1 / 128.6 s a step became 1.89 / 175.5 s, 3.0 ms more, "
        "of which drafting is 1.6 ms here. Later engines overlap it (SGLang pull request 9588 gains 5 to 10 % by that)"
    )
    cells = (
        ("eagle3-sglang-b2", "SGLang", "H100-SXM5", "sglang", 3, 2, 1.81, 1.4),
        ("eagle3-sglang-b64", "SGLang", "H100-SXM5", "sglang", 3, 64, 1.38, 1.5),
        ("eagle3-vllm-b2", "vLLM", "RTX-3090", "vllm", 2, 2, 1.75, 1.3),
        ("eagle3-vllm-b56", "vLLM", "RTX-3090", "vllm", 2, 56, 1.01, 1.3),
    )
    return [
        Case(
            name, f"EAGLE-3 at batch {batch}", f"{engine}, no speculation, same batch",
            f"Llama-3.1-8B, {hardware}{' (from memory)' if engine == 'vLLM' else ''}, {depth} drafts; {acceptance}",
            "Li et al., arXiv 2503.01840; A1-15", Range.of(published), "closed form",
            lambda slower, cell=(hardware, profile, depth, batch): eagle_gain(*cell) / slower,  # type: ignore[misc]
            eagle_error(hardware, profile, depth), within=within, why=why,
        )
        for name, engine, hardware, profile, depth, batch, published, within in cells
    ]  # fmt: skip


FIXED_BATCHES = "vllm-0.6-offline"


def marlin_gain(model: str, hardware: str, tp: int, batch: int) -> float:
    spec, clock = resolve_model(model), times(hardware, FIXED_BATCHES)
    shape = StepShape.decode(float(batch), 128.0)
    plain, packed = (
        float(step_cost(spec, _setup(FIXED_BATCHES, *techniques, tp=tp), clock, shape).time_s)
        for techniques in ((), (WeightQuantization(format="int4"),))
    )
    return plain / packed


def marlin_kernel_gain(batch: int) -> float:
    clock = times("A10", "kernels")
    plain, packed = (
        float(clock.of(linear("gemm", 1, float(batch), 72 * 1024, 18 * 1024, PRECISIONS[name], 2.0), 0.0).time_s)
        for name in ("bf16", "int4")
    )
    return plain / packed


def marlin() -> list[Case]:
    source = "Frantar et al., arXiv 2408.11743, figure 1 and table 2; A1-02, A1-41, A1-42"
    between_roofs = (
        "the fp16 product is near both of its roofs there and the packed one near that of computing, so that the ratio "
        "hangs on how close kernels of small Ampere cards come to it, which few published ones tell"
    )
    kernel = [
        Case(
            f"marlin-kernel-b{batch}", f"int4 kernel, m = {batch}", "fp16 product",
            "72k x 18k matrix on A10, groups of 128", source, Range.of(published), "closed form",
            lambda slower, batch=batch: marlin_kernel_gain(batch) / slower,  # type: ignore[misc]
            times("A10", "kernels").relative_error, within=1.25, why=why,
        )
        for batch, published, why in ((1, 3.87, ""), (16, 3.87, ""), (128, 1.5, between_roofs))
    ]  # fmt: skip
    runs = {
        "7b": (
            "Llama-2-7B", "A10", 1, {1: 2.93, 16: 2.74, 32: 2.26, 64: 1.78, 128: 1.20}, 1.25,
            "the profile of the engine spends 7 microseconds more on each packed product, as it was fitted to with "
            "other kernels than MARLIN",
        ),
        "70b": (
            "Llama-2-70B", "A100-SXM4-80GB", 8, {1: 1.38, 16: 1.44, 32: 1.19, 64: 1.04, 128: 1.07}, 1.25,
            "what the host and the all-reduces take does not shrink; the paper's falls sooner with the batch",
        ),
    }  # fmt: skip
    return kernel + [
        Case(
            f"marlin-{name}-b{batch}", f"int4 weights end to end, batch {batch}", "vLLM, fp16 weights",
            f"{model} on {tp} x {hardware}, engine as fitted to vLLM 0.6 (the paper is of August 2024), without a "
            "server, as its batches are fixed, context 128 (assumed)", source, Range.of(published), "closed form",
            lambda slower, cell=(model, hardware, tp, batch): marlin_gain(*cell) / slower,  # type: ignore[misc]
            times(hardware, FIXED_BATCHES).relative_error, within, why=why,
        )
        for name, (model, hardware, tp, figures, within, why) in runs.items()
        for batch, published in figures.items()
    ]  # fmt: skip


# Bytes a second at which a host of two sockets reads experts; PCIe 4.0 x16 as it is measured. Both: A1-53.
CPU_BYTES_PER_S = Range.of(70e9, 150e9)
PCIE_BYTES_PER_S = 24e9


def expert_bytes() -> float:
    spec = resolve_model("Mixtral-8x7B")
    ffn = spec.ffn
    assert isinstance(ffn, MoeFfn), "Mixtral is a mixture"
    return 3.0 * spec.hidden * ffn.intermediate * 2.0


def copy_against_cpu(slower: float) -> float:
    """Seconds to copy an expert over seconds in which the host computes it for one token, bound by its memory."""
    return math.sqrt(CPU_BYTES_PER_S.low * CPU_BYTES_PER_S.high) / PCIE_BYTES_PER_S / slower


def copy_against_gpu(slower: float) -> float:
    """Seconds to copy an expert over seconds in which the GPU computes it for one token."""
    spec, clock = resolve_model("Mixtral-8x7B"), times("A100-SXM4-40GB", "kernels")
    ffn = spec.ffn
    assert isinstance(ffn, MoeFfn), "Mixtral is a mixture"
    shapes = ((2 * ffn.intermediate, spec.hidden), (spec.hidden, ffn.intermediate))
    products = [linear("expert", 1, 1.0, n, k, PRECISIONS["bf16"], 2.0) for n, k in shapes]
    return expert_bytes() / PCIE_BYTES_PER_S / sum(float(clock.of(one, 0.0).time_s) for one in products) / slower


def offload() -> list[Case]:
    conditions = "Mixtral-8x7B, 16 bits, one token; 24 GB/s over PCIe, the host reads 70 to 150 GB/s"
    middle = math.sqrt(CPU_BYTES_PER_S.high / CPU_BYTES_PER_S.low)
    return [
        Case(
            "offload-cpu", "copying an expert to the GPU", "computing it on the host", conditions,
            "Kamahori et al. (Fiddler), arXiv 2402.07033; A1-53", Range.of(2.0, 5.0), "closed form",
            copy_against_cpu, middle - 1, within=1.2,
        ),
        Case(
            "offload-gpu", "copying an expert to the GPU", "computing it on the GPU",
            f"{conditions}; A100-40GB", "arithmetic of the ledger, A1-53: no measurement", Range.of(25.0, 38.0),
            "closed form", copy_against_gpu, times("A100-SXM4-40GB", "kernels").relative_error, within=2.0,
            why="the ledger's GPU reads at 590 to 880 GB/s, as those with 24 and 48 GB do; an A100 is faster",
        ),
    ]  # fmt: skip


# How unequal experts are asked for: nobody publishes it for these runs. With balanced experts it hardly matters.
EXPERT_SKEW = 0.5
BALANCED, OVERLAPPED = ExpertBalancing(redundant_experts=32), DualBatchOverlap()


def deepseek_tokens_per_s(hardware: str, gpus: int, shape: StepShape, *techniques: Technique) -> float:
    """Tokens a second of a node of 8 GPUs in a step of all `gpus`, which share the experts."""
    setup = _setup("sglang", W8A8(format="fp8_block"), *techniques, dp=gpus, ep=gpus)
    setup = replace(setup, expert_skew=EXPERT_SKEW)
    cost = step_cost(resolve_model("DeepSeek-V3"), setup, times(hardware, "sglang"), shape)
    return 8.0 * float(np.asarray(shape.tokens)) / gpus / float(cost.time_s)


def deepseek() -> list[Case]:
    decode_why = "halves of a batch that compute and send at once slow each other there, and drafting is not in here"
    day_why = "a mean over a day of service, whose steps are not all full, as those of the profile are"
    prefill_why = "halves of a batch that compute and send at once slow each other there"
    profile_why = "no table has DeepSeek's own kernels for the attention of prompts: other models' rates stand for them"
    cells = (
        ("deepseek-decode", "decode", "H800-SXM5", 144, StepShape.decode(88.0 * 144, 4989.0), 14_800.0, 1.4, decode_why,
         "EP 144, 4,989 tokens of KV, 88 sequences a GPU (14.8k tokens/s at 21 tokens/s a user)"),
        ("lmsys-decode", "decode", "H100-SXM5", 72, StepShape.decode(256.0 * 72, 2050.0), 22_300.0, 1.5, decode_why,
         "EP 72, inputs of 2,000, 256 sequences a GPU"),
        ("deepseek-prefill", "prefill", "H800-SXM5", 32, StepShape.prefill(32.0 * 8, 2048.0), 73_700.0 * 0.437, 2.2,
         day_why, "EP 32, 16k tokens a GPU and step (assumed); 73.7k less the 56.3 % that the cache held"),
        ("lmsys-prefill", "prefill", "H100-SXM5", 32, StepShape.prefill(32.0 * 8, 2048.0), 52_300.0, 1.4, prefill_why,
         "EP 32, prompts of 2,000, 16k tokens a GPU and step"),
        ("deepseek-profile", "prefill", "H800-SXM5", 32, StepShape.prefill(32.0 * 4, 4096.0), 62_713.0, 1.4,
         profile_why,
         "EP 32, prompts of 4,096, 16k tokens a GPU and step: DeepSeek's published profile"),
    )  # fmt: skip
    return [
        Case(
            name, f"{phase} of a node of 8", "(tokens a second)",
            f"DeepSeek-V3/R1 in fp8 on {hardware}, {conditions}; 32 redundant experts, two halves of a batch, experts "
            "popular as i^-0.5 (assumed)",
            "open-infra-index, day 6; LMSYS, 96 H100; A1-64", Range.of(published), "closed form",
            lambda slower, cell=(hardware, gpus, shape): deepseek_tokens_per_s(*cell, BALANCED, OVERLAPPED) / slower,  # type: ignore[misc]
            times(hardware, "sglang").relative_error, within, unit="tok/s", why=why,
        )
        for name, phase, hardware, gpus, shape, published, within, why, conditions in cells
    ]  # fmt: skip


def wide_gain(shape: StepShape, gpus: int, added: Technique, *others: Technique) -> float:
    """The gain of a technique on the H100 of LMSYS's deployment."""
    both = deepseek_tokens_per_s("H100-SXM5", gpus, shape, *others, added)
    return both / deepseek_tokens_per_s("H100-SXM5", gpus, shape, *others)


def wide() -> list[Case]:
    """What two halves of a batch, and balanced experts, gain where experts are spread over many GPUs."""
    source = "LMSYS, Deploying DeepSeek on 96 H100 GPUs, 5 May 2025, ablation studies"
    overlap_why = (
        "kernels of both halves slow each other there, which is not modelled, and kernels of few tokens lose more"
    )
    balance_why = "how unequal their experts were is not published, and the same is assumed of prompts and of decode"
    decode = {tokens: StepShape.decode(tokens * 72.0, 2050.0) for tokens in (32, 256)}
    prompts = StepShape.prefill(32.0 * 2, 4096.0)
    cells = (
        ("overlap-prefill", "two-batch overlap, prompts", "the same without", prompts, 32, OVERLAPPED, (BALANCED,),
         Range.of(1.27, 1.35), 1.3, overlap_why, "EP 32, 8k tokens a GPU, 32 redundant experts"),
        ("overlap-decode-256", "two-batch overlap, decode", "the same without", decode[256], 72, OVERLAPPED,
         (BALANCED,), Range.of(1.255), 1.4, overlap_why, "EP 72, 256 tokens a GPU, 32 redundant experts"),
        ("overlap-decode-32", "two-batch overlap, decode", "the same without", decode[32], 72, OVERLAPPED,
         (BALANCED,), Range.of(0.73), 1.4, overlap_why, "EP 72, 32 tokens a GPU, 32 redundant experts"),
        ("balance-prefill", "balanced experts, prompts", "experts as they come", prompts, 32, BALANCED, (OVERLAPPED,),
         Range.of(1.49), 1.4, balance_why, "EP 32, 8k tokens a GPU, 32 redundant experts"),
        ("balance-decode", "balanced experts, decode", "experts as they come", decode[256], 72, BALANCED, (OVERLAPPED,),
         Range.of(2.54), 1.4, balance_why, "EP 72, 256 tokens a GPU, 32 redundant experts"),
    )  # fmt: skip
    return [
        Case(
            name, what, baseline, f"DeepSeek-V3 in fp8 on H100-SXM5, {conditions}, experts popular as i^-0.5 (assumed)",
            source, published, "closed form",
            lambda slower, cell=(shape, gpus, added, *others): wide_gain(*cell) / slower,  # type: ignore[misc]
            times("H100-SXM5", "sglang").relative_error, within, why=why,
        )
        for name, what, baseline, shape, gpus, added, others, published, within, why, conditions in cells
    ]  # fmt: skip


def step_cases() -> list[Case]:
    return [*su(), *eagle(), *marlin(), *offload(), *deepseek(), *wide()]
