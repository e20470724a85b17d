"""How are the weights of a Hugging Face folder read?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from membound.roofline.models import ModelError, ModelSpec
from membound.runtime.loading.assemble import Assembler, safetensors_changes
from membound.runtime.loading.facts import read_arithmetic
from membound.runtime.loading.layouts import SAFETENSORS
from membound.runtime.loading.store import Weights, WeightsError
from membound.runtime.supported import checked


def load_safetensors(folder: Path | str) -> tuple[ModelSpec, Weights]:
    """Reads a Hugging Face folder (`config.json`, one or several `.safetensors`) of one of the families in `layouts`.

    Matrices are rounded to bf16. Raises ModelError or WeightsError with one sentence about what is wrong.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    spec = checked(ModelSpec.from_hf_config(config, folder.name))
    if spec.architecture not in SAFETENSORS:
        raise ModelError(
            f"architecture of {spec.name} is {spec.architecture!r}, whose tensors this engine cannot read: "
            f"it must be one of {', '.join(SAFETENSORS)}."
        )
    layout = SAFETENSORS[spec.architecture]
    arithmetic = read_arithmetic(config, spec, layout)
    origin = f"{folder.name}, safetensors, matrices in bf16"
    reader = _Reader(folder)
    return spec, Assembler(spec, arithmetic, layout, reader, origin, safetensors_changes).weights()


class _Reader:
    """Reads tensors by name from the shards of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        shards = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        for shard in shards:
            try:
                with safe_open(folder / shard, framework="pt") as file:
                    self.where |= dict.fromkeys(file.keys(), folder / shard)
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{folder / shard} cannot be read as safetensors: {error}.") from None

    def __call__(self, name: str) -> Tensor:
        if name not in self.where:
            raise WeightsError(f"{self.folder} has no tensor {name}, which its architecture needs.")
        with safe_open(self.where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise WeightsError(
                f"{self.where[name]}: tensor {name} is {tensor.dtype}: it must be float32, bfloat16 or float16."
            )
        return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}.") from None
    return content
