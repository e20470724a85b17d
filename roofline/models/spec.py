"""What is a model, as far as its cost is concerned: its layers, its vocabulary, its parameters?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from membound.roofline.models.base import Frozen, LinearShape, ModelError
from membound.roofline.models.beside import AltUpStreams, Beside, PerLayerInput
from membound.roofline.models.checkpoint import Checkpoint
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.models.layers import Attention, Ffn, Layer, LayerGroup, LayerOverride, difference, grouped
from membound.roofline.models.layers import stacked as stacked_layers
from membound.roofline.precision.plan import PrecisionPlan

_SIXTEEN_BITS = PrecisionPlan()
# parameters of one norm for each hidden element
_NORM_VECTORS = {"rms": 1, "layer": 2, "layer_without_bias": 1, "unscaled": 0}


class Llama3RopeScaling(Frozen):
    """Llama 3.1's stretching of low rotation frequencies (Hugging Face rope type "llama3")."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_context: PositiveInt


class OtherRopeScaling(Frozen):
    """Another way to stretch rotary embedding; it costs nothing, so its name is all that is kept."""

    kind: Literal["other"] = "other"
    rope_type: str


class ModelSpec(Frozen):
    """The shape of a decoder: all that its cost depends on.

    `attention` and `ffn` are those of the usual layer, `overrides` the layers that differ; a model whose layers are
    equal has none. `norms_per_layer` counts all norms over the hidden state: 2 before attention and network, 1 where
    both read the same (GPT-J), 4 with norms after them too (Gemma). `position_rows` is the length of a learned table
    of positions, `mtp_layers` counts the layers that only draft (multi-token prediction).

    Activation, rotation and architecture cost nothing; they are kept for who computes the forward pass. `source`
    says where the figures come from; `published_params_b` is somebody else's count of the parameters in billions,
    kept to check ours against. `idle_params` are parameters that lie in memory and that no step of text reads:
    encoders of images and sound, layers that look at what they give. `checkpoint` says what the default published
    weights are stored in, if not in 16 bits. `tokenizer` names whose tokenizer it has, where the first word of its
    name does not tell.
    """

    name: str
    aliases: tuple[str, ...] = ()
    layers: PositiveInt
    hidden: PositiveInt
    vocab: PositiveInt
    usual_attention: Attention = Field(alias="attention")
    usual_ffn: Ffn = Field(alias="ffn")
    overrides: tuple[LayerOverride, ...] = ()
    tie_embeddings: bool
    norm: Literal["rms", "layer", "layer_without_bias", "unscaled"] = "rms"
    norms_per_layer: PositiveInt = 2
    embedding_norm: bool = False
    position_rows: NonNegativeInt = 0
    lm_head_bias: bool = False
    mtp_layers: NonNegativeInt = 0
    per_layer_input: PerLayerInput | None = None
    streams: AltUpStreams | None = None
    idle_params: NonNegativeInt = 0
    max_context: PositiveInt
    activation: str = "silu"
    rope_theta: PositiveFloat = 10000.0
    rotary_fraction: PositiveFloat = 1.0
    rope_scaling: Llama3RopeScaling | OtherRopeScaling | None = Field(default=None, discriminator="kind")
    norm_eps: PositiveFloat = 1e-5
    architecture: str | None = None
    tokenizer: str | None = None
    checkpoint: Checkpoint | None = None
    source: str = Field(min_length=1)
    published_params_b: PositiveFloat | None = None
    published_params_source: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete_overrides(cls, fields: Any) -> Any:
        """Fills what an override leaves out of a part of the usual kind."""
        if not isinstance(fields, dict) or not isinstance(fields.get("overrides"), list | tuple):
            return fields
        return fields | {"overrides": [_completed(override, fields) for override in fields["overrides"]]}

    @model_validator(mode="after")
    def _overrides_name_layers(self) -> Self:
        for override in self.overrides:
            override.indices(self.layers)
        return self

    @property
    def published(self) -> PrecisionPlan:
        """The formats of the default published weights."""
        return self.checkpoint.plan if self.checkpoint else _SIXTEEN_BITS

    @property
    def tokenizer_family(self) -> str:
        """Models of one family have the same tokens, whose table may be padded: `Qwen2.5` of Qwen2.5-7B."""
        return self.tokenizer or re.split(r"[-_ ]", self.name.rsplit("/", 1)[-1].removeprefix("Meta-"))[0]

    @property
    def attention(self) -> Attention:
        """The attention of every layer; raises ModelError for a model whose layers differ in it."""
        return self._only("attention", [group.attention for group in self.groups()])

    @property
    def ffn(self) -> Ffn:
        """The feed-forward network of every layer; raises ModelError for a model whose layers differ in it."""
        return self._only("ffn", [group.ffn for group in self.groups()])

    def _only(self, part: str, found: list[Any]) -> Any:
        if len(set(found)) > 1:
            raise ModelError(f"{self.name} has no single {part}, because its layers differ: {difference(found)}.")
        return found[0]

    @cached_property
    def stack(self) -> tuple[Layer, ...]:
        """All layers in order."""
        return stacked_layers(self.layers, Layer(self.usual_attention, self.usual_ffn), self.overrides)

    @cached_property
    def _groups(self) -> tuple[LayerGroup, ...]:
        return grouped(self.stack)

    def groups(self) -> tuple[LayerGroup, ...]:
        """Equal layers merged; their counts sum to `layers`."""
        return self._groups

    @property
    def besides(self) -> tuple[Beside, ...]:
        """What runs in every layer beside its mixer and its network, mostly nothing."""
        return tuple(one for one in (self.per_layer_input, self.streams) if one is not None)

    @property
    def mixtures(self) -> tuple[MoeFfn, ...]:
        """The mixtures of experts of its groups of layers, none of a dense model."""
        return tuple(group.ffn for group in self.groups() if isinstance(group.ffn, MoeFfn))

    @property
    def mixer_kinds(self) -> frozenset[str]:
        """The kinds of its layers' token mixers."""
        return frozenset(mixer.kind for group in self.groups() for mixer in group.mixers)

    def layer_linears(self) -> tuple[LinearShape, ...]:
        """The linears of one layer in the order of the forward pass, fused as engines do; for equal layers only."""
        return self.attention.linears(self.hidden) + self.ffn.linears(self.hidden)

    @property
    def lm_head(self) -> LinearShape:
        """The projection to logits, read once a step whether or not it is tied to the embedding."""
        return LinearShape("lm_head", self.vocab, self.hidden)

    def kv_bytes_per_token(self, kv_bits: float) -> float:
        """Bytes that one token leaves in the caches of all layers, at `kv_bits` bits an element of K and V.

        A window bounds how many tokens a layer keeps, not what one leaves. Keys of a sparse indexer have their own
        precision.
        """
        elements = sum(group.count * group.attention.kv_elements_per_token for group in self.groups())
        return elements * kv_bits / 8 + self.index_bytes_per_token

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of sparse attention's index keys that one token leaves in all layers."""
        indexers = ((group.count, getattr(mixer, "indexer", None)) for group in self.groups() for mixer in group.mixers)
        return sum(count * indexer.key_bytes_per_token for count, indexer in indexers if indexer is not None)

    @property
    def state_bytes_per_sequence(self) -> float:
        """Bytes that a sequence keeps whatever its length: recurrent states, and inputs of convolutions at 16 bits."""
        return sum(
            group.count * (mixer.state_elements * mixer.state_bits + 16 * mixer.conv_elements) / 8
            for group in self.groups()
            for mixer in group.mixers
        )

    @property
    def embedding_params(self) -> int:
        """The token table, a table of positions, and the norm after them; tables of the layers' own inputs."""
        tables = sum(rows * columns for rows, columns in (beside.table(self.layers) for beside in self.besides))
        return (self.vocab + self.position_rows) * self.hidden + self.embedding_norm * self._norm_params + tables

    @property
    def lm_head_params(self) -> int:
        """0 if the matrix is the embedding's."""
        return (0 if self.tie_embeddings else self.vocab * self.hidden) + self.lm_head_bias * self.vocab

    @property
    def vector_params(self) -> int:
        """Parameters of all layers that stand in no matrix: norms (the last one too), biases, convolutions."""
        own = sum(group.count * self._layer_vectors(group) for group in self.groups()) + self._norm_params
        return own + sum(
            self.layers * beside.layer_vectors(self.hidden) + beside.step_vectors(self.hidden)
            for beside in self.besides
        )

    @property
    def params(self) -> int:
        """All parameters, without the layers that only draft (`mtp_params`) and what no step reads (`idle_params`)."""
        layers = sum(group.count * self._layer_params(group) for group in self.groups())
        return self.embedding_params + layers + self._norm_params + self.lm_head_params + self._beside_params

    @property
    def _beside_params(self) -> int:
        """Of what runs beside mixers and networks, without tables."""
        hidden, layers = self.hidden, self.layers
        return sum(
            layers * (sum(n * k for _, n, k in beside.layer_linears(hidden)) + beside.layer_vectors(hidden))
            + sum(n * k for _, n, k in beside.step_linears(hidden, layers))
            + beside.step_vectors(hidden)
            for beside in self.besides
        )

    @property
    def active_params(self) -> int:
        """Parameters that one token passes: of a mixture the router, its shared experts, and those that compute it."""
        idle = sum(
            group.count * (group.ffn.experts - group.ffn.computed_per_token) * self._expert_params(group.ffn)
            for group in self.groups()
            if isinstance(group.ffn, MoeFfn)
        )
        return self.params - round(idle)

    @property
    def mtp_params(self) -> int:
        """Parameters of the drafting layers: each a layer as the last one, a matrix that joins two inputs, 3 norms.

        They share the embedding and the lm_head.
        """
        joining = 2 * self.hidden * self.hidden + 3 * self._norm_params
        return self.mtp_layers * (self._layer_params(self.stack[-1]) + joining)

    @property
    def _norm_params(self) -> int:
        return _NORM_VECTORS[self.norm] * self.hidden

    def _expert_params(self, ffn: MoeFfn) -> int:
        return sum(n * k for _, n, k in ffn.expert_linears(self.hidden))

    def _layer_params(self, layer: Layer | LayerGroup) -> int:
        linears = layer.attention.linears(self.hidden) + layer.ffn.linears(self.hidden)
        experts = layer.ffn.experts * self._expert_params(layer.ffn) if isinstance(layer.ffn, MoeFfn) else 0
        return sum(n * k for _, n, k in linears) + experts + self._layer_vectors(layer)

    def _layer_vectors(self, layer: Layer | LayerGroup) -> int:
        halves = (layer.attention.kind != "none") + (layer.ffn.kind != "none")
        norms = self.norms_per_layer if halves == 2 else halves * max(1, self.norms_per_layer // 2)
        return layer.attention.vectors(self.hidden) + layer.ffn.vectors(self.hidden) + norms * self._norm_params

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed (by their names in a file), checked like any other model."""
        fields = {info.alias or name: getattr(self, name) for name, info in type(self).model_fields.items()}
        return type(self)(**fields | dict(update or {}))

    def first_layers(self, count: int) -> Self:
        """The model cut to its first layers; raises ModelError where it has not that many.

        What drafts beside the layers goes, and so do other counts of the parameters.
        """
        if not 1 <= count <= self.layers:
            raise ModelError(f"{self.name} has {self.layers} layers, of which the first {count} cannot be taken.")
        overrides = [
            override.model_copy(update={"layers": kept})
            for override in self.overrides
            if (kept := tuple(index for index in override.indices(self.layers) if index < count))
        ]
        changes = {"name": f"{self.name}[:{count}]", "layers": count, "overrides": overrides, "mtp_layers": 0}
        return self.model_copy(
            update=changes | {"aliases": (), "published_params_b": None, "published_params_source": None}
        )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """Reads a Hugging Face `config.json`; raises ModelError for one that is not of a known language model."""
        from membound.roofline.models.huggingface import read_config

        return read_config(config, name)

    @classmethod
    def from_gguf_metadata(cls, fields: Mapping[str, object], name: str, *, tie_embeddings: bool = False) -> ModelSpec:
        """Reads the metadata of a GGUF; raises ModelError for an unknown architecture.

        GGUF does not record whether the lm_head is the embedding: the file then lacks `output.weight`, and the
        caller says so.
        """
        from membound.roofline.models.gguf import read_metadata

        return read_metadata(fields, name, tie_embeddings=tie_embeddings)


def build(**fields: Any) -> ModelSpec:
    """The model of these fields; raises ModelError with one sentence about the first that is wrong."""
    try:
        return ModelSpec(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "layers"
        shown = "" if isinstance(first["input"], Mapping) else f"{first['input']!r:.80}, which is "
        reason = first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{where} of {fields.get('name', 'a model')} is {shown}not valid: {reason}.") from None


def _completed(override: Any, fields: Mapping[str, Any]) -> Any:
    if not isinstance(override, dict):
        return override
    completed = dict(override)
    for part in ("attention", "ffn"):
        given, usual = override.get(part), fields.get(part)
        if isinstance(usual, Frozen):
            usual = usual.model_dump()
        if isinstance(given, dict) and isinstance(usual, dict) and given.get("kind") in (None, usual.get("kind")):
            completed[part] = usual | given
    return completed
