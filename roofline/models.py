"""What is a model, as far as its cost is concerned: layers, attention, feed-forward network, vocabulary?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from membound.roofline.errors import MemboundError


class ModelError(MemboundError):
    """A model that is unknown, inconsistent or of a kind that membound does not support."""


class LinearShape(NamedTuple):
    """A linear layer y [m, n] = x [m, k] @ weight [n, k] transposed."""

    name: str
    n: int
    k: int


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupedQueryAttention(_Frozen):
    """Attention in which `heads / kv_heads` query heads share a K and V head (equal: MHA; one KV head: MQA)."""

    kind: Literal["gqa"] = "gqa"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    qk_norm: bool = False

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even, because rotary embedding turns pairs")
        return self

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k and v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token leaves in the KV cache of one layer."""
        return 2 * self.kv_heads * self.head_dim

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        return LinearShape("qkv", self.qkv_rows, hidden), LinearShape("o", hidden, self.heads * self.head_dim)

    @property
    def vector_params(self) -> int:
        """Parameters of one layer outside its linears: biases and the norms of q and k."""
        return self.qkv_bias * self.qkv_rows + self.qk_norm * 2 * self.head_dim


class GatedFfn(_Frozen):
    """The feed-forward network down(silu(gate(x)) * up(x)), SwiGLU."""

    kind: Literal["gated"] = "gated"
    intermediate: PositiveInt

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        return LinearShape("gate_up", 2 * self.intermediate, hidden), LinearShape("down", hidden, self.intermediate)


# A further kind joins as `Annotated[GroupedQueryAttention | Other, Field(discriminator="kind")]`.
Attention = GroupedQueryAttention
Ffn = GatedFfn


class Llama3RopeScaling(_Frozen):
    """Llama 3.1's stretching of low rotation frequencies (Hugging Face rope type "llama3")."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_context: PositiveInt


class ModelSpec(_Frozen):
    """The shape of a decoder-only transformer: all that its cost and its forward pass depend on but the weights.

    `source` says where the figures come from; `published_params_b` is somebody else's count of the parameters
    in billions, kept to check ours against.
    """

    name: str
    layers: PositiveInt
    hidden: PositiveInt
    vocab: PositiveInt
    attention: Attention
    ffn: Ffn
    tie_embeddings: bool
    max_context: PositiveInt
    rope_theta: PositiveFloat
    rms_eps: PositiveFloat
    rope_scaling: Llama3RopeScaling | None = None
    source: str = Field(min_length=1)
    published_params_b: PositiveFloat | None = None
    published_params_source: str | None = None

    @property
    def params(self) -> int:
        """Total parameters: embedding, layers, norms, biases, and the lm_head unless it is the embedding."""
        matrices = sum(n * k for _, n, k in self.layer_linears())
        per_layer = matrices + self.attention.vector_params + 2 * self.hidden
        tables = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        return tables + self.layers * per_layer + self.hidden

    def layer_linears(self) -> tuple[LinearShape, ...]:
        """The linears of one layer in the order of the forward pass, q/k/v and gate/up fused."""
        return self.attention.linears(self.hidden) + self.ffn.linears(self.hidden)

    @property
    def lm_head(self) -> LinearShape:
        """The projection to logits, read once a step whether or not it is tied to the embedding."""
        return LinearShape("lm_head", self.vocab, self.hidden)

    def linear_shapes(self) -> tuple[LinearShape, ...]:
        """`layer_linears()` once, then the lm_head; a step runs the former `layers` times and the latter once."""
        return (*self.layer_linears(), self.lm_head)

    def kv_bytes_per_token(self, kv_bits: float) -> float:
        """Bytes that one token leaves in the KV caches of all layers, at `kv_bits` bits an element."""
        return self.layers * self.attention.kv_elements_per_token * kv_bits / 8

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """Reads a Hugging Face `config.json` of Llama, Mistral, Qwen2 or Qwen3.

        Raises ModelError for another architecture or an option that would change the forward pass.
        """
        architecture = _hf_architecture(config, name)
        qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
        _refuse_hf_options(config, name, qwen=qwen2 or qwen3)
        hidden = _get_count(config, "hidden_size", name)
        heads = _get_count(config, "num_attention_heads", name)
        rope = config.get("rope_parameters") or {}
        return _build(
            name=name,
            layers=_get(config, "num_hidden_layers", name),
            hidden=hidden,
            vocab=_get(config, "vocab_size", name),
            attention={
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads") or heads,
                "head_dim": config.get("head_dim") or (128 if qwen3 else hidden // heads),
                "qkv_bias": qwen2,
                "qk_norm": qwen3,
            },
            ffn={"intermediate": _get(config, "intermediate_size", name)},
            tie_embeddings=config.get("tie_word_embeddings", False),
            max_context=_get(config, "max_position_embeddings", name),
            rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10000.0),
            rms_eps=_get(config, "rms_norm_eps", name),
            rope_scaling=_hf_rope_scaling(config, name),
            source=f"Hugging Face config.json of {name}",
        )

    @classmethod
    def from_gguf_metadata(cls, fields: Mapping[str, object], name: str, *, tie_embeddings: bool = False) -> ModelSpec:
        """Reads the metadata of a GGUF of architecture llama (also Mistral), qwen2 or qwen3.

        GGUF does not record whether the lm_head is the embedding: the file then lacks `output.weight`, and the
        caller says so. Raises ModelError as `from_hf_config` does.
        """
        arch = _get(fields, "general.architecture", name)
        if arch not in _GGUF_ARCHITECTURES:
            raise ModelError(
                f"general.architecture of {name} is {arch!r}, which is not supported: "
                f"a GGUF must be one of {', '.join(_GGUF_ARCHITECTURES)}."
            )
        _refuse_gguf_options(fields, arch, name)
        heads = _get_count(fields, f"{arch}.attention.head_count", name)
        hidden = _get_count(fields, f"{arch}.embedding_length", name)
        vocab = fields.get(f"{arch}.vocab_size")
        return _build(
            name=name,
            layers=_get(fields, f"{arch}.block_count", name),
            hidden=hidden,
            vocab=vocab if vocab is not None else len(_get(fields, "tokenizer.ggml.tokens", name)),
            attention={
                "heads": heads,
                "kv_heads": fields.get(f"{arch}.attention.head_count_kv", heads),
                "head_dim": fields.get(f"{arch}.attention.key_length") or hidden // heads,
                "qkv_bias": arch == "qwen2",
                "qk_norm": arch == "qwen3",
            },
            ffn={"intermediate": _get(fields, f"{arch}.feed_forward_length", name)},
            tie_embeddings=tie_embeddings,
            max_context=_get(fields, f"{arch}.context_length", name),
            rope_theta=fields.get(f"{arch}.rope.freq_base", 10000.0),
            rms_eps=_get(fields, f"{arch}.attention.layer_norm_rms_epsilon", name),
            source=f"GGUF metadata of {name}",
        )


@cache
def catalog() -> Mapping[str, ModelSpec]:
    """All models of `data/models/*.yaml` by name; each file holds a list under `models`."""
    specs: dict[str, ModelSpec] = {}
    for file in sorted((resources.files("membound.data") / "models").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            for fields in yaml.safe_load(file.read_text(encoding="utf-8"))["models"]:
                spec = _build(**fields)
                if spec.name in specs:
                    raise ModelError(f"The model {spec.name} stands twice in the catalog, again in {file.name}.")
                specs[spec.name] = spec
    return specs


def get_model(name: str) -> ModelSpec:
    """The catalog's model of that name, whatever its case; raises ModelError with close matches for another."""
    by_lower = {known.lower(): known for known in catalog()}
    if name.lower() in by_lower:
        return catalog()[by_lower[name.lower()]]
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(catalog())}."
    raise ModelError(f"The model {name!r} is not in the catalog: {hint}")


