"""What does a serving engine add to its kernels: launches, gaps, host work, kernels that are not fused?

A profile is a named property of an engine and its way of launching, the same for every model, device and row. The
shipped ones are files in `data/engines/`, each with its source.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from membound.roofline.errors import MemboundError

Filling = Literal["chunked_prefill", "prefill_first"]


class EngineProfile(BaseModel):
    """Times that a step has beside its kernels, on the host that they were fitted on.

    `library` names the kernels' fits: the engine's own, or `nccl` where it brings none for messages. With `graphs`
    decode steps of up to `most_graph_tokens` on a rank are captured and need no launches; otherwise the host takes
    `launch_s` for each kernel and the step is no shorter than all of them. `gap_s` passes on the device between two
    kernels; it is negative where a kernel starts while the one before ends (programmatic dependent launch). `step_s` is
    host work that the device waits for in each step, `sequence_s` that for each sequence of the batch, `prefill_s` that
    of a step with a prompt. Of requests without end a rank takes `most_sequences` at once at most. An unfused engine
    runs `extra_kernels` more elementwise kernels in each layer.

    Of the time of other requests' prompts the `interleaved` share falls between a request's tokens: 0.5 where prompts
    go first and together, 1 where chunks join decode steps. The engine's linear kernels reach `rate_share` of the
    matrix rate that the tables' kernels do, those for quantized weights `quantized_rate_share` of that, and with
    `fp16_accumulate` they take the doubled rate of GeForce cards. Those that keep few loads in flight move at most
    `unit_bytes_per_cycle` in a cycle of each unit, whatever the memory could, since a load takes about as many cycles
    on every card. With `experts_as_linears` experts run in the same kernels. Kernels for quantized weights with 16-bit
    activations take `weight_only_s` longer to start than plain ones.
    `spread` is the 80 % quantile of |ln(predicted / measured)| of the steps that the profile was fitted on, with what
    teams differ by where they are of a single one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    library: str = "any"
    graphs: bool = True
    most_graph_tokens: int = Field(512, ge=1)
    launch_s: float = Field(6e-6, ge=0)
    gap_s: float = Field(0.0, ge=-5e-6)
    step_s: float = Field(0.0, ge=0)
    sequence_s: float = Field(0.0, ge=0)
    most_sequences: int = Field(1024, ge=1)
    prefill_s: float = Field(0.0, ge=0)
    extra_kernels: float = Field(0.0, ge=0)
    interleaved: float = Field(0.75, ge=0, le=1)
    rate_share: float = Field(1.0, gt=0, le=2)
    quantized_rate_share: float = Field(1.0, gt=0, le=2)
    fp16_accumulate: bool = False
    experts_as_linears: bool = False
    unit_bytes_per_cycle: float | None = Field(None, gt=0)
    weight_only_s: float = Field(0.0, ge=0)
    spread: float = Field(0.15, ge=0)
    source: str = Field(min_length=1)

    @property
    def batching(self) -> Filling | None:
        """How an engine that batches continuously fills its steps where nobody says; None where no source does."""
        return _FILLING.get(self.name)


# vLLM from version 1 on computes prompts in chunks beside decodes by default (docs.vllm.ai, "Optimization and Tuning",
# section "Chunked Prefill"; Agrawal et al., Sarathi-Serve, OSDI 2024). SGLang's scheduler runs a batch of prompts
# whenever it can form one, and decodes where it cannot (python/sglang/srt/managers/scheduler.py, get_next_batch_to_run:
# "Run prefill first if possible"); both share a step only with --enable-mixed-chunk.
_FILLING: dict[str, Filling] = {
    "vllm": "chunked_prefill",
    "vllm-0.13": "chunked_prefill",
    "vllm-0.13-offline": "chunked_prefill",
    "vllm-eager": "chunked_prefill",
    "sglang": "prefill_first",
}


@cache
def profiles() -> dict[str, EngineProfile]:
    """Every profile of `data/engines/`, by name."""
    folder = resources.files("membound.data") / "engines"
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            for document in yaml.safe_load(entry.read_text("utf-8"))["profiles"]:
                try:
                    profile = EngineProfile.model_validate(document)
                except ValidationError as error:
                    raise MemboundError(
                        f"engine profile in {entry.name} is not valid: {error.errors()[0]['msg']}"
                    ) from None
                found[profile.name] = profile
    return found


def get_profile(name: str) -> EngineProfile:
    """The profile called `name`; raises MemboundError with the closest names otherwise."""
    known = profiles()
    same = next((one for one in known if one.casefold() == name.casefold()), None)
    if same is not None:
        return known[same]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
    raise MemboundError(f"engine profile '{name}' is unknown; {hint}")


