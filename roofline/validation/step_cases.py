"""Which deployment, load and quantity does a row of the end-to-end table measure?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from membound.roofline.bursts import Burst
from membound.roofline.engine_memory import EngineLimits
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import weights_bytes
from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.precision import get_precision
from membound.roofline.precision.names import parse_plan
from membound.roofline.scenario.usual_limits import usual_limits
from membound.roofline.serving import Deployment, StaticBatch, SteadyLoad, with_parallel
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import get_profile, profile_of_engine
from membound.roofline.validation import statements
from membound.roofline.validation.tables import MOST_DEVICES, Row, number

# Mean prompt and output of the benchmark's data sets that its tables call only "dataset" (mlcommons/inference at 2025,
# language/*/README.md: outputs of 684.68 tokens of Llama-3.1-405B and of 4043 of DeepSeek-R1; of Llama-3.1-8B 611
# characters, which are the 128 tokens that it may have at most). From memory: all prompts, Mixtral's mixed set, and
# GPT-J's outputs; DeepSeek-R1's prompts are assumed.
_MLPERF_TOKENS = {
    "Mixtral-8x7B": (300.0, 145.0),
    "GPT-J-6B": (870.0, 70.0),
    "Llama-3.1-8B": (780.0, 128.0),
    "Llama-3.1-405B": (9400.0, 685.0),
    "DeepSeek-V3": (800.0, 4043.0),
}
# llama.cpp's file type "MXFP4 MoE" has 8 bits where the published checkpoint has 16: gpt-oss-20b takes 11.27 GiB there,
# and 120b 59.02 (the sizes that llama-bench prints for ggml-org's files).
GGUF_MXFP4 = (
    *((part, get_precision("q8_0")) for part in ("attention", "embedding", "lm_head")),
    ("router", get_precision("fp32")),
)
# Profiles of engines whose defaults for a device are known, and which tables mostly leave as they are.
_WITH_DEFAULTS = ("vllm", "vllm-0.13", "sglang", "tensorrt-llm")
# The share of a request's output for whose cache there must be room where it starts. On average requests are half way.
# TensorRT-LLM starts none whose whole output does not fit (`GUARANTEED_NO_EVICT`, the default capacity scheduler policy
# in its documents), but in NVIDIA's harness for MLPerf, which asks for the other one (`batch_scheduler_policy:max_util`
# in the runtime flags of Llama-2-70B).
_RESERVED = dict.fromkeys(("tensorrt-llm", "tensorrt-llm-offline", "tensorrt-llm-0"), 1.0)
# Rows that a round of speculation verifies for a sequence, at most.
_MOST_ROWS = 1024.0
_MEASURED_BATCH = "measured average batch"
# How much further off than most of an engine's rows, which decode, are those of other phases: with 1.3 the intervals of
# prompts hold 80 % of the development table's, with 1.0 74 %.
_WIDER = {"serving": 1.2, "prefill": 1.3}


@dataclass(frozen=True)
class StepCase:
    """A row with the deployment of one replica and the load on it."""

    row: Row
    deployment: Deployment
    replicas: float
    batch: float
    prompt_tokens: float
    output_tokens: float
    metric: str
    steady: bool

    @property
    def phase(self) -> str:
        """decode, prefill, serving or ratio: what the metric is mostly made of."""
        if self.metric == "speedup_x":
            return "ratio"
        if self.metric in ("prefill_ms", "prefill_tok_s_total", "prefill_tok_s_per_gpu", "ttft_ms"):
            return "prefill"
        return "serving" if self.steady or self.metric.startswith(("throughput", "req", "e2e", "joules")) else "decode"

    def predict(self) -> float:
        """The metric's value in the table's unit; raises MemboundError where membound has no model of it."""
        try:
            return _METRICS[self.metric](self)
        except KeyError:
            raise MemboundError(f"metric '{self.metric}' is unknown; known are {', '.join(_METRICS)}") from None

    @property
    def spread(self) -> float:
        """ln of how far off the prediction may be: the engine's spread, wider where the device was inherited."""
        return _WIDER.get(self.phase, 1.0) * self.deployment.times.relative_error

    def is_possible(self) -> bool:
        """Whether the row is not faster than the bare roofs allow: all bytes at full bandwidth, all FLOPs at peak."""
        if self.metric in ("joules_per_token",):
            return True
        best = replace(self, deployment=replace(self.deployment, ideal=True)).predict()
        faster = (
            self.row.measured > best if "tok_s" in self.metric or self.metric == "req_s" else self.row.measured < best
        )
        return not faster

    @property
    def static(self) -> StaticBatch:
        return StaticBatch(self.deployment, self.batch, self.prompt_tokens, self.output_tokens)

    @property
    def load(self) -> SteadyLoad:
        return SteadyLoad(self.deployment, self.batch, self.prompt_tokens, self.output_tokens)

    @property
    def lengths_vary(self) -> bool:
        """Whether requests differ in their lengths: those of a data set, and those drawn from a range."""
        drawn = "range ratio" in self.row.text("notes") or "±" in self.row.text("input_len")
        return drawn or "dataset_lengths" in self.flags

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for flag in self.row.text("flags").split(";") if flag)


