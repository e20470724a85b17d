"""How is a Hugging Face config.json asked for its facts, and what do all families read alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from membound.roofline.models.base import ModelError
from membound.roofline.models.ffn import NoFfn
from membound.roofline.models.layers import Ffn
from membound.roofline.models.side_by_side import ParallelMixers, SingleMixer

Fields = dict[str, Any]

_ABSENT = object()
# Every kind of mixer and network by its name.
_PARTS = {
    part.model_fields["kind"].default: part for union in (SingleMixer, Ffn) for part in get_args(get_args(union)[0])
} | {"parallel": ParallelMixers, "none": NoFfn}
# Beyond these a field is a slip: no dimension is as long, and no model as deep.
MOST, MOST_LAYERS = 2**40, 10_000
WINDOWED = ("sliding_attention", "chunked_attention")


class Config:
    """The fields of one config.json; a question takes the names that families give to the same fact.

    `spoken` says what a field is called where it came from, if not from a config.json.
    """

    def __init__(
        self, fields: Mapping[str, Any], name: str, architecture: str, spoken: Mapping[str, str] | None = None
    ) -> None:
        self.fields = fields
        self.name = name
        self.architecture = architecture
        self.spoken = spoken or {}

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of `keys` that is given and not null."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), default)

    def need(self, *keys: str) -> Any:
        """As `get`, but raises ModelError where none of them is given."""
        value = self.get(*keys, default=_ABSENT)
        if value is _ABSENT:
            raise ModelError(f"{self._say(keys[0])} of {self.name} is missing, and there is no default for it.")
        return value

    def count(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """A positive integer of up to `most`; raises ModelError for anything else."""
        value = self.need(*keys) if default is None else self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(
                f"{self._given(keys)} of {self.name} is {value!r:.40}: it must be a positive integer, at most {most:,}."
            )
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or false; raises ModelError for anything else."""
        value = self.get(*keys, default=default)
        if value not in (True, False):
            raise ModelError(f"{self._given(keys)} of {self.name} is {value!r:.40}: it must be true or false.")
        return bool(value)

    def _given(self, keys: Sequence[str]) -> str:
        return self._say(next((key for key in keys if self.fields.get(key) is not None), keys[0]))

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        return self.count("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        return self.count("num_key_value_heads", "num_kv_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        return self.count("head_dim", "attention_head_dim", default=max(1, self.hidden // self.heads))

    @property
    def max_context(self) -> int:
        return self.count(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length"
        )

    @property
    def window(self) -> int | None:
        """The window of layers that have one, unless it is no shorter than the context."""
        window = self.get("sliding_window", "attention_chunk_size")
        return window if window is not None and window < self.max_context else None

    def layer_list(self, key: str) -> list[Any] | None:
        """A list with one entry a layer; raises ModelError for another length."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, Sequence) or len(values) != self.layers:
            length = len(values) if isinstance(values, Sequence) else repr(values)
            raise ModelError(f"{self._say(key)} of {self.name} has {length} entries: it must have one for each layer.")
        return list(values)

    def windows(self, pattern: Sequence[bool] | bool = False) -> list[int | None]:
        """The window of each layer: by `layer_types` where given, otherwise where `pattern` is true."""
        types = self.layer_list("layer_types")
        for kind in types or ():
            if kind not in (*WINDOWED, "full_attention"):
                raise self.unsupported("layer_types", f"{kind!r:.40} is none of full_attention, {', '.join(WINDOWED)}")
        marks = [kind in WINDOWED for kind in types] if types else pattern
        if isinstance(marks, bool):
            marks = [marks] * self.layers
        return [self.window if mark else None for mark in marks]

    def unsupported(self, key: str, want: str) -> ModelError:
        shown = f"{self._say(key)} of {self.name} is {self.fields.get(key)!r:.80}"
        return ModelError(f"{shown}, which is not supported: {want}.")

    def _say(self, key: str) -> str:
        return self.spoken.get(key, key)


def gqa(c: Config, **changes: Any) -> Fields:
    """Grouped-query attention as most families name it."""
    return {"kind": "gqa", "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, **changes}


def windowed(attention: Fields, windows: Sequence[int | None]) -> list[Fields]:
    """One attention a layer, which differ in their window."""
    return [attention | {"window": window} for window in windows]


def model(c: Config, attention: Fields | Sequence[Fields], ffn: Fields | Sequence[Fields], **changes: Any) -> Fields:
    """The fields of a model: what most families name alike, then `changes`."""
    activation = c.get("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act", default="silu")
    fields = {
        "layers": changes.get("layers") or c.layers,
        "hidden": c.hidden,
        "vocab": changes.get("vocab") or c.count("vocab_size"),
        "tie_embeddings": c.flag("tie_word_embeddings"),
        "max_context": changes.get("max_context") or c.max_context,
        "activation": activation,
        "norm_eps": c.get("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", default=1e-5),
        "architecture": c.architecture,
        "mtp_layers": c.get("num_nextn_predict_layers", default=0),
        **rope(c),
        **changes,
    }
    return fields | stack(attention, ffn, fields["layers"])


def stack(attention: Fields | Sequence[Fields], ffn: Fields | Sequence[Fields], layers: int) -> Fields:
    """The usual layer (the most frequent) and the overrides of a stack that is given layer by layer."""
    found: Fields = {}
    overrides: dict[tuple[int, ...], Fields] = {}
    for part, given in (("attention", attention), ("ffn", ffn)):
        each = [given] * layers if isinstance(given, dict) else list(given)
        keys = [tuple(sorted(fields.items(), key=str)) for fields in map(_hashable, each)]
        usual = Counter(keys).most_common(1)[0][0]
        found[part] = each[keys.index(usual)]
        for key in dict.fromkeys(keys):
            if key != usual:
                indices = tuple(index for index, other in enumerate(keys) if other == key)
                other = each[indices[0]]
                overrides.setdefault(indices, {"layers": indices})[part] = _unset(found[part], other) | other
    return found | {"overrides": tuple(overrides.values())}


def _unset(usual: Fields, other: Fields) -> Fields:
    """Defaults of what only the usual one of the same kind gives, which an override would take from it."""
    if usual["kind"] != other["kind"]:
        return {}
    fields = _PARTS[usual["kind"]].model_fields
    return {key: fields[key].default for key in usual if key not in other}


def _hashable(fields: Fields) -> Fields:
    return {key: str(value) if isinstance(value, dict | tuple | list) else value for key, value in fields.items()}


def rope(c: Config) -> Fields:
    """Theta, share of a head that is rotated, and scaling; kept as facts, because they cost nothing."""
    parameters = c.get("rope_parameters", default={})
    parameters = parameters.get("full_attention", parameters) if isinstance(parameters, dict) else {}
    scaling = c.get("rope_scaling", default=None) or parameters
    fraction = c.get("partial_rotary_factor", "rotary_pct", "rope_pct", default=parameters.get("partial_rotary_factor"))
    return {
        "rope_theta": c.get("rope_theta", "rotary_emb_base", default=parameters.get("rope_theta", 10000.0)),
        "rotary_fraction": 1.0 if fraction is None else fraction,
        "rope_scaling": _rope_scaling(c, scaling),
    }


def _rope_scaling(c: Config, scaling: Any) -> Fields | None:
    if not isinstance(scaling, Mapping):
        raise c.unsupported("rope_scaling", "it must be an object, or null")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        return {"kind": "other", "rope_type": str(kind)}
    facts = Config(scaling, f"rope_scaling of {c.name}", c.architecture)
    return {
        "kind": "llama3",
        "factor": facts.need("factor"),
        "low_freq_factor": facts.need("low_freq_factor"),
        "high_freq_factor": facts.need("high_freq_factor"),
        "original_max_context": facts.need("original_max_position_embeddings"),
    }
