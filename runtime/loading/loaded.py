"""Which weights does a scenario name, and of which model are they?"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from membound.roofline.errors import MemboundError
from membound.roofline.memory import MEMORY_SHARE, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.reading.gguf_file import GgufFile
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import SessionPrompts, SyntheticPrompts, TracePrompts
from membound.runtime.free_memory import free_bytes
from membound.runtime.loading.assets import fetch_smollm2
from membound.runtime.loading.finite import check_finite
from membound.runtime.loading.weights import Weights, load_gguf, load_safetensors, random_weights
from membound.runtime.tokenizer import Tokenizer


@dataclass
class LoadedModel:
    """A scenario's model in memory: its shape, its weights, a tokenizer where it has text, the GGUF it came from."""

    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer | None
    gguf: Path | None = None


def load_model(scenario: Scenario) -> LoadedModel:
    """Loads what `model` and `weights` of a scenario name; raises MemboundError with one sentence."""
    source = scenario.weights
    if source == "random":
        spec = resolve_model(scenario.model)
        check_room(scenario, spec)
        return LoadedModel(spec, random_weights(spec, seed=scenario.workload.seed), None)
    if scenario.model.endswith("]"):
        raise MemboundError(
            f"model '{scenario.model}' is cut to fewer layers, which only random weights are; set weights to 'random'"
        )
    if source == "pretrained":
        if scenario.model != "SmolLM2-135M":
            raise MemboundError(
                f"weights 'pretrained' are known for SmolLM2-135M only, not for '{scenario.model}'; "
                "give 'random', or the path of a GGUF or a safetensors folder"
            )
        source = str(fetch_smollm2())
    if not Path(source).exists():
        raise MemboundError(
            f"field 'weights' is '{scenario.weights}'; give 'random', 'pretrained', "
            "or the path of a GGUF or of a safetensors folder"
        )
    if Path(source).is_dir():
        spec, weights = load_safetensors(source)
        check_finite(weights)
        without_text = isinstance(scenario.workload.prompts, SyntheticPrompts | SessionPrompts | TracePrompts)
        if without_text and not (Path(source) / "tokenizer.json").exists():
            return LoadedModel(spec, weights, None)
        return LoadedModel(spec, weights, Tokenizer.from_folder(source))
    spec, weights = load_gguf(source)
    check_finite(weights)
    return LoadedModel(spec, weights, Tokenizer.from_gguf_metadata(GgufFile(source).metadata), Path(source))


def check_room(scenario: Scenario, spec: ModelSpec) -> None:
    """Raises MemboundError where random weights of the scenario's model are more than this machine holds now."""
    whole = replace(scenario.setup, expert_storage=None)  # experts that the device has not lie here as well
    needed, memory = weights_bytes(spec, whole), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > MEMORY_SHARE * memory:
        raise MemboundError(
            f"model '{spec.name}' does not fit: its weights take {needed / 2**30:.1f} GiB, "
            f"and this machine has {memory / 2**30:.1f} GiB; "
            f"'{spec.name}[:2]' is its first 2 of {spec.layers} layers"
        )
    if needed > (free := free_bytes()):
        raise MemboundError(
            f"model '{spec.name}' does not fit now: its weights take {needed / 2**30:.1f} GiB, and of this "
            f"machine's {memory / 2**30:.1f} GiB {free / 2**30:.1f} are free; end other programs, or give "
            f"'{spec.name}[:2]', its first 2 of {spec.layers} layers"
        )