def case_of(row: Row) -> StepCase:
    """The deployment and load of a row; raises MemboundError with the reason where they cannot be told."""
    technique = row.text("technique").lower()
    if "offload" in technique:
        raise MemboundError("weights or cache are offloaded, which the steady step does not model")
    hardware, model = get_hardware(row.text("gpu")), get_model(row.text("model"))
    has_experts = bool(model.mixtures)
    plan = parse_plan(_weights(row, has_experts), row.text("act_dtype"), row.text("kv_dtype"))
    engine, version = row.text("engine"), row.text("engine_version")
    if "kv" in plan.assumed and plan.activations.width <= 8 and "tensorrt" in engine.lower():
        plan = replace(plan, kv=parse_plan("fp8", "fp8", "fp8").kv)
    eager = any(flag in row.text("flags") for flag in ("eager", "host_bound")) or "enforce" in row.text("notes").lower()
    way = {"eager": eager, "asynchronous": _schedules_ahead(row), "offline": _is_offline(row)}
    profile = profile_of_engine(f"{engine} {technique}", version, row.number("year"), **way)
    if profile.name == "llama.cpp" and plan.weights.name == "mxfp4":
        plan = replace(plan, exceptions=GGUF_MXFP4)
    setup = EngineSetup(precision=plan, policy="continuous", profile=profile.name)
    parallel, replicas = _parallel(row, Deployment(model, hardware, setup), has_experts)
    deployment = Deployment(model, hardware, replace(setup, parallel=parallel))
    if (limits := _usual_limits(deployment)) is not None:
        deployment = replace(deployment, chunk_tokens=int(limits.step_tokens))
    prompt = statements.tokens(row, "input_len", 32.0, model)
    served = row.text("metric").startswith(("throughput", "req"))
    output = statements.tokens(row, "output_len", statements.DATASET_TOKENS["sharegpt"] if served else 128.0, model)
    if "mlperf" in row.text("source") and model.name in _MLPERF_TOKENS:
        prompt, output = _MLPERF_TOKENS[model.name]
    if "range ratio 0.8" in row.text("notes"):
        prompt, output = 0.9 * prompt, 0.9 * output
    steady = "online" in row.text("flags") or "queueing" in row.text("flags") or "concurrency" in row.text("notes")
    reserved = _RESERVED.get(profile.name, 0.5) if "mlperf" not in row.text("source") else 0.5
    batch = _batch(row, deployment, replicas, prompt + reserved * output)
    return StepCase(row, deployment, replicas, batch, prompt, output, row.text("metric"), steady)


def _schedules_ahead(row: Row) -> bool:
    """Whether the scheduler works beside the device: where the row says so, and in InferenceMAX, whose scripts for
    vLLM ask for it (github.com/InferenceMAX, `benchmarks/*_vllm*.sh`: `async-scheduling: true`)."""
    text = f"{row.text('technique')} {row.text('notes')} {row.text('source')}".lower()
    return any(word in text for word in ("async scheduling", "async-scheduling", "inferencex", "inferencemax"))


