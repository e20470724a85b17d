"""Heads learn what the model writes; a training that was stopped goes on; a damaged or foreign head is refused."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import random_weights
from membound.runtime.plain import generate_plain
from membound.runtime.speculation.corpus import Text, write_texts
from membound.runtime.speculation.heads import HeadError, load_head, random_head
from membound.runtime.speculation.training import TrainingPlan, train

TOKENS = 16


@pytest.fixture(scope="module")
def spec(model):
    return resolve_model(str(model))


@pytest.fixture(scope="module")
def weights(spec):
    return random_weights(spec, seed=0)


@pytest.fixture(scope="module")
def decoder(spec, weights):
    return Decoder(spec, weights, kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def texts(decoder) -> list[Text]:
    rng = random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(2, 6))] for _ in range(60)]
    return write_texts(decoder, prompts, TOKENS, seed=1)


def ticking(seconds: float):
    """A clock on which every look takes so long."""
    return itertools.count(0.0, seconds).__next__


def quiet(fraction: float, message: str) -> None:
    pass


def test_the_model_writes_its_own_greedy_tokens_and_keeps_the_states_that_led_to_them(decoder, texts):
    for text in texts[:3]:
        prompt, written = text.token_ids[: text.prompt_tokens].tolist(), text.token_ids[text.prompt_tokens :].tolist()
        assert written == list(generate_plain(decoder, prompt, TOKENS))
        assert text.hidden.shape[0] == len(text.token_ids) - 1
    agreed = total = 0
    for text in texts[:30]:  # the greedy half; states are kept in bf16
        said = decoder.logits(text.hidden[text.prompt_tokens - 1 :].float()).argmax(-1)
        agreed += int((said == text.token_ids[text.prompt_tokens :]).sum())
        total += len(said)
    assert agreed > 0.95 * total


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_learns_and_drafts_for_its_model(kind, spec, weights, texts, tmp_path, runtime, scenario_of):
    head = train(TrainingPlan(kind, 60.0, tmp_path), spec, weights, texts, quiet, ticking(0.25))
    lines = [json.loads(line) for line in (tmp_path / f"{kind}.log.jsonl").read_text().splitlines()]
    assert len(lines) > 3
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["agreement_by_position"][0] > 0.3  # a random guess is right once in 61

    path = tmp_path / "head.safetensors"
    head.save(path)
    kept = load_head(path, kind, spec)
    assert torch.equal(kept.tokens, head.tokens)
    size = {"heads": 2, "tree_size": 4} if kind == "medusa" else {"depth": 2, "tree_size": 4}
    trained, guessing = (
        runtime.run(scenario_of({"name": kind, **size, **fields}), get_hardware("H100-SXM5"))
        for fields in ({"head": str(path)}, {})
    )
    assert trained.outputs == guessing.outputs
    assert trained.steps["accepted"].sum() > guessing.steps["accepted"].sum()


def test_a_training_that_was_stopped_goes_on_where_it_was(spec, weights, texts, tmp_path):
    train(TrainingPlan("medusa", 20.0, tmp_path), spec, weights, texts, quiet, ticking(0.5))
    seen: list[float] = []
    train(TrainingPlan("medusa", 40.0, tmp_path), spec, weights, texts, lambda done, _: seen.append(done), ticking(0.5))
    assert min(seen) >= 0.5
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "medusa.log.jsonl").read_text().splitlines()]
    assert epochs == sorted(set(epochs))
    with pytest.raises(MemboundError, match="was trained on other texts"):
        others = [text for text in texts if 7 not in text.token_ids.tolist()]
        others = [Text((text.token_ids % 13), text.hidden, text.prompt_tokens) for text in (*others, *texts)]
        train(TrainingPlan("medusa", 60.0, tmp_path), spec, weights, others, quiet, ticking(0.1))


def test_too_few_texts_are_refused(spec, weights, texts, tmp_path):
    with pytest.raises(MemboundError, match="10 texts are too few"):
        train(TrainingPlan("medusa", 1.0, tmp_path), spec, weights, texts[:10], quiet)


def test_a_head_that_does_not_fit_is_refused_in_one_sentence(spec, tmp_path):
    path = tmp_path / "head.safetensors"
    random_head("medusa", spec, 2, 61, seed=0).save(path)
    with pytest.raises(HeadError, match="is of kind 'medusa', but the technique asks for 'eagle'"):
        load_head(path, "eagle", spec)
    with pytest.raises(HeadError, match="with 32 hidden values"):
        load_head(path, "medusa", resolve_model("SmolLM2-135M"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadError, match="cannot be read as safetensors"):
        load_head(path, "medusa", spec)
