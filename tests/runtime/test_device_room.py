"""A GPU holds the engine that is asked for: what others left there goes where it is in the way, and only there."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.roofline.models.files import resolve_model  # noqa: E402
from membound.roofline.scenario import Scenario, parse_scenario  # noqa: E402
from membound.runtime import decoders as loading  # noqa: E402
from membound.runtime.decoders import DeviceModels  # noqa: E402
from membound.runtime.device_room import cache_room  # noqa: E402
from membound.simulator.scheduling.kv_memory import KvMemory, kv_memory  # noqa: E402

H200_BYTES = 141e9
WEIGHTS = {"bf16": (), "int8": ("int8_weights",)}


def scenario(*techniques: str, **engine: object) -> Scenario:
    return parse_scenario(
        {
            "name": "beside-others",
            "model": "Llama-3.1-8B",
            "hardware": "H200",
            "techniques": list(techniques),
            "engine": {"max_num_seqs": 32, **engine},
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 32},
                "requests": 64,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 1024}},
                "output_tokens": {"kind": "fixed", "tokens": 128},
            },
        }
    )


class OnGpu(DeviceModels):
    """Decoders of so many bytes on a GPU that holds `capacity` bytes of weights."""

    def __init__(self, capacity: float = float("inf")) -> None:
        super().__init__("cuda", TorchKernels())
        self.capacity = capacity
        self.built: list[str] = []

    def _built(self, scenario: Scenario) -> SimpleNamespace:  # type: ignore[override]
        nbytes = int(8e9 if scenario.techniques else 16e9)
        if self.held_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.built.append(str([technique.name for technique in scenario.techniques]))
        empty = torch.empty(0)
        return SimpleNamespace(weight_bytes=nbytes, embed=empty, spec=resolve_model("Llama-3.1-8B"))

    @property
    def held_bytes(self) -> int:
        return sum(decoder.weight_bytes for decoder in self._decoders.values())


@pytest.fixture(autouse=True)
def emptied(monkeypatch):
    """How often the allocator was told to give back what nobody holds."""
    calls: list[None] = []
    monkeypatch.setattr(loading.torch.cuda, "empty_cache", lambda: calls.append(None))
    return calls


def room(decoders: DeviceModels, asked: Scenario, tokens: int = 1152, turns: int = 64) -> KvMemory:
    spec = decoders.decoder(asked).spec
    return cache_room(
        decoders, asked, H200_BYTES, partial(kv_memory, asked, spec, longest=tokens, turns=[tokens] * turns)
    )


def test_a_prefix_cache_of_a_few_requests_leaves_the_others_weights_where_they_are():
    """It took all that the device had beside one engine's weights, and the next engine's had no place."""
    decoders = OnGpu()
    decoders.decoder(scenario("int8_weights"))
    memory = room(decoders, scenario(prefix_caching=True))
    assert memory.num_blocks * memory.block_bytes + 24e9 < H200_BYTES / 2
    assert decoders.held_bytes == 24e9


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_engine_that_needs_all_of_a_gpu_gets_what_it_would_alone(emptied, prefix_caching):
    """So that what is measured is what was predicted, which knows of no engine but this."""
    asked = scenario(prefix_caching=prefix_caching, max_num_seqs=32 if prefix_caching else 4096)
    alone = room(OnGpu(), asked, 100_000)
    decoders = OnGpu()
    decoders.decoder(scenario("int8_weights"))
    assert room(decoders, asked, 100_000) == alone
    assert decoders.held_bytes == 16e9 and emptied
    assert alone.num_blocks * alone.block_bytes + 16e9 > 0.85 * H200_BYTES


def test_weights_that_have_no_place_beside_others_take_theirs():
    decoders = OnGpu(capacity=20e9)
    for techniques in ((), ("int8_weights",), ("int8_weights",), ()):
        decoders.decoder(scenario(*techniques))
    assert decoders.built == ["[]", "['int8_weights']", "[]"] and decoders.held_bytes == 16e9
    with pytest.raises(torch.OutOfMemoryError):
        OnGpu(capacity=1e9).decoder(scenario())


@given(
    tokens=st.lists(st.integers(1, 4000), min_size=1, max_size=40),
    seats=st.integers(1, 8),
    block_size=st.sampled_from([1, 16, 64]),
)
def test_a_prefix_cache_has_room_for_all_that_requests_leave_and_for_those_that_run(tokens, seats, block_size):
    """No block that it keeps is ever taken for another request, which is what more memory would be for."""
    asked = scenario(prefix_caching=True, max_num_seqs=seats, block_size=block_size)
    spec = resolve_model("Llama-3.1-8B")
    whole = kv_memory(asked, spec, H200_BYTES)
    memory = kv_memory(asked, spec, H200_BYTES, longest=max(tokens), turns=tokens)
    left, running = sum(-(-n // block_size) for n in tokens), seats * -(-max(tokens) // block_size)
    assert memory.num_blocks == min(whole.num_blocks, left + running)
