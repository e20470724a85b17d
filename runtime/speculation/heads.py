"""What is a trained draft head, and where does it lie?

A head is a safetensors file of bf16 matrices whose metadata say for which model it was trained, how, and what was
accepted. It shares the embedding and the lm_head with its model, of which it reads only the rows of the tokens that the
model writes most (`tokens`): drafting then costs a fraction of the lm_head, and a token outside is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.speculation.draft_models import one_layer
from membound.runtime.loading.weights import random_weights

KINDS = ("medusa", "eagle")


class HeadError(MemboundError):
    """A draft head that is missing, unreadable or made for another model."""


@dataclass(frozen=True)
class Head:
    """The tensors of a head by name, `tokens` among them, and what its file says about it."""

    kind: str
    tensors: dict[str, Tensor]
    about: dict[str, str]

    @property
    def tokens(self) -> Tensor:
        """The tokens that it can guess, [guessable] int64."""
        return self.tensors["tokens"].long()

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all: matrices in bf16, norms in fp32."""
        kept = {
            name: (tensor.bfloat16() if tensor.ndim > 1 else tensor).contiguous().cpu()
            for name, tensor in self.tensors.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(kept, partial, metadata={"kind": self.kind} | self.about)
        partial.replace(path)


def load_head(path: Path, kind: str, spec: ModelSpec) -> Head:
    """Reads the head of a kind for a model; raises HeadError with one sentence about what is wrong."""
    try:
        with safe_open(path, framework="pt") as file:
            about: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise HeadError(f"draft head '{path}' cannot be read as safetensors: {error}") from None
    if about.get("kind") != kind:
        raise HeadError(f"draft head '{path}' is of kind {about.get('kind')!r}, but the technique asks for '{kind}'")
    hidden, tokens = _hidden(kind, tensors), tensors.get("tokens", torch.zeros(0))
    if hidden != spec.hidden or tokens.numel() == 0 or int(tokens.max()) >= spec.vocab:
        raise HeadError(
            f"draft head '{path}' was made for '{about.get('model')}' with {hidden} hidden values, which '{spec.name}' "
            f"with {spec.hidden} of them and {spec.vocab} tokens is not"
        )
    if not all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values()):
        raise HeadError(f"draft head '{path}' has values that are no numbers; train it again")
    return Head(kind, tensors, dict(about))


def _hidden(kind: str, tensors: Mapping[str, Tensor]) -> int:
    first = tensors.get("heads.0" if kind == "medusa" else "join")
    return 0 if first is None else first.shape[0]


def shipped_head(kind: str, spec: ModelSpec) -> Path:
    """The file of the head that comes with membound for a model; raises HeadError where there is none."""
    path = Path(str(resources.files("membound.data"))) / "drafts" / f"{spec.name.lower()}-{kind}.safetensors"
    if not path.is_file():
        raise HeadError(
            f"there is no trained head of kind '{kind}' for '{spec.name}'; train one with `membound train-draft` and "
            f"name its file in the technique's field 'head', or set the scenario's weights to 'random'"
        )
    return path


def random_head(kind: str, spec: ModelSpec, heads: int, guessable: int, seed: int) -> Head:
    """A head of the right shape that guesses at random, for models with random weights."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator) * k**-0.5

    tokens = torch.arange(min(guessable, spec.vocab), dtype=torch.int32)
    if kind == "medusa":
        listed = {f"heads.{index}": matrix(spec.hidden, spec.hidden) for index in range(heads)}
        return Head(kind, {"tokens": tokens} | listed, {})
    (layer,) = random_weights(one_layer(spec, dense=kind != "mtp"), seed, layers=1).layers
    norms = {name: torch.ones(spec.hidden) for name in ("embed_norm", "hidden_norm", "final_norm")}
    return Head(kind, {"tokens": tokens, "join": matrix(spec.hidden, 2 * spec.hidden)} | norms | layer, {})
