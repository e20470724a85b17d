"""Which model drafts for another?"""

from __future__ import annotations

from functools import lru_cache

from membound.roofline.errors import MemboundError
from membound.roofline.models import GatedFfn, ModelSpec, MoeFfn, catalog
from membound.roofline.models.files import resolve_model
from membound.roofline.models.layers import LayerOverride

# Vocabularies differ by padding within a family; by more than this they are not the same.
_SAME_VOCABULARY = 0.02


def draft_model(model: ModelSpec, name: str | None) -> ModelSpec:
    """The model that drafts for `model`: the one of that name, else the smallest of its family.

    Guesses are tokens of both, so that only models of one tokenizer draft for each other. Raises MemboundError where
    the tokenizers differ, where it is the larger one, or where the family has no smaller model.
    """
    if name is None:
        return _smallest_of_family(model)
    draft = resolve_model(name)
    if draft.params > model.params:
        raise MemboundError(
            f"draft is '{draft.name}' of {draft.params / 1e9:.3g} billion parameters, more than the "
            f"{model.params / 1e9:.3g} of '{model.name}'; give a smaller model"
        )
    if not _same_tokenizer(draft, model):
        raise MemboundError(
            f"draft is '{draft.name}', whose vocabulary has {draft.vocab} tokens, but that of '{model.name}' has "
            f"{model.vocab}; give a model with the same tokenizer, one of {model.tokenizer_family}"
        )
    return draft


def first_layers(model: ModelSpec, layers: int | None) -> ModelSpec:
    """The model cut behind its first layers, three quarters of them unless said otherwise.

    Raises MemboundError where that leaves none out.
    """
    layers = max(1, model.layers * 3 // 4) if layers is None else layers
    if layers >= model.layers:
        raise MemboundError(
            f"field 'layers' of self_speculation is {layers}, but '{model.name}' has {model.layers} layers; give fewer"
        )
    kept = enumerate(model.stack[:layers])
    usual = (model.usual_attention, model.usual_ffn)
    overrides = tuple(
        LayerOverride(layers=(index,), attention=layer.attention, ffn=layer.ffn)
        for index, layer in kept
        if (layer.attention, layer.ffn) != usual
    )
    changes = {"name": f"{model.name}, first {layers} layers", "layers": layers, "overrides": overrides}
    return model.model_copy(update=changes)


def _same_tokenizer(a: ModelSpec, b: ModelSpec) -> bool:
    """Of one family and as many tokens but for padding; of what is called otherwise, exactly as many."""
    if a.tokenizer_family != b.tokenizer_family:
        return a.vocab == b.vocab
    return _differ_by_padding(a, b)


def _differ_by_padding(a: ModelSpec, b: ModelSpec) -> bool:
    return abs(a.vocab - b.vocab) <= _SAME_VOCABULARY * min(a.vocab, b.vocab)


@lru_cache(maxsize=64)
def _smallest_of_family(model: ModelSpec) -> ModelSpec:
    """The smallest model of the catalog with the same tokenizer, of at most a quarter of its size."""
    family = [spec for spec in catalog().values() if spec.tokenizer_family == model.tokenizer_family]
    smaller = [spec for spec in family if _differ_by_padding(spec, model) and spec.params * 4 <= model.params]
    if not smaller:
        raise MemboundError(
            f"the catalog has no model of the family of '{model.name}' with the same tokenizer and at most a quarter "
            "of its size; name one in draft"
        )
    return min(smaller, key=lambda spec: spec.params)


def one_layer(model: ModelSpec, *, dense: bool) -> ModelSpec:
    """A model of one layer as the last one of `model`; `dense` gives a mixture's as wide as its active experts."""
    attention, ffn = model.stack[-1]
    if dense and isinstance(ffn, MoeFfn):
        ffn = GatedFfn(intermediate=ffn.top_k * ffn.intermediate + ffn.shared_intermediate)
    changes = {"layers": 1, "overrides": (), "attention": attention, "ffn": ffn}
    return model.model_copy(update={"name": f"{model.name} drafter"} | changes)
