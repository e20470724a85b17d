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
from membound.runtime.loading.packed import from_fp8, from_mxfp4
from membound.runtime.loading.store import Weights, WeightsError
from membound.runtime.supported import checked


def load_safetensors(folder: Path | str) -> tuple[ModelSpec, Weights]:
    """Reads a Hugging Face folder (`config.json`, one or several `.safetensors`) of one of the families in `layouts`.

    Matrices are rounded to bf16. Raises ModelError or WeightsError with one sentence about what is wrong.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    spec = checked(ModelSpec.from_hf_config(config, folder.name))
    config |= config.get("text_config") or {}
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
    """Reads tensors by name from the shards of a folder; what is stored in fp8 or MXFP4 it unpacks."""

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
        found = next((other for other in _names(name) if other in self.where or f"{other}_blocks" in self.where), None)
        if found is None:
            raise WeightsError(f"{self.folder} has no tensor {name}, which its architecture needs.")
        if found not in self.where:
            return from_mxfp4(self._raw(f"{found}_blocks"), self._raw(f"{found}_scales"))
        tensor = self._raw(found)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = next((f"{found}{end}" for end in ("_scale_inv", "_scale") if f"{found}{end}" in self.where), None)
            if scale is None:
                raise WeightsError(f"{self.where[found]}: tensor {found} is in fp8 without a scale beside it.")
            return from_fp8(tensor, self._raw(scale))
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise WeightsError(
                f"{self.where[found]}: tensor {found} is {tensor.dtype}: "
                "it must be float32, bfloat16, float16, or fp8 or MXFP4 with scales."
            )
        return tensor

    def _raw(self, name: str) -> Tensor:
        with safe_open(self.where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _names(name: str) -> tuple[str, ...]:
    """Under which names a tensor may stand: multimodal models have it one level further in, old GPT-2s further out."""
    inner = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{inner}", name.removeprefix("transformer.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}.") from None
    return content
