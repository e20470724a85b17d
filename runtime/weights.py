"""What are a model's weights, from which files do they come, and what stands in where there are none?"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from membound.kernels.arena import Arena
from membound.roofline.errors import MemboundError
from membound.roofline.gguf_file import GgufFile
from membound.roofline.models import Llama3RopeScaling, ModelSpec
from membound.runtime.supported import plain_attention

_POOL_ELEMENTS = 4_194_301  # prime, so that rows of no length line up with the period of the pool


class WeightsError(MemboundError):
    """Weights that are missing, unreadable or not in the shape that their model needs."""


# One layer's tensors by the part that they belong to: matrices [n, k] in bf16 by the names of `roofline.models`, norms
# ("mixer_norm", "ffn_norm", "q_norm", "k_norm") and biases ("qkv_bias") in fp32; q and k rows in rotate-half order.
LayerWeights = dict[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """A model's weights; `lm_head` is `embed` itself if tied. `origin` says in words what they are."""

    embed: Tensor  # [vocab, hidden], bf16
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden], fp32
    lm_head: Tensor  # [vocab, hidden], bf16
    origin: str
    rope_factors: Tensor | None = None  # [head_dim / 2], fp32, divides each rotation frequency (Llama 3.1)

    def to(self, device: torch.device | str) -> Weights:
        """The same weights on `device`, still tied if they were."""
        embed = self.embed.to(device)
        return replace(
            self,
            embed=embed,
            layers=tuple({name: tensor.to(device) for name, tensor in layer.items()} for layer in self.layers),
            final_norm=self.final_norm.to(device),
            lm_head=embed if self.lm_head is self.embed else self.lm_head.to(device),
            rope_factors=None if self.rope_factors is None else self.rope_factors.to(device),
        )


def load_gguf(path: Path | str) -> tuple[ModelSpec, Weights]:
    """Reads a GGUF of architecture llama, qwen2 or qwen3, dequantized to bf16.

    Raises GgufError, ModelError or WeightsError with one sentence about what is wrong with the file.
    """
    file = GgufFile(path)
    tied = "output.weight" not in file.tensors
    spec = ModelSpec.from_gguf_metadata(file.metadata, file.path.stem, tie_embeddings=tied)
    attention, heads_by_name = plain_attention(spec), {}
    if file.metadata["general.architecture"] == "llama":
        heads_by_name = {"attn_q.weight": attention.heads, "attn_k.weight": attention.kv_heads}

    def read(name: str) -> Tensor:
        tensor = torch.from_numpy(file.dequantize(name))
        heads = heads_by_name.get(name.split(".", 2)[-1])
        return tensor if heads is None else _rotate_half_order(tensor, heads)

    factors = torch.from_numpy(file.dequantize("rope_freqs.weight")) if "rope_freqs.weight" in file.tensors else None
    return spec, _assemble(spec, read, _GGUF_NAMES, _gguf_origin(file), factors)