_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HF_MODEL_TYPES = dict(zip(("llama", "mistral", "qwen2", "qwen3"), _HF_ARCHITECTURES, strict=True))
_SUPPORTED = "dense Llama, Mistral, Qwen2 and Qwen3"


def _build(**fields: Any) -> ModelSpec:
    try:
        return ModelSpec(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "model"
        reason = first["msg"].removeprefix("Value error, ")
        raise ModelError(
            f"{where} of {fields.get('name', 'a model')} is {first['input']!r}, which is not valid: {reason}."
        ) from None


def _get(fields: Mapping[str, Any], key: str, name: str) -> Any:
    value = fields.get(key)
    if value is None:
        raise ModelError(f"{key} of {name} is missing, and there is no default for it.")
    return value


def _get_count(fields: Mapping[str, Any], key: str, name: str) -> int:
    value = _get(fields, key, name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} of {name} is {value!r}: it must be a positive integer.")
    return value


def _hf_architecture(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures") or [_HF_MODEL_TYPES.get(str(config.get("model_type", "")))]
    if not isinstance(listed, list):
        raise ModelError(f"architectures of {name} is {listed!r:.80}, which must be a list of names.")
    architecture = listed[0] or config.get("model_type")
    if architecture in _HF_ARCHITECTURES:
        return str(architecture)
    text = str(architecture)
    kind = "an architecture"
    if config.get("kv_lora_rank"):
        kind = "a multi-head latent attention (MLA) architecture"
    elif any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        kind = "a mixture-of-experts (MoE) architecture"
    elif any(word in text for word in ("Mamba", "Rwkv", "Jamba")) or config.get("state_size"):
        kind = "a state-space (SSM) architecture"
    raise ModelError(f"architectures of {name} is {text}, {kind} that is not supported: supported are {_SUPPORTED}.")


def _refuse_hf_options(config: Mapping[str, Any], name: str, *, qwen: bool) -> None:
    def refuse(key: str, want: str) -> None:
        raise ModelError(f"{key} of {name} is {config[key]!r}, which is not supported: it must be {want}.")

    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            refuse(key, "false")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "1.0")
    window = config.get("sliding_window") if not qwen or config.get("use_sliding_window") else None
    if window is not None and window < config.get("max_position_embeddings", 0):
        refuse("sliding_window", "null, because sliding-window attention is not supported")


def _hf_rope_scaling(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope_scaling of {name} is {kind!r}, which is not supported: it must be null or llama3.")
    return {
        "factor": _get(scaling, "factor", name),
        "low_freq_factor": _get(scaling, "low_freq_factor", name),
        "high_freq_factor": _get(scaling, "high_freq_factor", name),
        "original_max_context": _get(scaling, "original_max_position_embeddings", name),
    }


def _refuse_gguf_options(fields: Mapping[str, Any], arch: str, name: str) -> None:
    unsupported = {
        f"{arch}.expert_count": "a mixture of experts (MoE)",
        f"{arch}.attention.sliding_window": "sliding-window attention",
        f"{arch}.attention.kv_lora_rank": "multi-head latent attention (MLA)",
    }
    for key, what in unsupported.items():
        if fields.get(key):
            raise ModelError(
                f"{key} of {name} is {fields[key]!r}, and {what} is not supported: supported are {_SUPPORTED}."
            )
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{arch}.rope.scaling.type of {name} is {scaling!r}, which is not supported: it must be none.")
    per_layer = f"{arch}.feed_forward_length", f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv"
    for key in per_layer:
        if isinstance(fields.get(key), list | tuple):
            raise ModelError(f"{key} of {name} differs by layer, which is not supported: it must be one number.")
