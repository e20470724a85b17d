"""Stores of K and V hold what their formats promise, in the bytes that the roofline counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.kernels.base import RaggedBatch
from membound.kernels.dispatch import kernels_for
from membound.kernels.grouped import decode, encode, pack, unpack
from membound.kernels.reference import TorchKernels
from membound.roofline.errors import MemboundError
from membound.roofline.memory import cache_terms, cached_token_bytes, page_bytes
from membound.roofline.models import GroupedQueryAttention, get_model
from membound.roofline.precision import get_precision
from membound.roofline.scenario.engine import Disaggregation, Engine
from membound.roofline.techniques import KvEviction, KvQuantization, NgramSpeculation, engine_setup
from membound.runtime.decoder import Decoder
from membound.runtime.kv.build import store_for, store_problem
from membound.runtime.kv.kivi import KiviKv
from membound.runtime.kv.store import PlainKv
from membound.runtime.plain import single_sequence
from membound.runtime.rope import RopeTables

ATTENTION = GroupedQueryAttention(heads=6, kv_heads=2, head_dim=64)
CPU = torch.device("cpu")
KERNELS = kernels_for("cpu")
ROPE = RopeTables(10_000.0 ** -torch.linspace(0, 1, 32), 1024)
SCALE = 0.125
BLOCK = 16
FORMATS = ("fp8", "int8", "int4", "kivi2", "kivi4")


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    width = (ATTENTION.heads + 2 * ATTENTION.kv_heads) * ATTENTION.head_dim
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def read(store, qkv: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """What one sequence attends to when it comes in chunks of these sizes."""
    blocks = -(-len(qkv) // BLOCK)
    outputs, start = [], 0
    for size in chunks:
        batch = single_sequence(start, start + size, blocks, CPU)
        outputs.append(store.attend(qkv[start : start + size], ROPE, batch, SCALE))
        start += size
    assert start == len(qkv)
    return torch.cat(outputs)


def store_of(technique, tokens: int, block_size: int = BLOCK, seats: int = 1):
    blocks = -(-tokens // block_size)
    return store_for(engine_setup((technique,)), KERNELS, CPU)(ATTENTION, blocks, block_size, seats)


def plain(tokens: int) -> PlainKv:
    return PlainKv.zeroed(KERNELS, ATTENTION, -(-tokens // BLOCK), BLOCK, CPU)


# -- codes


@given(bits=st.sampled_from([2, 4]), seed=st.integers(0, 99), size=st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_a_number_is_rounded_by_half_a_step_at_most_and_codes_are_unpacked_as_packed(bits, seed, size):
    x = size * torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(seed))
    codes, meta = encode(x, bits)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)
    step = meta[..., :1].float()
    # scale and minimum are themselves rounded to fp16, by 2^-11 of their size
    slack = (2**bits * step + x.abs().amax(-1, keepdim=True)) * 2**-10
    assert bool(((decode(codes, meta) - x).abs() <= step / 2 + slack).all())


# -- quantized stores


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_a_store_takes_the_bytes_that_the_roofline_counts(format, block_size):
    tokens, precision = 128, get_precision({"int8": "int8_head", "int4": "int4_head_zero16"}.get(format, format))
    store = store_of(KvQuantization(format=format), tokens, block_size, seats=3)
    each = cached_token_bytes(ATTENTION, precision, 1)
    newest = 3 * precision.window * cached_token_bytes(ATTENTION, get_precision("bf16"), 1)
    assert store.nbytes == tokens * each + newest
    assert len(store.read_blocks([0, 1])[0]) == block_size * each


def test_int8_is_off_by_half_a_step_at_most():
    qkv, exact, store = inputs(100), plain(100), store_of(KvQuantization(format="int8"), 100)
    read(exact, qkv, [100])
    read(store, qkv, [60, 40])
    for kept, rounded in zip((exact.k_blocks, exact.v_blocks), store.kv.dequantized(), strict=True):
        kept, rounded = (t.flatten(0, 1)[:100].float() for t in (kept, rounded))
        step = kept.abs().amax(-1, keepdim=True) / 127
        # bf16 rounds what it is compared with by 2^-9, and the scale is in fp16
        assert bool(((kept - rounded).abs() <= 0.51 * step + kept.abs() * 2**-8).all())


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_read_from_one_store_and_written_to_another_hold_the_same(format):
    qkv = inputs(96)
    one, other = (store_of(KvQuantization(format=format), 96) for _ in range(2))
    read(one, qkv, [96])
    other.write_blocks([5, 4, 3, 2, 1, 0], one.read_blocks(range(6)))
    assert torch.equal(other.read_blocks([5, 4, 3, 2, 1, 0]), one.read_blocks(range(6)))


def test_kivi_is_exact_within_its_window_and_does_not_depend_on_chunks():
    qkv, chunks = inputs(260), [100, 1, 1, 90, *[1] * 68]
    outputs, stores = [], []
    for block_size in (8, 16, 64):
        store = KiviKv(KERNELS, ATTENTION, get_precision("kivi4"), -(-260 // block_size), block_size, 1, CPU)
        blocks, start, seen = -(-260 // block_size), 0, []
        for size in chunks:
            batch = single_sequence(start, start + size, blocks, CPU)
            seen.append(store.attend(qkv[start : start + size], ROPE, batch, SCALE))
            start += size
        outputs.append(torch.cat(seen))
        stores.append(store)
    exact = read(plain(260), qkv, chunks)
    assert torch.equal(outputs[0][:128], exact[:128])
    assert not torch.equal(outputs[0][200:], exact[200:])
    assert (outputs[0] - exact).abs().max() < 0.2
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=2e-3)
    # Whole groups of 32, so that at most 128 of 260 tokens are in 16 bits.
    assert stores[0].kv.rounded.tolist() == [[160, 160]]


# -- eviction


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "quest"])
def test_a_budget_that_holds_everything_changes_nothing(policy):
    qkv, chunks = inputs(90), [40, 20, *[1] * 30]
    store = store_of(KvEviction(policy=policy, budget=96), 90)
    assert torch.equal(read(store, qkv, chunks), read(plain(90), qkv, chunks))


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_no_more_tokens_are_kept_than_the_budget_has(policy):
    store = store_of(KvEviction(policy=policy, budget=96), 200)
    read(store, inputs(200), [120, 40, *[1] * 40])
    kept = store.positions[0, :, :96]
    assert all(len(set(head)) == 96 for head in kept.tolist())
    assert bool((kept == 199).any(dim=1).all()), "the newest token is kept"
    assert store.kv.nbytes == 96 * cached_token_bytes(ATTENTION, get_precision("bf16"), 1)


def test_streaming_keeps_the_sinks_and_the_newest():
    qkv = inputs(200)
    exact, store = plain(200), store_of(KvEviction(policy="streaming", budget=96), 200)
    read(exact, qkv, [200])
    read(store, qkv, [120, 40, *[1] * 40])
    kept = torch.tensor([0, 1, 2, 3, *range(108, 200)])
    assert torch.equal(store.kv.tokens(store.place_of(kept))[0], exact.k_blocks.flatten(0, 1)[kept])
    assert store.nbytes == 96 * cached_token_bytes(ATTENTION, get_precision("bf16"), 1)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv"])
def test_sequences_beside_each_other_are_as_alone(policy):
    """One decodes while the prompt of the other is read, at seats of their own."""
    first, second = inputs(160, 1), inputs(140, 2)
    technique = KvEviction(policy=policy, budget=96)
    alone = [read(store_of(technique, 160), qkv, [130, *[1] * (len(qkv) - 130)]) for qkv in (first, second)]
    store = store_of(technique, 160, seats=2)
    together = read_together(store, (first, second), [((0, 130), None), ((130, 131), (0, 130))])
    for step in range(9):
        parts = [((131 + step, 132 + step), (130 + step, 131 + step))]
        for number, rows in read_together(store, (first, second), parts).items():
            together[number] = torch.cat([together[number], rows])
    assert torch.equal(together[0], alone[0][:140])
    assert torch.equal(together[1], alone[1][:139])


def read_together(store, inputs_of, steps) -> dict[int, torch.Tensor]:
    """What each of several sequences attends to; a step says which tokens of each come, or None."""
    outputs: dict[int, torch.Tensor] = {}
    for step in steps:
        there = [(number, span) for number, span in enumerate(step) if span is not None]
        spans = [span for _, span in there]
        edges = torch.tensor([0, *(end - start for start, end in spans)]).cumsum(0).int()
        batch = RaggedBatch(
            positions=torch.cat([torch.arange(*span) for span in spans]),
            slots=torch.zeros(int(edges[-1]), dtype=torch.int64),
            query_start=edges,
            context_len=torch.tensor([end for _, end in spans], dtype=torch.int32),
            block_table=torch.zeros(len(spans), 10, dtype=torch.int32),
            seats=torch.tensor([number for number, _ in there]),
        )
        qkv = torch.cat([inputs_of[number][start:end] for number, (start, end) in there])
        attended = store.attend(qkv, ROPE, batch, SCALE)
        for i, (number, _) in enumerate(there):
            rows = attended[edges[i] : edges[i + 1]]
            outputs[number] = torch.cat([outputs[number], rows]) if number in outputs else rows
    return outputs


def told(tokens: int, needle: int, asked_from: int) -> torch.Tensor:
    """Inputs of which all queries from `asked_from` on look for the key at `needle`, whose value is large."""
    qkv = 0.1 * inputs(tokens)
    q, k, v = qkv.split([6 * 64, 2 * 64, 2 * 64], dim=1)
    unturned = torch.zeros(64)
    unturned[31] = unturned[63] = 30.0  # the slowest pair, which positions hardly turn
    q[asked_from:] = unturned.repeat(6)
    k[needle] = unturned.repeat(2)
    v[needle] = 50.0
    return qkv


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "quest"])
def test_what_the_prompt_looked_for_is_kept_and_streaming_loses_it(policy):
    qkv = told(300, needle=40, asked_from=240)
    chunks = [260, *[1] * 40]
    exact = read(plain(300), qkv, chunks)[-1]
    found = read(store_of(KvEviction(policy=policy, budget=96), 300), qkv, chunks)[-1]
    lost = read(store_of(KvEviction(policy="streaming", budget=96), 300), qkv, chunks)[-1]
    assert (exact > 40).all()
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.5)
    assert (lost < 10).all()


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "quest"])
def test_policies_over_plain_pytorch_find_what_those_over_the_kernels_do(policy):
    qkv, chunks = told(300, needle=40, asked_from=240), [200, 60, *[1] * 40]
    setup = engine_setup((KvEviction(policy=policy, budget=96),))
    ours, plainly = (
        read(store_for(setup, kernels, CPU)(ATTENTION, 19, BLOCK, 1), qkv, chunks)
        for kernels in (KERNELS, TorchKernels())
    )
    torch.testing.assert_close(ours[200:], plainly[200:], rtol=0.02, atol=0.1)


def test_a_question_that_comes_after_the_prompt_is_lost_to_eviction_and_not_to_pages():
    """SnapKV chose without having seen it; Quest chooses anew in each step."""
    qkv = told(300, needle=40, asked_from=270)
    chunks = [260, *[1] * 40]
    answers = {
        policy: read(store_of(KvEviction(policy=policy, budget=64), 300), qkv, chunks)[-1].median()
        for policy in ("snapkv", "quest")
    }
    assert answers["quest"] > 40
    assert answers["snapkv"] < 10


def test_pages_take_the_bytes_that_the_roofline_counts_and_move_with_their_bounds():
    qkv = inputs(96)
    one, other = (store_of(KvEviction(policy="quest", budget=64), 96) for _ in range(2))
    each = BLOCK * cached_token_bytes(ATTENTION, get_precision("bf16"), 1) + page_bytes(ATTENTION, 1)
    assert one.nbytes == 6 * each
    read(one, qkv, [96])
    other.write_blocks(range(6), one.read_blocks(range(6)))
    assert torch.equal(other.bounds, one.bounds)
    keys = one.kv.k_blocks.view(-1, BLOCK, ATTENTION.head_dim)
    assert torch.equal(one.bounds.flatten(0, 1), torch.cat([keys.amax(1), -keys.amin(1)], dim=1))


# -- eviction of a quantized cache


POLICIES = ("streaming", "h2o", "snapkv", "quest")
KERNEL_FORMATS = ("fp8", "int8", "int4")


def both_of(policy: str, format: str, budget: int, tokens: int):
    """A store of a set-up that evicts and quantizes."""
    setup = engine_setup((KvEviction(policy=policy, budget=budget), KvQuantization(format=format)))
    assert store_problem(setup, Engine(), get_model("SmolLM2-135M")) is None
    return store_for(setup, KERNELS, CPU)(ATTENTION, -(-tokens // BLOCK), BLOCK, 1), setup


@pytest.mark.parametrize("format", KERNEL_FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_holds_everything_of_a_quantized_cache_changes_nothing(policy, format):
    """Tokens move between the scratch of a prompt and their seats as codes, so that none is rounded twice."""
    qkv, chunks = inputs(90), [40, 20, *[1] * 30]
    store, _ = both_of(policy, format, 96, 90)
    quantized = read(store_of(KvQuantization(format=format), 90), qkv, chunks)
    assert torch.equal(read(store, qkv, chunks), quantized)
    assert not torch.equal(quantized, read(plain(90), qkv, chunks))


@pytest.mark.parametrize("format", KERNEL_FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_evicting_quantized_cache_takes_the_bytes_that_the_roofline_counts(policy, format):
    model = get_model("SmolLM2-135M").model_copy(update={"layers": 1, "attention": ATTENTION})
    store, setup = both_of(policy, format, 96, 192)
    held = 96 if setup.kv_budget.evicts else 192
    counted = cache_terms(model, setup).bytes(192.0)
    pages = 0 if setup.kv_budget.evicts else store.bounds.nbytes
    assert counted == store.kv.nbytes + pages == held * cached_token_bytes(ATTENTION, setup.kv, 1) + pages


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "quest"])
@pytest.mark.parametrize("format", KERNEL_FORMATS)
def test_what_a_prompt_looked_for_is_kept_in_codes_too(policy, format):
    qkv, chunks = told(300, needle=40, asked_from=240), [200, 60, *[1] * 40]
    exact = read(plain(300), qkv, chunks)[-1]
    found = read(both_of(policy, format, 96, 300)[0], qkv, chunks)[-1]
    lost = read(both_of("streaming", format, 96, 300)[0], qkv, chunks)[-1]
    assert (found > 0.8 * exact).all() and (lost < 10).all()


@pytest.mark.parametrize("format", KERNEL_FORMATS)
def test_bounds_of_a_quantized_page_hold_its_keys_as_they_are_stored(format):
    store, _ = both_of("quest", format, 64, 96)
    read(store, inputs(96), [70, *[1] * 26])
    keys = store.kv.kv.dequantized()[0].view(-1, BLOCK, ATTENTION.head_dim)
    bounds = torch.cat([keys.amax(1), -keys.amin(1)], dim=1)
    torch.testing.assert_close(store.bounds.flatten(0, 1).float(), bounds, rtol=2**-8, atol=0)


# -- what is refused


@pytest.mark.parametrize(
    ("techniques", "engine", "model", "sentence"),
    [
        (["kivi2"], {"block_size": 24}, "SmolLM2-135M", "kivi2, whose keys share a scale along 32 tokens"),
        (["kivi2"], {"prefix_caching": True}, "SmolLM2-135M", "newest 128 tokens of a sequence outside of them"),
        (["int8"], {}, "DeepSeek-V3", "has latents, which the runtime keeps as they are"),
        (["int8"], {}, "gpt-oss-20b", "has learned sinks, which the runtime keeps as they are"),
        (["snapkv"], {}, "Mamba-2-2.7B", "kv_eviction needs a cache of keys and values"),
        (["snapkv"], {"prefix_caching": True}, "SmolLM2-135M", "which a cache that evicts does not have"),
        (["snapkv"], {"preemption": "swap", "host_kv_gib": 1.0}, "SmolLM2-135M", "which a cache that evicts does"),
        (["snapkv"], {"disaggregation": Disaggregation()}, "SmolLM2-135M", "which a cache that evicts does not have"),
        (["snapkv", "kivi2"], {}, "SmolLM2-135M", "kivi2 keeps tokens in groups that share a scale"),
        (["quest"], {"block_size": 32}, "SmolLM2-135M", "pages of 16 tokens, but engine.block_size is 32"),
        ([], {"prefix_caching": True}, "Jamba-v0.1", "has recurrent states, which no block holds"),
    ],
)
def test_what_a_cache_cannot_be_is_one_sentence(techniques, engine, model, sentence):
    made = [
        KvEviction(policy=name) if name in ("snapkv", "quest") else KvQuantization(format=name) for name in techniques
    ]
    problem = store_problem(engine_setup(made), Engine(**engine), get_model(model))
    assert problem is not None and sentence in problem and "\n" not in problem


def test_eviction_and_drafts_exclude_each_other_but_pages_and_drafts_do_not():
    with pytest.raises(MemboundError, match="kv_eviction by h2o excludes speculation"):
        engine_setup((KvEviction(policy="h2o"), NgramSpeculation()))
    setup = engine_setup((KvEviction(policy="quest"), NgramSpeculation()))
    assert store_problem(setup, Engine(), get_model("SmolLM2-135M")) is None


# -- real keys and values


class Recording(PlainKv):
    """Remembers the queries of the last step."""

    def attend(self, qkv, rope, batch, scale, softcap=None):
        self.q = self.kernels.rope_and_store(qkv, rope.cos, rope.sin, batch, self.k_blocks, self.v_blocks)
        return self.kernels.attention(self.q, self.k_blocks, self.v_blocks, batch, scale)


@pytest.mark.slow
def test_keys_by_channel_and_values_by_token_lose_least_of_real_attention(smollm2, tokenizer):
    """KIVI's layout against the other three, at 2 bits in groups of 32, over all layers of SmolLM2."""
    spec, weights = smollm2
    decoder = Decoder(spec, weights, KERNELS, "bf16")
    decoder = decoder.storing(lambda a, blocks, size, seats: Recording.zeroed(KERNELS, a, blocks, size, CPU))
    text = tokenizer.encode("The library lends books. Whoever borrows one brings it back within four weeks. " * 20)
    cache = decoder.new_cache(12, BLOCK)
    decoder.hidden(torch.tensor(text[:192]), single_sequence(0, 192, 12, CPU), cache)

    def rounded(x: torch.Tensor, by: str) -> torch.Tensor:
        axes = (1, 2, 0) if by == "channel" else (1, 0, 2)
        back = (2, 0, 1) if by == "channel" else (1, 0, 2)
        return decode(*encode(x.permute(axes).unflatten(-1, (-1, 32)), 2)).flatten(-2).permute(back)

    errors = dict.fromkeys(
        [("channel", "token"), ("channel", "channel"), ("token", "token"), ("token", "channel")], 0.0
    )
    for layer in cache:
        k, v = (t.flatten(0, 1).float() for t in (layer.k_blocks, layer.v_blocks))
        q = layer.q[-16:].float().unflatten(1, (k.shape[1], -1))

        def attended(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor = q) -> torch.Tensor:
            p = (torch.einsum("qhgd,thd->hgqt", q, k) * k.shape[-1] ** -0.5).softmax(-1)
            return torch.einsum("hgqt,thd->qhgd", p, v)

        exact = attended(k, v)
        for layout in errors:
            off = attended(rounded(k, layout[0]), rounded(v, layout[1])) - exact
            errors[layout] += float(off.norm() / exact.norm())
    assert min(errors, key=errors.__getitem__) == ("channel", "token")
