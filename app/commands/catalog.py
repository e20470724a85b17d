"""What can a scenario name: techniques with their parameters, engine profiles, devices, models?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.roofline.hardware import catalog as devices
from membound.roofline.hardware import user_hardware
from membound.roofline.models import catalog as models
from membound.roofline.techniques import TECHNIQUES, Speculative
from membound.roofline.times.engines import profiles

Kind = Literal["techniques", "profiles", "devices", "models"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def listing(kind: Kind) -> dict[str, Any]:
    """Everything of a kind, as `membound catalog KIND --json` prints it."""
    return {"kind": kind, kind: _LISTED[kind]()}


def _techniques() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "title": technique.title,
            "against": technique.baseline,
            "lossless": technique.lossless,
            "usual": technique.usual,
            "parameters": [
                {"name": field, "default": info.default, "description": info.description}
                for field, info in technique.model_fields.items()
                if field != "name"
            ],
            "best_if_not_given": list(technique.size_fields) if issubclass(technique, Speculative) else [],
        }
        for name, technique in TECHNIQUES.items()
    ]


def _profiles() -> list[dict[str, Any]]:
    return [
        profile.model_dump(mode="json") | {"description": _ENGINES.get(profile.name, "")}
        for profile in profiles().values()
    ]


def _devices() -> list[dict[str, Any]]:
    fields = {"name", "aliases", "vendor", "kind", "architecture", "memory_bytes", "bandwidth_bytes_per_s", "price"}
    known = devices() | user_hardware()
    return [spec.model_dump(mode="json", include=fields) for spec in known.values()]


def _models() -> list[dict[str, Any]]:
    return [
        {"name": name, "architecture": spec.architecture, "params": spec.params, "max_context": spec.max_context}
        for name, spec in models().items()
    ]


_LISTED: dict[Kind, Callable[[], list[dict[str, Any]]]] = {
    "techniques": _techniques,
    "profiles": _profiles,
    "devices": _devices,
    "models": _models,
}


# What a profile is of. Where each was fitted, and on how many rows, is its `source`.
_ENGINES = {
    "kernels": "no engine: kernels alone, captured in graphs; a bound that none reaches",
    "graphs": "any engine that captures CUDA graphs, near the middle of those below; the default",
    "eager": "any engine that launches each kernel from Python",
    "vllm": "vLLM from 0.14 on (chunks of prompts, a scheduler that works ahead), and before with --async-scheduling",
    "vllm-eager": "vLLM with enforce_eager: no CUDA graphs",
    "vllm-0.13": "vLLM from 0.7 to 0.13: chunks of prompts, the device waits for the scheduler",
    "vllm-0.13-offline": "vLLM from 0.7 to 0.13 without a server: all requests at once",
    "vllm-0.6-offline": "vLLM 0.6 without a server: all requests at once",
    "vllm-0.5": "vLLM 0.3 to 0.5, of 2024, whose host takes most of the time",
    "vllm-0.6": "vLLM 0.6, of 2024",
    "vllm-2023": "vLLM as it first was, in 2023",
    "sglang": "SGLang: prompts in steps of their own, before decodes",
    "tensorrt-llm": "TensorRT-LLM from version 1 on",
    "tensorrt-llm-offline": "TensorRT-LLM from version 1 on without a server: all requests at once",
    "tensorrt-llm-0": "TensorRT-LLM before version 1",
    "fastertransformer": "NVIDIA FasterTransformer, C++, before 2023",
    "megatron": "Megatron-LM's inference",
    "turbomind": "LMDeploy's TurboMind, C++",
    "torch-compile": "gpt-fast and torchao: PyTorch, compiled",
    "exllama": "ExLlama for consumer cards",
    "autoawq": "AutoAWQ, by its matrix kernels",
    "autoawq-gemv": "AutoAWQ, by its kernels for a single sequence",
    "llama.cpp": "llama.cpp on a GPU",
    "mlc": "MLC-LLM, compiled by TVM",
    "transformers": "Hugging Face Transformers, eager PyTorch",
}
_LEAST_SAID_S = 1e-6  # a fit that found no host time leaves less


# --- in a terminal ---


def render(document: dict[str, Any]) -> RenderableType:
    """A row for each, and how a scenario names one."""
    kind: Kind = document["kind"]
    return _RENDERED[kind](document[kind])


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _render_techniques(listed: list[dict[str, Any]]) -> RenderableType:
    table = _table(
        "techniques: [w8a8, {name: eagle, depth: 3}]", "technique", "parameters and defaults", "compared with"
    )
    table.columns[0].no_wrap = True
    for one in listed:
        lossless = "" if one["lossless"] else ", lossy"
        given = ", ".join(_parameter(parameter, one["best_if_not_given"]) for parameter in one["parameters"])
        table.add_row(one["name"], given or "none", one["against"] + lossless)
    usual = ", ".join(one["name"] for one in listed if one["usual"])
    return Group(table, f"usual, which the plain engine has unless `without` names them: {usual}")


def _parameter(parameter: dict[str, Any], best: list[str]) -> str:
    default = parameter["default"]
    if default is None:
        default = "the best" if parameter["name"] in best else "none"
    return f"{parameter['name']} ({default})"


def _render_profiles(listed: list[dict[str, Any]]) -> RenderableType:
    engines = _table("engine: {profile: vllm}", "profile", "engine")
    columns = ("profile", "graphs", "host a step", "a sequence", "within")
    times = _table("what each waits for", *columns, right=columns[2:])
    engines.columns[0].no_wrap = True
    for one in listed:
        engines.add_row(one["name"], one["description"])
        host = (_host(one["step_s"]), _host(one["sequence_s"]))
        times.add_row(one["name"], "yes" if one["graphs"] else "no", *host, f"±{text.percent(one['spread'])}")
    return Group(
        engines,
        "",
        times,
        "graphs: whether decode steps are captured in CUDA graphs, so that the host launches no kernels; host: what "
        "each step, and each sequence in it, waits for the host; within: of 10 steps that the profile was fitted on, 8",
    )


def _host(seconds: float) -> str:
    """Host time as far as a fit knows it: two digits, and none below a microsecond."""
    if seconds < _LEAST_SAID_S:
        return "0" if seconds <= 0 else "< 1 µs"
    return f"{float(f'{seconds * 1e6:.2g}'):,.0f} µs"


def _render_devices(listed: list[dict[str, Any]]) -> RenderableType:
    right = ("memory", "bandwidth", "$/h")
    title = "hardware: H100-SXM5, the path of a YAML file with a data sheet, or local"
    table = _table(title, "device", "architecture", *right, right=right)
    table.columns[0].no_wrap = True
    for one in listed:
        price = "" if one["price"] is None else f"{one['price']['usd_per_h']:.2f}"
        size = (text.gib(one["memory_bytes"]), text.bandwidth(one["bandwidth_bytes_per_s"]))
        table.add_row(one["name"], one["architecture"], *size, price)
    return table


def _render_models(listed: list[dict[str, Any]]) -> RenderableType:
    right = ("parameters", "context")
    table = _table("model: Llama-3.1-8B, or the path of a config.json or a GGUF", "model", *right, right=right)
    for one in listed:
        table.add_row(one["name"], f"{text.digits(one['params'] / 1e9)} B", f"{one['max_context']:,}")
    return table


_RENDERED: dict[Kind, Callable[[list[dict[str, Any]]], RenderableType]] = {
    "techniques": _render_techniques,
    "profiles": _render_profiles,
    "devices": _render_devices,
    "models": _render_models,
}