def _is_offline(row: Row) -> bool:
    """Whether no server passes tokens on: all requests are there at once, or MLPerf's generator is in the process."""
    all_at_once = row.text("batch_or_concurrency") in statements.AS_MANY_AS_FIT and "online" not in row.text("flags")
    return "mlperf" in row.text("source") or (all_at_once and row.text("metric").startswith("throughput"))


def _weights(row: Row, has_experts: bool) -> str:
    """The weight format. Mixtures of experts that are published in fp8 have it block-wise (DeepSeek-V3, Qwen3, GLM-5,
    MiniMax-M2 and Kimi-K2 in their config.json), which the tables do not tell from fp8 for a tensor."""
    text = row.text("weight_dtype")
    return "fp8_block" if text == "fp8" and has_experts and "modelopt" not in row.text("notes").lower() else text


# The share of a device's memory that weights take at most in a layout that its user chose for throughput.
_WEIGHTS_SHARE = 0.6


def _smallest_tp(single: Deployment, devices: float) -> int:
    """The fewest devices on which the weights leave room for a cache; all of them where they never do."""
    tp = 1
    while tp < devices:
        layout = with_parallel(single, tp=tp)
        if weights_bytes(layout.model, layout.setup) <= _WEIGHTS_SHARE * single.hardware.memory_bytes:
            return tp
        tp *= 2
    return int(devices)


