"""How does a decoder run whose experts lie elsewhere?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import ExpertStorage
from membound.runtime.blocks.moe import MixtureNetwork
from membound.runtime.blocks.routing import route
from membound.runtime.decoder import Decoder
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.loading.weights import Weights
from membound.runtime.offload.cache import ExpertCache, Moves
from membound.runtime.offload.place import DiskPlace, HostPlace
from membound.runtime.recipe import Recipe

_NAME = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(\w+)")
Told = Callable[[Sequence[int], Tensor], None]  # each expert's slots, and the hidden state [tokens, hidden]
MOST_FORESEEN_TOKENS = 16  # the choices of more tokens are nearly all experts


@dataclass(frozen=True)
class OffloadedLinear:
    """A matrix of an expert that is fetched before it is multiplied."""

    kernels: Kernels
    cache: ExpertCache
    expert: int
    part: str
    shape: tuple[int, int]
    nbytes: int
    emulated: bool
    whole_step: bool

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.cache.weight(self.expert, self.part))


class OffloadedExperts:
    """The experts of all layers, and as a recipe what puts those of `inner` away while a decoder is built."""

    def __init__(self, inner: Recipe, storage: ExpertStorage, kernels: Kernels, device: str) -> None:
        self.inner = inner
        self.storage = storage
        self.kernels = kernels
        self.device = torch.device(device)
        self.moves = Moves()
        self.caches: dict[int, ExpertCache] = {}
        self._place = (DiskPlace if storage.place == "disk" else HostPlace)(self.device)
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="experts")

    def placed(self, weights: Weights) -> Weights:
        """The weights with all but the experts on the device."""
        apart = [{n: t for n, t in layer.items() if _stays(n, t)} for layer in weights.layers]
        rest = tuple({n: t for n, t in layer.items() if not _stays(n, t)} for layer in weights.layers)
        moved = replace(weights, layers=rest).to(self.device)
        return replace(moved, layers=tuple(layer | own for layer, own in zip(moved.layers, apart, strict=True)))

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        return self.inner.prepare(spec, weights)

    def linear(self, name: str, weight: Tensor) -> Linear:
        found = _NAME.fullmatch(name)
        linear = self.inner.linear(name, weight.to(self.device))
        if found is None:
            return linear
        if not isinstance(linear, KernelLinear):
            raise MemboundError(
                "expert_offload moves weights that are packed in one piece, and these are not; take another format or "
                "method of weight_quantization, or leave one of the two out"
            )
        layer, expert, part = int(found[1]), int(found[2]), found[3]
        cache = self.caches.get(layer)
        if cache is None:
            capacity = self.storage.cached
            cache = ExpertCache(self._place, capacity, self.device, self._loader, self.moves)
            self.caches[layer] = cache
        cache.add(expert, part, linear.weight)
        same = linear.shape, linear.nbytes, linear.emulated, linear.whole_step
        return OffloadedLinear(self.kernels, cache, expert, part, *same)

    def attach(self, decoder: Decoder) -> None:
        """Tells the caches what the routers of a decoder choose, and of the next layer's what its router would."""
        mixtures = decoder.mixtures()
        for layer, following in zip(mixtures, [*list(mixtures)[1:], None], strict=True):
            ahead = mixtures[following] if following is not None and self.storage.prefetch else None
            mixtures[layer].chosen = self._teller(layer, following, ahead)

    def _teller(self, layer: int, following: int | None, ahead: MixtureNetwork | None) -> Told:
        def tell(counts: Sequence[int], x: Tensor) -> None:
            self.caches[layer].begin([expert for expert, count in enumerate(counts) if count])
            if ahead is not None and following is not None and x.shape[0] <= MOST_FORESEEN_TOKENS:
                guess = route(ahead.router(x), ahead.top_k, ahead.rule, ahead.router_bias).counts.tolist()
                self.caches[following].foresee([expert for expert, count in enumerate(guess) if count])

        return tell

    def reset(self) -> None:
        """Counts from here on."""
        self.moves.__init__()  # type: ignore[misc]

    def note(self) -> str:
        """What the experts' moves came to in this process since the last `reset`, in one sentence."""
        moves = self.moves
        return (
            f"experts: {moves.hit_rate:.0%} of {moves.hits + moves.misses} were there when they were chosen "
            f"({self.storage.cached} of a layer are kept), {moves.foreseen} came before; {moves.bytes / 1e6:.1f} MB "
            f"moved from the {self.storage.place}, {moves.stalled_s:.2f} s waited for them"
        )


def _stays(name: str, tensor: Tensor) -> bool:
    """Whether it is a matrix of a routed expert."""
    return name.startswith("experts.") and tensor.dim() == 2
