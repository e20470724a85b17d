"""How do the matrices of a divided model find each other's sums?"""

from __future__ import annotations

from torch import Tensor

from membound.roofline.models import ModelSpec
from membound.roofline.parallel import Parallelism
from membound.runtime.linear import Linear, WrappedLinear
from membound.runtime.loading.weights import Weights
from membound.runtime.parallel.group import Group
from membound.runtime.parallel.shards import Share, shard_weights
from membound.runtime.recipe import Recipe

AFTER_DIVIDED = ("o", "down")  # matrices of which each device has some inputs


class _Sharded(WrappedLinear):
    """A part of a matrix on this device."""

    def __init__(self, part: Linear, group: Group) -> None:
        super().__init__(part)
        self.group = group


class ReducedLinear(_Sharded):
    """Some columns of a matrix [n, k]: the products of all devices are summed."""

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.inner.shape
        return n, k * self.group.size

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.inner(x))


class GatheredLinear(_Sharded):
    """Some rows of a matrix [n, k]: the products of all devices are put side by side."""

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.inner.shape
        return n * self.group.size, k

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_gather(self.inner(x))


class ExactLinear(GatheredLinear):
    """The same of a matrix of whose inputs each device has some: they are gathered first."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self.group.all_gather(x))


class ShardRecipe:
    """What `inner` makes of this device's part of every matrix, with the sums and gathers that the division asks for.

    `inner` prepares the weights of the `whole` model: what it folds or rotates concerns all devices.
    """

    def __init__(self, inner: Recipe, group: Group, whole: ModelSpec, parallel: Parallelism) -> None:
        self.inner = inner
        self.group = group
        self.whole = whole
        self.parallel = parallel

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        """This device's part of the whole `weights`; `spec` is the shape of the part."""
        prepared = self.inner.prepare(self.whole, weights)
        return shard_weights(self.whole, prepared, Share(self.group.rank, self.parallel))

    def linear(self, name: str, weight: Tensor) -> Linear:
        part = self.inner.linear(name, weight)
        if name.rsplit(".", 1)[-1] in AFTER_DIVIDED and ".experts." not in name:  # a mixture is summed as a whole
            return (ExactLinear if self.parallel.exact else ReducedLinear)(part, self.group)
        gathered = self.whole.vocab % self.group.size == 0
        return GatheredLinear(part, self.group) if name == "lm_head" and gathered else part
