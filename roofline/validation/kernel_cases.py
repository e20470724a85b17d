"""Which kernel, with which amounts, does a row of the operator table time?

A row becomes a `KernelCase`, and cases of one device, family and kernel a `KernelBatch` (`kernel_batches.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from membound.roofline.chosen_experts import distinct_experts
from membound.roofline.errors import MemboundError
from membound.roofline.expert_load import busiest_rank
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.hardware.links import link_for
from membound.roofline.precision.names import parse_plan
from membound.roofline.precision.plan import compute_dtype
from membound.roofline.times.kernel_fits import ANY, Family, kernel_name
from membound.roofline.validation.routed_loads import DEEPSEEK_GROUPS, RankLoad, drawn, even
from membound.roofline.validation.statements import noted
from membound.roofline.validation.tables import MOST_DEVICES, Row, number

# How a table's dtype is multiplied and stored: the kernel of the fits, the dtype of the matrix rate, bytes a weight,
# bytes an activation in. Group-wise formats count their scales (128 to a group; 32 for mxfp4, 16 for nvfp4).
_FORMATS: dict[str, tuple[str, str, float, float]] = {
    "bfloat16": ("bf16", "bf16", 2.0, 2.0),
    "bf16": ("bf16", "bf16", 2.0, 2.0),
    "fp16": ("bf16", "fp16", 2.0, 2.0),
    "float16": ("bf16", "fp16", 2.0, 2.0),
    "fp32": ("fp32", "fp32", 4.0, 4.0),
    "fp8": ("fp8", "fp8", 1.0, 1.0),
    "fp8_static": ("fp8", "fp8", 1.0, 1.0),
    "fp8_block": ("fp8_block", "fp8", 1.0002, 1.03),
    "int8": ("int8", "int8", 1.0, 1.0),
    "sq": ("int8", "int8", 1.0, 1.0),
    "w8a8": ("int8", "int8", 1.0, 1.0),
    "int8_wo": ("w8a16", "bf16", 1.0, 2.0),
    "int4_wo": ("w4a16", "bf16", 0.516, 2.0),
    "w4a16": ("w4a16", "bf16", 0.516, 2.0),
    "w4afp8": ("w4a8", "fp8", 0.516, 1.0),
    "w4a16_mxfp4": ("w4a16", "bf16", 0.53125, 2.0),
    "w4a8_mxfp4_mxfp8": ("fp8", "fp8", 0.53125, 1.03),
    "nvfp4": ("nvfp4", "fp4", 0.5625, 0.5625),
    "mxfp4": ("nvfp4", "fp4", 0.53125, 0.53125),
}
_ELEMENTWISE = {  # bytes moved for an element of the row's width, bf16: reads and writes
    "rmsnorm": 4.0,
    "layernorm": 4.0,
    "rope": 4.0,
    "act": 4.0,
    "act_mul": 6.0,
    "residual_add": 6.0,
    "embedding": 4.0,
    "softmax": 4.0,
}
# Other names of the operators.
_OPERATORS = {
    **dict.fromkeys(("matmul", "linear", "mm"), "gemm"),
    **dict.fromkeys(("attention_decode", "paged_attention", "generation_attention"), "decode_attention"),
    **dict.fromkeys(("attention_prefill", "flash_attention", "context_attention"), "prefill_attention"),
    **dict.fromkeys(("moe", "fused_moe", "moe_mlp"), "moe_ffn"),
    **dict.fromkeys(("rms_norm",), "rmsnorm"),
    **dict.fromkeys(("layer_norm",), "layernorm"),
    **dict.fromkeys(("silu_and_mul", "silu_mul", "swiglu"), "act_mul"),
}
_COLLECTIVES = {
    "allreduce": "allreduce",
    "all_reduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reducescatter",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "alltoall": "alltoall",
    "all_to_all": "alltoall",
    "sendrecv": "sendrecv",
    "send_recv": "sendrecv",
    "p2p": "sendrecv",
}
# Numbers of a token that decode attention of MLA compares, of which so many are its value too: the latent (DeepSeek
# 512, Mistral 256) beside 64 rotated ones. All query heads share them, and a kernel reads them once.
_LATENTS = {576.0: 512.0, 320.0: 256.0}
# Messages over a network are fitted on their own: what a cluster's network reaches says nothing of links in a node.
NETWORK = "_network"
# Beyond every published mixture of experts (hundreds), and beyond every skew that routers were seen to have.
_MOST_EXPERTS, _MOST_EXPONENT = 65536.0, 5.0
LIBRARIES = ("vllm", "sglang", "trtllm", "nccl")
# Whose kernels a source times where its rows do not say: LLMServingSim vLLM's, Vidur those of Sarathi-Serve in 2024,
# whose attention computes what the causal mask hides and is told apart from that of present engines.
_LIBRARY_OF_SOURCE = {"llmservingsim": "vllm", "vidur": "vidur"}


@dataclass(frozen=True)
class KernelCase:
    """One timed kernel: its place among the fits, the amounts its time depends on, and the measured seconds."""

    row: Row
    hardware: HardwareSpec
    family: Family
    kernel: str
    dtype: str
    library: str
    amounts: Mapping[str, float]
    measured_s: float

    @property
    def is_best_of_many(self) -> bool:
        """Whether the row is the best of a search over shapes, which says what is possible and not what is usual."""
        return "best shape" in self.row.text("notes")


def case_of(row: Row) -> KernelCase:
    """The kernel of a row; raises MemboundError with the reason where membound has no operator for it."""
    hardware, op = get_hardware(row.text("gpu")), row.text("op").lower()
    op = _OPERATORS.get(op, op)
    library = _library(row)
    measured_s = row.measured * 1e-6
    dtype_text = row.text("dtype").lower()
    if op in _COLLECTIVES:
        amounts = _collective(row, hardware)
        kernel = _COLLECTIVES[op] + (NETWORK if amounts["beyond_node"] else "")
        return KernelCase(row, hardware, "collective", kernel, "bf16", library, amounts, measured_s)
    kernel, dtype, weight_bytes, activation_bytes = _format(dtype_text, hardware)
    if op in ("gemm", "gemm_sparse24"):
        sparse = op == "gemm_sparse24"
        bits = 8.0 * weight_bytes
        kept = (2.0 * bits + 4.0) / (4.0 * bits) if sparse else 1.0
        amounts = {
            "m": row.size("m"),
            "n": row.size("n"),
            "k": row.size("k"),
            "weight_bytes": weight_bytes * kept,
            "activation_bytes": activation_bytes,
            "sparse": float(sparse),
            "warm": _warm(row) * (library == "trtllm"),
        }
        return KernelCase(row, hardware, "gemm", kernel, dtype, library, amounts, measured_s)
    if op in ("decode_attention", "prefill_attention"):
        amounts = _attention(row, op) | {"kv_bytes": weight_bytes, "warm": _warm(row)}
        family: Family = "decode_attention" if op == "decode_attention" else "prefill_attention"
        kv_kernel = "fp8" if weight_bytes <= 1.1 else "bf16"
        compute = "fp8" if kv_kernel == "fp8" and family == "prefill_attention" else "bf16"
        return KernelCase(row, hardware, family, kv_kernel, compute, library, amounts, measured_s)
    if op == "moe_ffn":
        amounts = _moe(row) | {"weight_bytes": weight_bytes}
        return KernelCase(row, hardware, "moe", kernel, dtype, library, amounts, measured_s)
    if op in _ELEMENTWISE:
        width = _width(row, op)
        amounts = {"bytes": row.size("m") * width * _ELEMENTWISE[op] * activation_bytes / 2.0}
        return KernelCase(row, hardware, "elementwise", op, "bf16", library, amounts, measured_s)
    raise MemboundError(f"op '{op}' is unknown; known are gemm, attention, moe_ffn, collectives and elementwise")


def _format(text: str, hardware: HardwareSpec) -> tuple[str, str, float, float]:
    """What a dtype column says, in the tables' own words or else in those of checkpoints and engines."""
    if text in _FORMATS:
        return _FORMATS[text]
    try:
        plan = parse_plan(text)
    except MemboundError:
        plan = None
    if plan is None or "weights" in plan.assumed:
        raise MemboundError(f"dtype '{text}' is unknown; known are {', '.join(_FORMATS)}")
    dtype = compute_dtype(plan.weights, plan.activations, hardware).dtype
    return kernel_name(plan.weights, dtype), dtype, plan.weights.bits / 8.0, plan.activations.bits / 8.0