def _parallel(row: Row, single: Deployment, has_experts: bool) -> tuple[Parallelism, float]:
    """The parallelism of one replica and how many replicas there are.

    Where tensor parallelism is not stated, throughput runs take the smallest that fits, the others all devices.
    """
    devices = float(row.degree("n_gpu") or 1)
    tp, pp = row.degree("tp") or 0, row.degree("pp") or 1
    dp, moe_tp, ep = (_degree_noted(row, name) for name in ("attn DP", "MoE TP", "EP"))
    notes = row.text("notes")
    if stated := re.search(r"_tp(\d+)(?:_0)?_ep(\d+)(?:_0)?_\d+;", notes):
        # The run's own name counts its devices; n_gpu was derived as MoE TP x EP, which squares tp8_ep8.
        devices, ep = min(devices, float(_degree(row, "tp", stated.group(1)))), _degree(row, "ep", stated.group(2))
        dp = min(dp, int(devices))
        tp = int(devices) // dp
    elif moe_tp == ep > 1 and moe_tp * ep == devices:
        devices, dp = float(ep), min(dp, ep)
        tp = ep // dp
    if layout := re.search(r"\b(DEP|TEP)(\d+)\b", f"{row.text('technique')} {notes}"):
        # NVIDIA's words: attention data-parallel, or tensor-parallel, over as many ranks as experts are spread over.
        ep = _degree(row, layout.group(1), layout.group(2))
        tp, dp = (1, ep) if layout.group(1) == "DEP" else (ep, 1)
    if ranks := re.search(r"([^\s(]*\d[^\s(]*) decode ranks", notes):
        # Attention data-parallel over all ranks, experts spread over them: how DeepSeek's models are disaggregated.
        dp = ep = _degree(row, "decode ranks", ranks.group(1))
        tp, devices = 1, float(dp)
    if not tp and single.setup.profile == "llama.cpp":  # which gives whole layers to a device where nobody says
        tp, pp = 1, int(max(devices, pp)) if not row.text("pp") else pp
    elif not tp and row.text("metric").startswith("throughput") and devices > 1:
        tp = _smallest_tp(single, devices)
    elif not tp:
        tp = int(min(devices, 8.0))
    if has_experts and tp * dp < ep <= devices:
        tp = ep // dp if ep % dp == 0 else ep
    if not has_experts or (tp * dp) % ep:
        ep = 1
    pp = min(pp, int(max(devices // (tp * dp), 1)))
    parallel = Parallelism(tp=tp, pp=pp, dp=dp if has_experts else 1, ep=ep)
    return parallel, max(devices / parallel.devices, 1.0)


def _degree(row: Row, name: str, text: str) -> int:
    return int(number(text, row.at(f"'{name}' in notes"), least=1.0, most=MOST_DEVICES, whole=True))


def _degree_noted(row: Row, name: str) -> int:
    return int(statements.noted(row, name, most=MOST_DEVICES, whole=True) or 1)


def _batch(row: Row, deployment: Deployment, replicas: float, context: float) -> float:
    """Sequences at a time in one replica."""
    stated, measured = statements.batch(row), statements.noted(row, _MEASURED_BATCH)
    if measured is None and _MEASURED_BATCH in row.text("notes"):
        raise MemboundError(f"{row.at('notes')} lack the number behind '{_MEASURED_BATCH}'; give it or leave both out")
    if sequences := measured or stated:
        return max(sequences / replicas, 1.0)
    text = row.text("batch_or_concurrency")
    if not text and not row.text("metric").startswith("throughput"):
        return 1.0
    setup = deployment.setup
    seats = float(get_profile(setup.profile).most_sequences)
    if (limits := _usual_limits(deployment)) is not None:
        seats = min(seats, float(limits.sequences))
    taken = seats * setup.parallel.dp
    most = deployment.with_batch_that_fits(min(taken, (_requests(row) or math.inf) / replicas), context)
    return max(0.5 * most, 1.0) if text in statements.SERVED else most


def _usual_limits(deployment: Deployment) -> EngineLimits | None:
    """What the engine takes into a step by itself, where its defaults for the device are known."""
    profile, hardware = deployment.setup.profile, deployment.hardware
    return usual_limits(profile, hardware, hardware.kind) if profile in _WITH_DEFAULTS else None


def _requests(row: Row) -> float | None:
    """How many requests a run without a server had, where it says so."""
    return statements.noted(row, "requests", whole=True)


def _tpot_ms(case: StepCase) -> float:
    emitted = _emitted(case)
    if "itl_median" in case.flags:
        return 1e3 * replace(case.load, in_groups=0.0 if case.lengths_vary else 1.0).median_itl_s / emitted
    return 1e3 * (case.load.tpot_s if case.steady else case.static.tpot_s) / emitted


def _decode_rate(case: StepCase) -> float:
    """Tokens a second of one sequence; with its prompt's time where the table's rate includes it."""
    if "includes_prefill" in case.flags:
        return case.static.output_tokens / case.static.latency_s
    return _emitted(case) / case.static.tpot_s


_SPECULATES = re.compile(r"specul|(?<!no )(?<!without )\b(mtp|eagle|medusa|draft)")


def _emitted(case: StepCase) -> float:
    """Tokens a round of speculation yields for the time of a plain step, 1 without speculation.

    Raises MemboundError for a speculating row that does not state its mean acceptance length.
    """
    technique = case.row.text("technique").lower()
    window = re.search(r"(\S*\d)-token window", technique)
    if not _SPECULATES.search(technique) and not window:
        return 1.0
    length = statements.noted(case.row, "acceptance length", "accepted tokens")
    if length is None:
        raise MemboundError("speculation without its mean acceptance length, on which the speed depends")
    named = case.row.at("the window in technique")
    rows = number(window.group(1), named, least=1.0, most=_MOST_ROWS, whole=True) if window else 4.0
    context = case.prompt_tokens + case.output_tokens / 2.0
    plain_s = case.deployment.decode_s(case.batch, context)
    verify_s = case.deployment.step_s(StepShape.verify(case.batch, context, rows - 1.0))
    drafting = (rows - 1.0) / case.deployment.model.layers
    return length / (verify_s / plain_s + drafting)


def _ttft_ms(case: StepCase) -> float:
    if "includes_queueing" in case.flags or "concurrency" in case.row.text("notes"):
        return 1e3 * (case.load.ttft_s if case.steady and case.batch > 1 else case.static.prefill_s)
    return 1e3 * case.static.prefill_s


def _throughput(case: StepCase) -> float:
    """Output tokens a second of all replicas."""
    requests = _requests(case.row)
    if requests is not None and case.lengths_vary:
        return _rate_of_burst(case, requests)
    if requests is not None and case.row.text("batch_or_concurrency") in statements.AS_MANY_AS_FIT:
        return _rate_of_waves(case, requests)
    load = case.load if case.steady or "batch_unknown" in case.flags or "dataset_lengths" in case.flags else case.static
    return case.replicas * load.output_tokens_per_s


def _rate_of_burst(case: StepCase, requests: float) -> float:
    """Output tokens a second of so many requests that are all there at once and end one by one."""
    lengths = case.prompt_tokens, case.output_tokens
    burst = Burst(case.deployment, requests / case.replicas, case.batch, *lengths)
    return case.replicas * burst.output_tokens_per_s


def _rate_of_waves(case: StepCase, requests: float) -> float:
    """Output tokens a second of so many requests of equal length that are all there at once.

    They end together, so that the next ones start together: the last wave may be all but empty and takes as long.
    """
    whole, rest = divmod(requests / case.replicas, case.batch)
    last_s = replace(case.static, batch=rest).latency_s if rest >= 1.0 else 0.0
    return requests * case.output_tokens / (whole * case.static.latency_s + last_s)


def _devices(case: StepCase) -> float:
    return case.replicas * case.deployment.setup.parallel.devices


def _prefill_rate(case: StepCase) -> float:
    return case.replicas * case.batch * case.prompt_tokens / case.static.prefill_s


def _decode_total(case: StepCase) -> float:
    return case.replicas * case.batch * _emitted(case) / case.static.tpot_s


# Mean draw of a device that serves, as a share of its board power: what it draws whatever it does, and what the memory
# and the matrix units add for the share of a decode step that each needs at full speed; prompts, whose share grows with
# the batch, are in the last. Fitted to 138 runs on H100 (ML.ENERGY v3), whose shares lie between 0.57 and
# 0.91 for 80 % of them: off by 9 % in the median, as for models that are left out of the fit.
_DRAWN_AT_REST, _DRAWN_BY_MEMORY, _DRAWN_BY_MATRICES, _MOST_DRAWN = 0.42, 0.29, 1.77, 0.95


def _drawn_share(case: StepCase) -> float:
    """The share of their board power that the devices of a run draw."""
    step = case.deployment.step(StepShape.decode(case.batch, case.prompt_tokens + case.output_tokens / 2.0))
    memory_s = sum(float(cost.time.memory_s) * cost.operator.calls for cost in step.operators)
    compute_s = sum(float(cost.time.compute_s) * cost.operator.calls for cost in step.operators)
    busy = (_DRAWN_BY_MEMORY * memory_s + _DRAWN_BY_MATRICES * compute_s) / float(step.time_s)
    return min(_DRAWN_AT_REST + busy, _MOST_DRAWN)


def _joules(case: StepCase) -> float:
    """Energy of the devices for an output token."""
    power_w = case.deployment.hardware.power_w
    if power_w is None:
        raise MemboundError(f"device '{case.deployment.hardware.name}' has no power_w, so that energy is unknown")
    return _drawn_share(case) * power_w * _devices(case) / _throughput(case)


_METRICS: Mapping[str, Callable[[StepCase], float]] = {
    "tpot_ms": _tpot_ms,
    "itl_ms": _tpot_ms,
    "prefill_ms": lambda case: 1e3 * case.static.prefill_s,
    "ttft_ms": _ttft_ms,
    "e2e_latency_ms": lambda case: 1e3 * case.static.latency_s,
    "decode_tok_s_per_user": _decode_rate,
    "decode_tok_s_total": _decode_total,
    "decode_tok_s_per_gpu": lambda case: _decode_total(case) / _devices(case),
    "prefill_tok_s_total": _prefill_rate,
    "prefill_tok_s_per_gpu": lambda case: _prefill_rate(case) / _devices(case),
    "throughput_tok_s_total": _throughput,
    "throughput_tok_s_per_gpu": lambda case: _throughput(case) / _devices(case),
    "throughput_inout_tok_s_total": lambda case: _throughput(case) * (1.0 + case.prompt_tokens / case.output_tokens),
    "throughput_inout_tok_s_per_gpu": lambda case: (
        _throughput(case) * (1.0 + case.prompt_tokens / case.output_tokens) / _devices(case)
    ),
    "req_s": lambda case: _throughput(case) / case.output_tokens,
    "ms_per_token_aggregate": lambda case: 1e3 / _decode_total(case),
    "joules_per_token": _joules,
}
