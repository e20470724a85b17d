"""What does a server say of its own steps, queues and cache? Prometheus metrics, where it has some that are known.

Sources of the names. vLLM: vllm/v1/metrics/loggers.py (commit 005a810b), those of before version 0.9 (`gpu_`) included,
and of speculation vllm/benchmarks/serve.py (commit 009e6d4a). SGLang: python/sglang/srt/metrics/collector.py (commit
00ae9c15; generation, prompt and cached tokens from other commits of it). llama.cpp: its server's `--metrics`, as shown
in ggml-org/llama.cpp's help of 2025. Counters end in `_total`; the `_count` of vLLM's histogram of tokens a step is the
number of engine steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from membound.runtime.endpoint.connection import Connections
from membound.runtime.endpoint.stream import ReplyError

INTERVAL_S = 1.0
_ANSWER_S = 5.0
# A counter that grew by more than the run's own tokens counts somebody else's too.
_OWN_SHARE = 0.02

_GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": (
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        *("sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    ),
}
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "generated": (
        *("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
        "llamacpp:tokens_predicted_total",
    ),
    "engine_steps": ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total"),
    "prefix_queries": (
        *("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "sglang:prompt_tokens_total",
    ),
    "prefix_hits": (
        *("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "sglang:cached_tokens_total",
    ),
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
}
_LINE = re.compile(r"((?:vllm|sglang|llamacpp):[a-z_]+)(?:\{.*\})?[ \t]+([^ \t]+)(?:[ \t]+-?\d+)?\s*")


def parse(text: str) -> dict[str, list[float]]:
    """The values of each metric of the engines, one for each that is behind the server."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        matched = _LINE.fullmatch(line)
        if matched is None:
            continue
        try:
            value = float(matched[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(matched[1], []).append(value)
    return found


@dataclass
class ServerMetrics:
    """Readings during a run: the first before it, the last after it. Empty where the server has none."""

    readings: list[dict[str, list[float]]] = field(default_factory=list)

    async def read(self, connections: Connections) -> bool:
        """Adds a reading; False where the server has no metrics, which is no error."""
        try:
            status, body = await connections.get(connections.endpoint.metrics_url, _ANSWER_S)
        except ReplyError:
            return False
        found = parse(body.decode(errors="replace")) if status == 200 else {}
        if found:
            self.readings.append(found)
        return bool(found)

    def summary(self) -> dict[str, Any]:
        """Means and peaks of what is a state, and by how much counters grew; only what the server really told."""
        if len(self.readings) < 2:
            return {}
        told: dict[str, Any] = {}
        during = self.readings[1:-1] or self.readings
        busy = [reading for reading in during if sum(_values(reading, _GAUGES["running"]) or [0.0]) > 0]
        for name, metrics in _GAUGES.items():
            gather = np.mean if name == "kv_usage" else np.sum
            seen = [float(gather(values)) for reading in busy if (values := _values(reading, metrics))]
            if seen:
                told |= {f"{name}_mean": float(np.mean(seen)), f"{name}_max": max(seen)}
        told |= dict(self._growth())
        for name, part, whole in (
            ("prefix_hit_rate", "prefix_hits", "prefix_queries"),
            ("acceptance_rate", "accepted", "drafted"),
            ("tokens_per_step", "generated", "engine_steps"),
        ):
            if told.get(whole) and part in told:
                told[name] = told[part] / told[whole]
        return told

    def _growth(self) -> Iterator[tuple[str, float]]:
        for name, metrics in _COUNTERS.items():
            before, after = (_values(reading, metrics) for reading in (self.readings[0], self.readings[-1]))
            grown = sum(after) - sum(before)
            if after and grown >= 0:  # a counter that fell is one of a server that was started again
                yield name, grown


def shared_with_others(told: dict[str, Any], own_tokens: int) -> bool:
    """Whether the server generated tokens for others meanwhile, so that its counters say little of this run."""
    return "generated" in told and told["generated"] > (1 + _OWN_SHARE) * own_tokens


def _values(reading: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    return next((reading[name] for name in names if name in reading), [])