def _width(row: Row, op: str) -> float:
    """Elements that an elementwise kernel works on for one token; rotation turns the heads of one rank."""
    if op == "rope" and row.text("n_heads") and row.text("head_dim"):
        kv_heads = row.size("n_kv_heads") if row.text("n_kv_heads") else 0.0
        return (row.size("n_heads") + kv_heads) * row.size("head_dim")
    return row.size("n") if row.text("n") else row.size("n_heads") * row.size("head_dim")


def _attention(row: Row, op: str) -> dict[str, float]:
    """The sizes of attention; a decode step asks with one token a sequence where the row does not say, and a prompt
    attends to itself alone."""
    queries = row.size("q_len") if row.text("q_len") or op == "prefill_attention" else 1.0
    whole_prompt = op == "prefill_attention" and not row.text("kv_len")
    length, heads = queries if whole_prompt else row.size("kv_len"), row.size("n_heads")
    if queries > length:
        raise MemboundError(
            f"{row.at('q_len')} is {queries:.15g}; kv_len, {length:.15g}, counts them and must not be less"
        )
    kv_heads, head_dim = row.size("n_kv_heads", most=heads), row.size("head_dim")
    latents = op == "decode_attention" and kv_heads == 1.0 and heads > 1.0 and head_dim in _LATENTS
    return {
        "batch": row.size("batch"),
        "q_len": queries,
        "kv_len": length,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": _LATENTS[head_dim] if latents else head_dim,
        "kv_dims": head_dim if latents else 2.0 * head_dim,
        "latents": float(latents),
    }