# Engines in which a sequence costs what its server does for each of its tokens, and less where there is none.
_SENDS_TOKENS = ("tensorrt-llm", "vllm-0.13", "vllm-0.6")
# What engines become that are told not to capture graphs.
_EAGER_WAY = {
    "graphs": "eager",
    "sglang": "eager",
    **dict.fromkeys(("vllm", "vllm-0.13", "vllm-0.6", "vllm-0.5"), "vllm-eager"),
}
# Which profile an engine's name in a table means: the first whose pattern matches, and whose version or year does.
_VLLM_GRAPHS, _VLLM_HOST, _VLLM_V1, _VLLM_ASYNCHRONOUS, _TGI_GRAPHS = (0, 3), (0, 6), (0, 7), (0, 14), (1, 4)
# Engines whose point is that the host's processor and memory take part.
_ON_THE_HOST = re.compile(r"ktransformers|powerinfer|flexgen|zero[- ]inference|fiddler|petals|hybridllm")


def profile_of_engine(
    engine: str,
    version: str = "",
    year: float | None = None,
    *,
    eager: bool = False,
    asynchronous: bool = False,
    offline: bool = False,
) -> EngineProfile:
    """The profile of an engine as a table names it; the eager one where `eager` and the engine's own is not.

    vLLM is five engines: eager until 2023 (0.2), captured with a synchronous scheduler until 0.6, whose host took most
    of the time until 0.5, rewritten from 0.7, and with a scheduler that works beside the device by default from 0.14
    (January 2026), before where it is told so (`asynchronous`). TensorRT-LLM's first releases have a profile of their
    own, and so have runs without a server (`offline`), which send no tokens to anybody, and Text Generation Inference
    before it captured graphs (1.4, from memory). An engine that no profile is of has the general one. Raises
    MemboundError for one that computes a part of the model on the host.
    """
    profile = get_profile(_profile_name(engine.lower(), version.lower(), year, asynchronous))
    if eager and profile.name in _EAGER_WAY:
        return get_profile(_EAGER_WAY[profile.name])
    return get_profile(f"{profile.name}-offline") if offline and profile.name in _SENDS_TOKENS else profile


def _profile_name(engine: str, version: str, year: float | None, asynchronous: bool) -> str:
    if host := _ON_THE_HOST.search(engine):
        raise MemboundError(f"engine '{host[0]}' computes a part of the model on the host, which no profile is of")
    found = re.search(r"(\d+)\.(\d+)", version) or re.match(r"\D*[ -]v?(\d+)\.(\d+)", engine)
    number = (int(found.group(1)), int(found.group(2))) if found else None
    if stated := re.search(r"20[12]\d", version):
        year = float(stated[0])
    if "vllm" in engine or "aphrodite" in engine:
        return _vllm(number, year, asynchronous)
    if re.search(r"tensorrt|\btrt\b|trt[-_ ]?llm|\bnim\b|optimum[- ]nvidia", engine):
        old = number[0] == 0 if number else year is not None and year <= 2024
        return "tensorrt-llm-0" if old else "tensorrt-llm"
    if re.search(r"\btgi\b|text[- ]generation[- ]inference", engine):
        old = number < _TGI_GRAPHS if number else year is not None and year <= 2023
        return "eager" if old else "graphs"
    if re.search(r"\batom\b", engine):  # AMD's engine of 2025, or the code of the paper Atom of 2023
        return "graphs" if year is None or year >= 2025 else "transformers"
    for pattern, name in _ENGINES:
        if re.search(pattern, engine):
            return name
    return "graphs"


def _vllm(number: tuple[int, int] | None, year: float | None, asynchronous: bool) -> str:
    """vLLM by its version, or by the year of the run where no version is stated."""
    for name, until, last_year in (
        ("vllm-2023", _VLLM_GRAPHS, 2023),
        ("vllm-0.5", _VLLM_HOST, 2023),
        ("vllm-0.6", _VLLM_V1, 2024),
        ("vllm-0.13", _VLLM_ASYNCHRONOUS, 2025),
    ):
        if number < until if number else year is not None and year <= last_year:
            return "vllm" if asynchronous and name == "vllm-0.13" else name
    return "vllm"


_ENGINES: tuple[tuple[str, str], ...] = (
    (r"sglang", "sglang"),
    (r"fastertransformer", "fastertransformer"),
    (r"megatron", "megatron"),
    (r"turbomind|lmdeploy", "turbomind"),
    (r"gpt-fast|torch\.compile|torchao", "torch-compile"),
    (r"exllama|tabbyapi", "exllama"),
    (r"autoawq.*gemv", "autoawq-gemv"),
    (r"autoawq", "autoawq"),
    (r"llama[-. _]?cpp|llama-bench|ollama|ctransformers|lm ?studio|kobold|gpt4all|llamafile|\bggml\b", "llama.cpp"),
    (r"mlc|web-?llm", "mlc"),
    (r"neuron|habana|maxtext|jetstream|\bmlx\b|fastgen|\bmii\b", "graphs"),
    (
        r"transformers|hugging ?face|\bhf\b|lightning|accelerate|deepspeed|quarot|autogptq|bitsandbytes"
        r"|pytorch eager",
        "transformers",
    ),
)