def load_safetensors(folder: Path | str) -> tuple[ModelSpec, Weights]:
    """Reads a Hugging Face folder (`config.json`, one or several `.safetensors`) of Llama, Mistral, Qwen2 or Qwen3.

    Matrices are rounded to bf16. Raises ModelError or WeightsError with one sentence about what is wrong.
    """
    folder = Path(folder)
    spec = ModelSpec.from_hf_config(_read_json(folder / "config.json"), folder.name)
    plain_attention(spec)
    index = folder / "model.safetensors.index.json"
    shards = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    where: dict[str, Path] = {}
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt") as file:
                where |= dict.fromkeys(file.keys(), folder / shard)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{folder / shard} cannot be read as safetensors: {error}.") from None

    def read(name: str) -> Tensor:
        if name not in where:
            raise WeightsError(f"{folder} has no tensor {name}, which its architecture needs.")
        with safe_open(where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise WeightsError(
                f"{where[name]}: tensor {name} is {tensor.dtype}: it must be float32, bfloat16 or float16."
            )
        return tensor

    return spec, _assemble(spec, read, _HF_NAMES, f"{folder.name}, safetensors, matrices in bf16", _rope_factors(spec))


def random_weights(spec: ModelSpec, seed: int, layers: int | None = None) -> Weights:
    """Seeded weights in the true shapes of `spec`: right for timing, and logits stay finite, but they mean nothing.

    Values are normal with variance 1 / k, drawn from one pool of 4 million that repeats. `layers` makes fewer
    layers than `spec` has, for a model that does not fit.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_POOL_ELEMENTS, generator=generator).bfloat16()
    attention, count = plain_attention(spec), spec.layers if layers is None else layers
    arena = Arena()

    def matrix(n: int, k: int) -> Tensor:
        flat = arena.empty((n * k,), torch.bfloat16)
        shift = int(torch.randint(_POOL_ELEMENTS, (), generator=generator))
        scaled = pool.roll(shift) * k**-0.5
        for piece in flat.split(_POOL_ELEMENTS):
            piece.copy_(scaled[: piece.numel()])
        return flat.view(n, k)

    def layer() -> LayerWeights:
        tensors = {"mixer_norm": torch.ones(spec.hidden), "ffn_norm": torch.ones(spec.hidden)}
        if attention.qkv_bias:
            tensors["qkv_bias"] = 0.1 * torch.randn(attention.qkv_rows, generator=generator)
        if attention.qk_norm:
            tensors |= {name: torch.ones(attention.head_dim) for name in ("q_norm", "k_norm")}
        return tensors | {name: matrix(n, k) for name, n, k in spec.layer_linears()}

    embed = matrix(spec.vocab, spec.hidden)
    return Weights(
        embed=embed,
        layers=tuple(layer() for _ in range(count)),
        final_norm=torch.ones(spec.hidden),
        lm_head=embed if spec.tie_embeddings else matrix(spec.vocab, spec.hidden),
        origin=f"random weights in the shapes of {spec.name}, seed {seed}, {count} of {spec.layers} layers",
        rope_factors=_rope_factors(spec),
    )


_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layer": "blk.{}.",
    "mixer_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layer": "model.layers.{}.",
    "mixer_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


_FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def _assemble(
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    names: Mapping[str, str],
    origin: str,
    rope_factors: Tensor | None,
) -> Weights:
    """Fuses and checks what `read` returns for the tensors that `names` says a file holds."""
    attention, linears = plain_attention(spec), {name: (n, k) for name, n, k in spec.layer_linears()}
    arena = Arena()

    def vector(name: str, size: int) -> Tensor:
        return _checked(origin, name, read(name), (size,)).float()

    def load_layer(i: int) -> LayerWeights:
        prefix = names["layer"].format(i)

        def fused(shape: tuple[int, ...], *parts: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            wanted = [prefix + names[part] for part in parts]
            whole = torch.cat([read(name).to(dtype) for name in wanted])
            return arena.like(_checked(origin, " + ".join(wanted), whole, shape), dtype)

        tensors = {name: vector(prefix + names[name], spec.hidden) for name in ("mixer_norm", "ffn_norm")}
        if attention.qkv_bias:
            bias = fused((attention.qkv_rows,), "q_bias", "k_bias", "v_bias", dtype=torch.float32)
            tensors["qkv_bias"] = bias
        if attention.qk_norm:
            tensors |= {name: vector(prefix + names[name], attention.head_dim) for name in ("q_norm", "k_norm")}
        return tensors | {name: fused(linears[name], *parts) for name, parts in _FUSED.items()}

    def table(name: str) -> Tensor:
        return arena.like(_checked(origin, names[name], read(names[name]), (spec.vocab, spec.hidden)), torch.bfloat16)

    with ThreadPoolExecutor(max_workers=2) as pool:
        embed = table("embed")
        return Weights(
            embed=embed,
            layers=tuple(pool.map(load_layer, range(spec.layers))),
            final_norm=vector(names["final_norm"], spec.hidden),
            lm_head=embed if spec.tie_embeddings else table("lm_head"),
            origin=origin,
            rope_factors=rope_factors,
        )


def _checked(origin: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise WeightsError(f"{name} of {origin} has shape {list(tensor.shape)}: its model needs {list(shape)}.")
    return tensor


def _gguf_origin(file: GgufFile) -> str:
    matrices = Counter(info.quantization.name for info in file.tensors.values() if len(info.shape) > 1)
    bits = re.match(r"[IT]?Q(\d)", matrices.most_common(1)[0][0]) if matrices else None
    was = f": these weights were {bits[1]}-bit once" if bits else ""
    return f"{file.path.name}, dequantized to bf16{was}"


def _rotate_half_order(weight: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's reordering of q and k rows [heads * head_dim, hidden], where rotated pairs are neighbours."""
    n, k = weight.shape
    return weight.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)


def _rope_factors(spec: ModelSpec) -> Tensor | None:
    scaling = spec.rope_scaling
    return _llama3_rope_factors(spec, scaling) if isinstance(scaling, Llama3RopeScaling) else None


def _llama3_rope_factors(spec: ModelSpec, scaling: Llama3RopeScaling) -> Tensor:
    """How much Llama 3.1 slows each rotation: by `factor` below a frequency, not at all above another.

    Between the two it changes smoothly. Hugging Face `modeling_rope_utils._compute_llama3_parameters`, [head_dim / 2].
    """
    frequencies = rope_frequencies(spec)
    turns = scaling.original_max_context * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """Radians a position by which rotary embedding turns each pair, before any scaling: [head_dim / 2], fp32."""
    head_dim = plain_attention(spec).head_dim
    return spec.rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}.") from None
    return content
