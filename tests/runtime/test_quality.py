"""Quality is what it says: text that nothing was calibrated on, perplexities and divergences that can be checked."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membound.kernels.reference import TorchKernels
from membound.roofline.errors import MemboundError
from membound.roofline.models import get_model
from membound.roofline.results.comparison import Quality
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import load_safetensors, random_weights
from membound.runtime.plain import single_sequence
from membound.runtime.quality import decoding, retrieval
from membound.runtime.quality.decoding import read_decoding
from membound.runtime.quality.divergence import DECODED, MOST_READ, judged_context
from membound.runtime.quality.reading import ROWS, perplexity, read
from membound.runtime.quality.texts import calibration_windows, documents, windows
from membound.runtime.tokenizer import Tokenizer


class ExactKernels(TorchKernels):
    kv_dtype = torch.float32


@pytest.fixture(scope="module")
def tiny(reference: Path) -> tuple[Decoder, Decoder, list[int]]:
    """A model, the same with a table of zeros as its head, so that it knows nothing, and a text."""
    spec, weights = load_safetensors(reference / "tiny_llama3")
    blank = replace(weights, lm_head=torch.zeros_like(weights.lm_head))
    ids = json.loads((reference / "tiny_llama3" / "expected.json").read_text(encoding="utf-8"))["ids"]
    return Decoder(spec, weights, ExactKernels(), "fp32"), Decoder(spec, blank, ExactKernels(), "fp32"), ids


@pytest.mark.parametrize("kind", ["english", "code"])
def test_no_paragraph_that_is_judged_was_calibrated_on(kind) -> None:
    judged = {part.strip() for text in documents(kind, "evaluation") for part in text.split("\n\n")}
    seen = {part.strip() for text in documents(kind, "calibration") for part in text.split("\n\n")}
    assert not (judged & seen) - {""}
    assert min(sum(map(len, documents(kind, use))) for use in ("calibration", "evaluation")) > 100_000


def test_windows_are_spread_equally_long_and_named_by_a_digest(tokenizer: Tokenizer) -> None:
    some, more = (windows(tokenizer, "english", "evaluation", tokens) for tokens in (1024, 2048))
    assert {len(ids) for ids in more.token_ids} == {512} and more.tokens == 2048
    assert len(set(more.token_ids)) == 4
    assert some.digest != more.digest and more == windows(tokenizer, "english", "evaluation", 2048)
    assert more.digest in more.words
    assert sum(map(len, calibration_windows(tokenizer, 2048))) == 2048
    with pytest.raises(MemboundError, match="1000000000 tokens of english text"):
        windows(tokenizer, "english", "evaluation", 10**9)


def test_who_knows_nothing_is_as_perplexed_as_the_vocabulary_is_large(tiny) -> None:
    plain, blank, ids = tiny
    assert perplexity(blank, [ids]) == pytest.approx(plain.spec.vocab, rel=1e-4)


def test_perplexity_is_that_of_the_text_with_all_logits_at_once(tiny) -> None:
    decoder, _, ids = tiny
    texts = [ids, ids[:7]]
    nats = 0.0
    for text in texts:
        blocks = -(-len(text) // 16)
        batch = single_sequence(0, len(text), blocks, decoder.device)
        rows = torch.arange(len(text))
        logits = decoder.forward(torch.tensor(text), batch, decoder.new_cache(blocks, 16), rows)
        nats += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:]), reduction="sum"))
    expected = math.exp(nats / (len(ids) - 1 + 6))
    assert perplexity(decoder, texts) == pytest.approx(expected, rel=1e-4)
    assert read(decoder, decoder, texts).perplexity == pytest.approx(expected, rel=1e-4)


def test_a_model_does_not_differ_from_itself_and_does_from_another(tiny) -> None:
    plain, blank, ids = tiny
    same = read(plain, plain, [ids])
    assert same.kl_nats == 0 and same.top1_agreement == 1 and same.tokens == len(ids)
    assert same.perplexity == same.perplexity_before
    other = read(plain, blank, [ids])
    # KL from the uniform distribution is log(vocab) less the entropy, so between 0 and log(vocab)
    assert 0 < other.kl_nats <= math.log(plain.spec.vocab)
    assert other.perplexity == pytest.approx(plain.spec.vocab, rel=1e-4)


def test_decoding_is_judged_by_the_second_half_of_each_text(tiny) -> None:
    plain, blank, ids = tiny
    text = ids[: len(ids) // 2 * 2]
    found = read_decoding(plain, blank, [text, text])
    nats = math.log(perplexity(plain, [text])) * (len(text) - 1)
    first = math.log(perplexity(plain, [text[: len(text) // 2]])) * (len(text) // 2 - 1)
    assert found.tokens == len(text)
    assert math.log(found.perplexity_before) == pytest.approx((nats - first) / (len(text) // 2), rel=1e-4)
    assert found.perplexity == pytest.approx(plain.spec.vocab, rel=1e-4)


def test_who_gives_a_text_no_chance_is_infinitely_perplexed_however_it_reads(tiny, reference: Path) -> None:
    plain, _, ids = tiny
    spec, weights = load_safetensors(reference / "tiny_llama3")
    sure = Decoder(spec, replace(weights, lm_head=weights.lm_head * 1e6), ExactKernels(), "fp32")
    text = ids[: len(ids) // 2 * 2]
    assert read(plain, sure, [text]).perplexity == math.inf
    assert read_decoding(plain, sure, [text]).perplexity == math.inf


def test_long_texts_are_read_in_pieces() -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"vocab": 64})
    weights = random_weights(spec, seed=0, layers=1)
    decoder = Decoder(spec, weights, ExactKernels(), "fp32")
    text = torch.randint(0, 64, (2 * ROWS + 40,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = -(-len(text) // 16)
    batch = single_sequence(0, len(text), blocks, decoder.device)
    logits = decoder.forward(torch.tensor(text), batch, decoder.new_cache(blocks, 16), torch.arange(len(text)))
    expected = math.exp(float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:]))))
    assert perplexity(decoder, [text]) == pytest.approx(expected, rel=1e-4)


def test_older_records_of_quality_can_still_be_read() -> None:
    older = Quality.model_validate({"kl_nats": 0.1, "top1_agreement": 0.9, "tokens": 10, "against": "bf16 weights"})
    assert older.perplexity is None and older.text is None


def test_decoding_is_judged_behind_any_prompt_and_the_unmodified_model_reads_once(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, blank, ids = tiny
    texts, prompt = [ids, ids[::-1]], 3
    expected = read_decoding(plain, blank, texts, prompt)
    assert expected.tokens == 2 * (len(ids) - prompt)
    passes = []
    forward = plain.forward
    monkeypatch.setattr(plain, "forward", lambda *given: passes.append(1) or forward(*given))
    assert read_decoding(plain, blank, texts, prompt) == expected and not passes
    monkeypatch.setattr(decoding, "MOST_KEPT_BYTES", 0)
    assert read_decoding(plain, blank, texts, prompt + 1).tokens == expected.tokens - 2 and passes


@given(budget=st.integers(2, 100_000), longest=st.integers(1024, 131_072))
def test_a_budget_is_judged_where_there_are_more_tokens_than_it_keeps(budget: int, longest: int) -> None:
    context = judged_context(budget, longest)
    assert 0 < context < longest
    price = Quality(kl_nats=0, top1_agreement=1, tokens=1, against="bf16 cache", context=context, budget=budget)
    assert price.exceeded == (budget < min(longest - DECODED, MOST_READ))
    if 4 * budget <= min(longest - DECODED, MOST_READ):
        assert context == 4 * budget


@pytest.mark.parametrize("least", [0, 700])
def test_words_are_told_all_over_a_context_of_any_length(tokenizer: Tokenizer, least: int) -> None:
    sentences = retrieval._sentences()
    told = retrieval._told(
        tokenizer, random.Random(1), retrieval.CITIES.split(), retrieval.WORDS.split(), sentences, 4, least
    )
    text = tokenizer.decode(told.context)
    at = [text.index(f"The secret word of {city} is") / len(text) for city in told.cities]
    assert len(told.context) >= least and at == sorted(at)
    if least:
        assert all(abs(share - number / 4) < 0.2 for number, share in enumerate(at))
