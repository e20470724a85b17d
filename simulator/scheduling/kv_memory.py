"""How many KV blocks does a device hold, and what does a sequence take besides them?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.roofline.errors import MemboundError
from membound.roofline.memory import MEMORY_SHARE, kv_bytes, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.engine import Engine
from membound.roofline.techniques import EngineSetup
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.prefix_cache import PrefixCache
from membound.simulator.scheduling.remedies import remedies

# Longer than any window, so that from here on a cache grows by its layers without one.
_BEYOND_WINDOWS = 2**26


@dataclass(frozen=True)
class KvMemory:
    """The KV memory of one engine: blocks of `block_bytes` on each of its devices, and on the host.

    What does not grow with a sequence, recurrent states and full windows, takes `fixed_blocks` of them. Where nothing
    grows, memory limits the sequences to `seats` instead.
    """

    num_blocks: int
    block_size: int
    block_bytes: float
    seats: int
    fixed_blocks: int = 0
    host_blocks: int = 0
    prefix_caching: bool = False

    def pool(self) -> BlockPool:
        """All blocks, free."""
        cache = PrefixCache(self.host_blocks) if self.prefix_caching else None
        return BlockPool(self.num_blocks, self.block_size, cache, self.host_blocks, self.fixed_blocks)


def kv_memory(scenario: Scenario, model: ModelSpec, memory_bytes: float, longest: int | None = None) -> KvMemory:
    """The engine's KV memory: blocks as given, else what a device of `memory_bytes` holds beside the weights.

    With the tokens of the `longest` request, no more blocks than its requests can use. Raises MemboundError where the
    weights leave no room for a single block, or not for as many as given.
    """
    engine, setup = scenario.engine, scenario.setup
    usable = memory_bytes * MEMORY_SHARE
    held = weights_bytes(model, setup)
    spare = usable - held
    token_bytes, fixed_bytes = _footprint(model, setup, longest or model.max_context)

    def least_cache(setup: EngineSetup) -> float:
        each, fixed = _footprint(model, setup, longest or model.max_context)
        return max(each * engine.block_size, fixed)

    if spare < least_cache(setup):
        raise MemboundError(
            f"model '{model.name}' does not fit: its weights take {held / 2**30:.1f} GiB of the "
            f"{usable / 2**30:.1f} GiB usable on '{scenario.hardware}'{remedies(model, setup, usable, least_cache)}"
        )
    block_bytes = token_bytes * engine.block_size
    seats, fixed_blocks = engine.max_num_seqs, 0
    useful_of_one = -(-_most_held(engine, longest or model.max_context, model.max_context) // engine.block_size)
    if block_bytes:
        fitting = int(spare // block_bytes)
        fixed_blocks = int(-(-fixed_bytes // block_bytes))
    else:
        seats = min(seats, int(spare // fixed_bytes)) if fixed_bytes else seats
        fitting = seats * useful_of_one
    if engine.num_blocks is not None and engine.num_blocks > fitting:
        raise MemboundError(
            f"field 'engine.num_blocks' is {engine.num_blocks}, but '{scenario.hardware}' holds at most {fitting} "
            f"blocks of {engine.block_size} tokens beside the weights of '{model.name}'"
        )
    lossy = "kv_eviction" if setup.kv_budget is not None and setup.kv_budget.evicts else setup.kv.name
    if engine.prefix_caching and (lossy == "kv_eviction" or setup.kv.window):
        raise MemboundError(
            f"field 'engine.prefix_caching' is true, but {lossy} keeps tokens of a sequence outside of blocks, where "
            "others cannot find them; set it to false, or take another technique"
        )
    if engine.prefix_caching and fixed_bytes:
        raise MemboundError(
            f"field 'engine.prefix_caching' is true, but '{model.name}' has recurrent states or windows, which blocks "
            "of tokens do not hold; set it to false"
        )
    blocks = engine.num_blocks or fitting
    if engine.num_blocks is None and longest is not None and not engine.prefix_caching:
        blocks = min(fitting, seats * (useful_of_one + fixed_blocks))
    host_blocks = int(engine.host_kv_gib * 2**30 // block_bytes) if block_bytes else 0
    return KvMemory(blocks, engine.block_size, block_bytes, seats, fixed_blocks, host_blocks, engine.prefix_caching)


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


def _footprint(model: ModelSpec, setup: EngineSetup, longest: int) -> tuple[float, float]:
    """Bytes on one device for each further token of a sequence, and besides for a sequence of `longest` tokens."""
    far = float(kv_bytes(model, setup, 2.0 * _BEYOND_WINDOWS))
    token_bytes = (far - float(kv_bytes(model, setup, 1.0 * _BEYOND_WINDOWS))) / _BEYOND_WINDOWS
    fixed_bytes = float(kv_bytes(model, setup, float(longest))) - token_bytes * longest
    return token_bytes, fixed_bytes if fixed_bytes > 1e-6 * token_bytes * longest else 0.0
