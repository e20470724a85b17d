"""Where does a scenario hold what the field calls by another name?"""

from __future__ import annotations

from membound.roofline.techniques import TECHNIQUES

# Flags of vLLM's and SGLang's servers.
_FLAGS = {
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "parallel.tp"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "parallel.pp"),
    **dict.fromkeys(("data_parallel_size", "dp_size"), "parallel.dp"),
    **dict.fromkeys(("expert_parallel_size", "ep_size"), "parallel.ep"),
    **dict.fromkeys(("max_num_batched_tokens", "chunked_prefill_size"), "engine.max_batched_tokens"),
    **dict.fromkeys(("max_running_requests", "max_batch_size"), "engine.max_num_seqs"),
    **dict.fromkeys(("enable_chunked_prefill",), "engine.batching"),
    **dict.fromkeys(("enable_prefix_caching",), "engine.prefix_caching"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "engine.num_blocks, else nine tenths of memory"),
    **dict.fromkeys(("max_model_len", "context_length"), "workload.prompts and workload.output_tokens"),
    **dict.fromkeys(("kv_cache_dtype",), "the technique kv_quantization"),
    **dict.fromkeys(("speculative_config",), "the technique eagle, draft_model_speculation, mtp or ngram_speculation"),
}

# What benchmark tools call the load.
_LOAD = {
    **dict.fromkeys(("concurrency", "users", "max_concurrency"), "workload.arrivals.concurrency"),
    **dict.fromkeys(("input_len", "input_tokens", "isl", "prompt_tokens"), "workload.prompts.tokens"),
    **dict.fromkeys(("output_len", "osl", "max_tokens"), "workload.output_tokens.tokens"),
    **dict.fromkeys(("num_prompts", "num_requests"), "workload.requests"),
}

# Fields that people write somewhere else, or call otherwise; `{}` is the name that they wrote.
FIELDS = {
    **{degree: f"parallel.{degree}" for degree in ("tp", "pp", "dp", "ep", "cp")},
    **dict.fromkeys(("gpus", "num_gpus", "tensor_parallel"), "parallel.tp"),
    **dict.fromkeys(("batch", "batch_size"), "option --batch, or workload.arrivals.concurrency"),
    "context": "option --context, or workload.prompts",
    **dict.fromkeys(("gpu", "device", "devices"), "hardware"),
    **dict.fromkeys(("profile", "batching", "max_num_seqs", "max_batched_tokens", "block_size"), "engine.{}"),
    **dict.fromkeys(("arrivals", "requests", "prompts", "output_tokens", "task", "seed"), "workload.{}"),
    "rate_rps": "workload.arrivals.{}",
    **dict.fromkeys(("rate", "qps", "rps", "request_rate", "rate_per_s"), "rate_rps"),
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), "slo.{}"),
    **{f"workload.{written}": meant for written, meant in _LOAD.items()},
    **_LOAD,
    **{f"{place}{flag}": meant for flag, meant in _FLAGS.items() for place in ("", "engine.")},
    **dict.fromkeys(("quantization", "speculation", "technique"), "techniques"),
}

# Techniques by the names of papers and engines, without hyphens and underscores, that are settings of a scenario.
SETTINGS = {
    **dict.fromkeys(("chunkedprefill", "sarathi"), "engine.batching=chunked_prefill"),
    "prefillfirst": "engine.batching=prefill_first",
    **dict.fromkeys(
        ("prefixcache", "prefixcaching", "automaticprefixcaching", "radixattention", "promptcaching"),
        "engine.prefix_caching=true",
    ),
    **dict.fromkeys(
        ("disaggregation", "disaggregatedprefill", "disaggregatedserving", "pddisaggregation", "distserve"),
        "engine.disaggregation={}",
    ),
    **dict.fromkeys(
        ("lmcache", "hicache", "kvoffload", "kvcacheoffload", "kvoffloading"),
        "engine={prefix_caching: true, host_kv_gib: 64}",
    ),
    **dict.fromkeys(("cudagraphs", "cudagraph"), "engine.profile=graphs"),
    **dict.fromkeys(("tensorparallelism", "tensorparallel", "tp"), "parallel.tp=2"),
    **dict.fromkeys(("pipelineparallelism", "pipelineparallel", "pp"), "parallel.pp=2"),
    **dict.fromkeys(
        ("expertparallelism", "expertparallel", "ep", "dpattention", "wideep"), "parallel={tp: 1, dp: 2, ep: 2}"
    ),
}

_ALWAYS = ("paging", "pagedattention", "pagedkv", "pagedkvcache")
_ADAPTERS = ("lora", "loras", "multilora", "adapters", "adapter", "qlora")
_OF_THE_MODEL = ("gqa", "mqa", "mla", "slidingwindow", "mamba", "ssm", "moe")


def setting_meant(word: str) -> str | None:
    """The setting, as PATH=VALUE, that is what papers and engines call `word`; None where there is none."""
    return SETTINGS.get(_plain(word))


def technique_meant(word: str) -> str | None:
    """What a scenario says for a technique that papers or engines call `word`; None where it is not known."""
    plain = _plain(word)
    if plain in _ALWAYS:
        return "nothing, as KV blocks are paged; engine.reserved_tokens is what paging replaced"
    if plain in _ADAPTERS:
        return "nothing that is predicted, as adapters are not modelled; ask about the base model without them"
    if plain in _OF_THE_MODEL:
        return "another model, as the model decides on it"
    if plain in SETTINGS:
        return "{}: {}, outside of techniques".format(*SETTINGS[plain].split("=", 1))
    return next(
        (_item(name, fields) for name, kind in TECHNIQUES.items() if (fields := kind.meant_by.get(plain)) is not None),
        None,
    )


def _item(name: str, fields: str) -> str:
    """A technique as an item of a scenario's list."""
    return f"{{name: {name}, {fields}}}" if fields else name


def _plain(word: str) -> str:
    return "".join(filter(str.isalnum, word.casefold()))
