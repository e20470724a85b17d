"""Which model does a scenario name: one of the catalog, or a file's?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelError, ModelSpec, get_model
from membound.roofline.models.checkpoint import named_checkpoint
from membound.roofline.models.spec import build
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.reading.files import is_file, is_folder, read_text

_CUT = re.compile(r"(.+)\[:(\d+)\]", re.DOTALL)


def resolve_model(name_or_path: str) -> ModelSpec:
    """The catalog's model of that name, or the one of a Hugging Face `config.json` (or its folder), a GGUF or a YAML.

    A name may be a checkpoint's, whose formats it tells (`Qwen/Qwen3-32B-AWQ`). The YAML holds the fields of one model
    as the catalog does. With `[:4]` behind it the model has its first 4 layers only. Raises ModelError with one
    sentence for an unknown name, an unreadable file or an unsupported architecture.
    """
    if cut := _CUT.fullmatch(name_or_path):
        return resolve_model(cut[1]).first_layers(int(cut[2]))
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        # The gguf package takes half a second to import, which a catalog name should not cost.
        from membound.roofline.reading.gguf_file import GgufFile

        file = GgufFile(path)
        return ModelSpec.from_gguf_metadata(
            file.metadata, path.stem, tie_embeddings="output.weight" not in file.tensors
        )
    if is_folder(path) and is_file(path / "config.json"):
        path = path / "config.json"
    if path.suffix == ".json":
        config = _config(path, name_or_path)
        return ModelSpec.from_hf_config(config, _name_of(config, path))
    if path.suffix in (".yaml", ".yml"):
        return build(**{"source": f"{path.name}, a file of the user"} | _mapping(path, name_or_path))
    if is_file(path):
        raise ModelError(f"model '{name_or_path}' is a file of no known kind; give a config.json, GGUF or YAML")
    model, named = get_model(name_or_path), named_checkpoint(name_or_path)
    return model if named is None else model.model_copy(update={"checkpoint": named})


def _name_of(config: Mapping[str, Any], path: Path) -> str:
    """What a config calls its model, else its file where that has a name of its own, else its folder."""
    own = config.get("_name_or_path")
    named = Path(own).name if isinstance(own, str) else ""
    return named or (path.stem if path.stem != "config" else path.resolve().parent.name or path.stem)


def published_formats(model: str) -> PrecisionPlan:
    """The formats in which the weights of a model (as a scenario names it) are published.

    16 bits for a GGUF, whose own blocks the runtime unpacks as it loads them, and for a model that cannot be read:
    whoever needs the model says what is wrong with it.
    """
    try:
        path = Path(model)
        file = path / "config.json" if path.is_dir() else path
        changed_ns = file.stat().st_mtime_ns if file.suffix in (".json", ".yaml", ".yml") else 0
        return _published_formats(model, changed_ns)
    except (MemboundError, OSError, ValueError):
        return PrecisionPlan()


@lru_cache(maxsize=256)
def _published_formats(model: str, changed_ns: int) -> PrecisionPlan:
    return PrecisionPlan() if model.endswith(".gguf") else resolve_model(model).published


def _config(path: Path, given: str) -> dict[str, Any]:
    """A config.json; ModelOpt writes the quantization of its checkpoints into a file beside it."""
    config, beside = _mapping(path, given), path.parent / "hf_quant_config.json"
    if "quantization_config" in config or path.name != "config.json" or not beside.is_file():
        return config
    return config | {"quantization_config": {"quant_method": "modelopt", **_mapping(beside, str(beside))}}


def _mapping(path: Path, given: str) -> dict[str, Any]:
    """The object that a JSON or YAML file holds, with names as keys."""
    is_json = path.suffix == ".json"
    want = "a Hugging Face config.json" if is_json else "a YAML file with the fields of one model"
    try:
        text = read_text(path, "model").removeprefix("\ufeff")
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except MemboundError as error:
        raise ModelError(str(error)) from None
    except (ValueError, RecursionError, yaml.YAMLError):
        raise ModelError(f"model '{given}' is not {path.suffix[1:].upper()}; give the path of {want}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ModelError(f"model '{given}' is not {want}: it must hold names with their values")
    return content