def _library(row: Row) -> str:
    text = f"{row.text('notes')} {row.text('source')}".lower()
    source = _LIBRARY_OF_SOURCE.get(row.text("source"), ANY)
    return next((name for name in LIBRARIES if name in text), source)


def _warm(row: Row) -> float:
    """1 where a micro-benchmark repeats the same buffers, so that the cache may hold them; 0 inside a real layer.

    Of aiconfigurator's GEMM collectors only TensorRT-LLM's shows weights that come from the cache (L40S, 33 MB: 1.5 to
    2.5 times the memory's bandwidth, the others 0.7 to 0.8); all of its attention collectors repeat their cache.
    LLMServingSim times whole layers, whose caches differ.
    """
    notes = f"{row.text('notes')} {row.text('source')}".lower()
    return 0.0 if any(word in notes for word in ("layerwise", "kineto", "llmservingsim")) else 1.0


def _collective(row: Row, hardware: HardwareSpec) -> dict[str, float]:
    ranks = row.size("tp", MOST_DEVICES)
    per_node = noted(row, "devices per node", most=MOST_DEVICES, whole=True) or ranks
    link, shared = link_for(hardware, ranks, per_node)
    return {
        "ranks": ranks,
        "bytes": row.size("m"),
        "bandwidth": link.bandwidth_bytes_per_s,
        "shared": float(shared),
        "beyond_node": float(link is hardware.scale_out),
    }


def _moe(row: Row) -> dict[str, float]:
    experts = noted(row, "E=", most=_MOST_EXPERTS, whole=True)
    top_k = noted(row, "topk=", most=experts or _MOST_EXPERTS, whole=True)
    for name, value in (("E", experts), ("topk", top_k)):
        if value is None:
            raise MemboundError(f"line {row.line}: notes lack {name}=..., the experts of a moe_ffn row")
    assert experts is not None and top_k is not None
    ep = noted(row, "moe_ep=", "ep=", most=min(experts, MOST_DEVICES), whole=True) or 1.0
    tokens = row.size("m")
    load = _rank_load(row, experts, top_k, ep, tokens)
    return {
        "tokens": tokens,
        "intermediate": row.size("n"),
        "hidden": row.size("k"),
        "tp": noted(row, "moe_tp=", most=MOST_DEVICES, whole=True) or 1.0,
        "pairs": load.pairs,
        "active": load.active,
        "least_active": load.least_active,
        "moved_pairs": tokens * top_k if _moves_all_pairs(row) else load.pairs,
    }


def _rank_load(row: Row, experts: float, top_k: float, ep: float, tokens: float) -> RankLoad:
    """The timed rank's share of the tokens: as the row says that they are spread, by chance where it does not."""
    stated = re.search(r"dist=([^\s;]*)", row.text("notes"))
    law = stated.group(1).rstrip(".,") if stated else ""
    if law == "balanced":
        groups = DEEPSEEK_GROUPS if (experts, top_k) == (256.0, 8.0) and _library(row) == "vllm" else None
        return even(experts, top_k, ep, tokens, groups)
    if law.startswith("power_law_"):
        field = row.at("the exponent of power_law_ in notes")
        exponent = number(law.removeprefix("power_law_"), field, least=0.0, most=_MOST_EXPONENT)
        if experts % ep:
            raise MemboundError(f"{row.at('ep= in notes')} is {ep:g}, which does not divide E={experts:g}")
        return drawn(int(experts), int(top_k), int(ep), int(tokens), exponent)
    if law:
        raise MemboundError(f"{row.at('dist in notes')} is '{law}'; it must be balanced or power_law_ and an exponent")
    if ep == 1.0:
        return RankLoad(tokens * top_k, float(distinct_experts(experts, top_k, tokens)), top_k)
    busiest = busiest_rank(int(experts), int(top_k), int(ep), tokens)
    return RankLoad(float(busiest.pairs), float(busiest.active), 0.0)


def _moves_all_pairs(row: Row) -> bool:
    """Whether the layer activates, quantizes and sums the rows of other ranks' pairs too, as vLLM's own kernels do.

    They mark such pairs (`expert_map`) and keep their rows; TensorRT-LLM's kernels, which vLLM may call, drop them.
    """
    return _library(row) == "vllm" and "trtllm" not in row.text("notes").lower()
