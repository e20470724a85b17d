"""How many KV blocks does a device hold, and what does a sequence take besides them?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.memory import CacheTerms
from membound.roofline.models import ModelSpec
from membound.roofline.remedies import remedies
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.engine import Engine
from membound.roofline.techniques import EngineSetup
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.prefix_cache import PrefixCache


@dataclass(frozen=True)
class KvMemory:
    """The KV memory of one engine: blocks of `block_bytes` on each device of one of its data-parallel `ranks`, as many
    on each rank, and `host_blocks` beside each on the host.

    What does not grow with a sequence, recurrent states and windows that requests fill, takes `fixed_blocks` of them.
    Where nothing grows, memory limits the sequences to `seats` instead. Blocks and seats are those of all ranks.
    """

    num_blocks: int
    block_size: int
    block_bytes: float
    seats: int
    fixed_blocks: int = 0
    host_blocks: int = 0
    prefix_caching: bool = False
    ranks: int = 1

    def pools(self) -> tuple[BlockPool, ...]:
        """The blocks of each rank, all free."""
        return tuple(self._pool() for _ in range(self.ranks))

    def _pool(self) -> BlockPool:
        cache = PrefixCache(self.host_blocks) if self.prefix_caching else None
        return BlockPool(self.num_blocks // self.ranks, self.block_size, cache, self.host_blocks, self.fixed_blocks)


def kv_memory(
    scenario: Scenario,
    model: ModelSpec,
    memory_bytes: float,
    longest: int | None = None,
    reach: int | None = None,
    turns: Iterable[int] = (),
) -> KvMemory:
    """The engine's KV memory: blocks as given, else what a device of `memory_bytes` holds beside all weights.

    With the tokens of the `longest` request, no more blocks than its requests can use; a prefix cache keeps those of
    requests that have ended, so also with the tokens of all `turns` no more than these and its requests together. No
    request has more than `reach` tokens, the longest or what the model takes without it. Raises MemboundError where the
    weights leave no room for a single block, or not for as many as given.
    """
    engine, setup = scenario.engine, scenario.setup
    reach = longest or reach or model.max_context
    held = Footprint.of(model, setup, scenario.limits)
    room, spare = held.usable_bytes(memory_bytes), held.room(memory_bytes)
    token_bytes, fixed_bytes = _growth(held.cache, reach)

    def least_cache(held: Footprint) -> float:
        each, fixed = _growth(held.cache, reach)
        return max(each * engine.block_size, fixed)

    if spare < least_cache(held):
        drafter = ", its drafter's among them," if held.drafter_weights_bytes else ""
        raise MemboundError(
            f"model '{model.name}' does not fit: its weights take {held.weights_bytes / 2**30:.1f} GiB{drafter} of the "
            f"{room / 2**30:.1f} GiB that weights and caches may take of the {memory_bytes / 2**30:.1f} GiB of "
            f"'{scenario.hardware}'"
            f"{remedies(model, setup, memory_bytes, least_cache, scenario.limits)}"
        )
    block_bytes = token_bytes * engine.block_size
    seats, fixed_blocks, ranks = scenario.seats, 0, setup.parallel.dp

    def blocks_of(tokens: int) -> int:
        return -(-_most_held(engine, tokens, model.max_context) // engine.block_size)

    useful_of_one = blocks_of(reach)
    if block_bytes:
        fitting = int(spare // block_bytes)
        fixed_blocks = int(-(-fixed_bytes // block_bytes))
    else:
        seats = min(seats, ranks * int(spare // fixed_bytes)) if fixed_bytes else seats
        fitting = -(-seats // ranks) * useful_of_one
    _check_blocks(scenario, model, fitting)
    if engine.prefix_caching:
        _check_prefix_caching(model, setup, held.cache)
    blocks = engine.num_blocks // ranks if engine.num_blocks is not None else fitting
    cached = sum(map(blocks_of, turns)) if engine.prefix_caching else 0
    if engine.num_blocks is None and longest is not None and (cached or not engine.prefix_caching):
        blocks = min(fitting, -(-seats // ranks) * (useful_of_one + fixed_blocks) + cached)
    host_blocks = int(engine.host_kv_gib * 2**30 // block_bytes) if block_bytes else 0
    return KvMemory(
        ranks * blocks,
        engine.block_size,
        block_bytes,
        seats,
        fixed_blocks,
        host_blocks,
        engine.prefix_caching,
        ranks,
    )


def _check_blocks(scenario: Scenario, model: ModelSpec, fitting: int) -> None:
    """Raises MemboundError where the engine names fewer blocks than its ranks need, or more than `fitting` on each."""
    named, ranks = scenario.engine.num_blocks, scenario.parallel.dp
    if named is None:
        return
    if named < ranks:
        raise MemboundError(
            f"field 'engine.num_blocks' is {named}, but each of the {ranks} ranks of parallel.dp needs "
            f"blocks of its own; give at least {ranks}"
        )
    if named > ranks * fitting:
        raise MemboundError(
            f"field 'engine.num_blocks' is {named}, but '{scenario.hardware}' holds at most "
            f"{ranks * fitting} blocks of {scenario.engine.block_size} tokens beside the weights of '{model.name}'"
        )


def _check_prefix_caching(model: ModelSpec, setup: EngineSetup, cache: CacheTerms) -> None:
    """Raises MemboundError where what a sequence holds is not all in blocks, which others could share."""
    lossy = "kv_eviction" if setup.kv_budget is not None and setup.kv_budget.evicts else setup.kv.name
    if lossy == "kv_eviction" or setup.kv.window:
        raise MemboundError(
            f"field 'engine.prefix_caching' is true, but {lossy} keeps tokens of a sequence outside of blocks, where "
            "others cannot find them; set it to false, or take another technique"
        )
    if cache.state_bytes or any(window for _, window in cache.per_token):
        raise MemboundError(
            f"field 'engine.prefix_caching' is true, but '{model.name}' has recurrent states or windows, which blocks "
            "of tokens do not hold; set it to false"
        )


def _most_held(engine: Engine, longest: int, max_context: int) -> int:
    """Tokens for which a request of up to `longest` takes blocks at most."""
    rounded = 2 if engine.kv_allocator == "buddy" else 1
    match engine.reserved_tokens:
        case int(reserved):
            return max(longest, reserved) * rounded
        case "pow2":
            return min(2 * longest, max_context) * rounded
        case _:
            return longest * rounded


def _growth(cache: CacheTerms, reach: int) -> tuple[float, float]:
    """Bytes on one device for each token of a sequence of up to `reach` tokens, and for a sequence besides.

    A window that no sequence can fill is none. Others are taken whole, also by sequences that do not fill them.
    """
    growing = sum(each for each, window in cache.per_token if window is None or window >= reach)
    windows = sum(each * window for each, window in cache.per_token if window is not None and window < reach)
    return growing, cache.state_bytes + windows
