"""A drafter's steps are captured too: the same guesses as kernel by kernel, by replays, in memory without logits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.roofline.models import ModelSpec  # noqa: E402
from membound.runtime import cuda_graphs  # noqa: E402
from membound.runtime.cuda_graphs import CudaCapture, DecodeGraphs, DraftStep, decode_graphs  # noqa: E402
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.loading.weights import random_weights  # noqa: E402
from membound.runtime.ragged import Part, ragged_batch  # noqa: E402
from membound.runtime.speculation.base import Chooser  # noqa: E402
from membound.runtime.speculation.eagle import EagleProposer, FeatureHead  # noqa: E402
from membound.runtime.speculation.heads import random_head  # noqa: E402
from membound.runtime.speculation.model import ModelProposer  # noqa: E402
from membound.simulator.scheduling.drafter import Room  # noqa: E402
from membound.simulator.scheduling.request import Request, Sequence, Step, Work  # noqa: E402

SIZE, DEPTH = 8, 3
SPEC = ModelSpec(
    name="tiny",
    layers=2,
    hidden=32,
    vocab=64,
    attention={"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 16},
    ffn={"kind": "gated", "intermediate": 48},
    tie_embeddings=False,
    max_context=64,
    source="a test",
)
PROMPTS = {0: [3, 9, 27, 17, 51], 1: [5, 11, 7]}


class Counting:
    """Stands for a capture: calls again, and remembers what each graph keeps."""

    def __init__(self, device):
        self.real = CudaCapture(device) if device.type == "cuda" else None
        self.kept = []
        self.replays = 0

    def __call__(self, run):
        self.kept.append(run())
        again = self.real(run) if self.real else run

        def replay():
            self.replays += 1
            return again()

        return replay


@pytest.fixture
def captured(monkeypatch, device):
    """Makes `decode_graphs` capture, whatever the device is."""
    counting = Counting(device)

    def graphs_of(decoder, kv, max_blocks, max_num_seqs, guesses=0, drafting=None):
        queries = drafting.tokens
        return DecodeGraphs(
            decoder, kv, max_blocks, [1, max_num_seqs], counting, queries=queries, drafting=drafting
        ), "drafts by graphs"

    for module in ("model", "eagle"):
        monkeypatch.setattr(f"membound.runtime.speculation.{module}.decode_graphs", graphs_of)
    return counting


@pytest.fixture(scope="module")
def weights(device):
    return random_weights(SPEC, seed=4).to(device)


def sequences_of():
    """Each has one newest token that is not computed, in blocks of its own."""
    found = []
    for number, ids in PROMPTS.items():
        sequence = Sequence(Request(number, 0.0, len(ids), 20, tuple(ids)), list(ids))
        sequence.blocks = [2 * number, 2 * number + 1]
        sequence.standing_computed = len(ids) - 1
        found.append(sequence)
    return found


def prefilled(decoder, kv):
    """K and V of all but the newest tokens, and the model's states there."""
    parts = [Part(0, len(ids) - 1, [2 * number, 2 * number + 1]) for number, ids in PROMPTS.items()]
    ids = torch.tensor([token for ids in PROMPTS.values() for token in ids[:-1]], device=decoder.device)
    return decoder.hidden(ids, ragged_batch(parts, SIZE).to(decoder.device), kv).normed


@pytest.mark.parametrize("layers", [None, 1])
def test_a_draft_model_and_a_models_first_layers_guess_the_same_from_graphs(layers, weights, captured, device):
    decoder = Decoder(SPEC, weights, TritonKernels(device.type), "bf16")
    drafts = []
    for graphs in (False, True):
        kv = decoder.new_cache(4, SIZE)
        if layers is not None:
            prefilled(decoder, kv)
        proposer = ModelProposer(decoder, kv, SIZE, DEPTH, Chooser(0.0, 1, device), layers)
        if graphs:
            assert proposer.capture(2, 2) == "drafts by graphs"
        drafts.append(proposer.draft(sequences_of(), [Room(DEPTH, DEPTH)] * 2))
    assert drafts[0] == drafts[1] and all(len(draft.tokens) == DEPTH for draft in drafts[0])
    assert captured.replays == (DEPTH if layers else DEPTH - 1)  # a draft model reads the prompts kernel by kernel
    assert all(kept.shape[-1] == SPEC.hidden for kept in captured.kept)


@pytest.mark.parametrize("guesses", [DEPTH, 7])
def test_a_layer_that_continues_states_guesses_the_same_from_graphs(guesses, weights, captured, device):
    kernels = TritonKernels(device.type)
    decoder = Decoder(SPEC, weights, kernels, "bf16")
    normed = prefilled(decoder, decoder.new_cache(4, SIZE))
    head = FeatureHead(random_head("eagle", SPEC, 1, 60, seed=2), SPEC, weights, kernels)
    drafts = []
    for graphs in (False, True):
        proposer = EagleProposer(head, 4, SIZE, DEPTH, guesses, -(-guesses // DEPTH))
        if graphs:
            assert proposer.capture(2, 2) == "drafts by graphs"
        works = tuple(Work(number, 0, len(ids) - 1) for number, ids in PROMPTS.items())
        step = Step(*[None] * len(Step._fields))._replace(work=works)
        proposer.observe(step, PROMPTS, normed, {})
        drafts.append(proposer.draft(sequences_of(), [Room(DEPTH, 40)] * 2))
    assert drafts[0] == drafts[1] and all(len(draft.tokens) == guesses for draft in drafts[0])
    assert captured.replays == DEPTH
    assert all(kept.shape[-1] == SPEC.hidden for kept in captured.kept)


def test_a_drafters_note_says_what_was_captured_or_why_nothing_was(weights, monkeypatch, device):
    decoder = Decoder(SPEC, weights, TritonKernels(device.type), "bf16")
    kv = decoder.new_cache(4, SIZE)
    monkeypatch.setattr(decoder, "device", torch.device("cpu"))
    assert decode_graphs(decoder, kv, 2, 4, drafting=DraftStep()) == (None, None)
    made = []

    class Graphs:
        buckets = (1, 2, 4)

        def __init__(self, *arguments, **options):
            made.append(options)

    monkeypatch.setattr(decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(cuda_graphs, "DecodeGraphs", Graphs)
    _, note = decode_graphs(decoder, kv, 2, 4, drafting=DraftStep((1, 9, 4, 200)))
    assert note == "drafts by CUDA graphs for batches of 1, 2, 4, each also with up to 64 tokens a sequence"
    assert made[0]["queries"] == (1, 4, 9, 64)

    def fails(*arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_graphs, "DecodeGraphs", fails)
    _, note = decode_graphs(decoder, kv, 2, 4, drafting=DraftStep())
    assert note == "drafts without CUDA graphs: the capture failed (out of memory)"
