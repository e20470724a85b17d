"""Rejection sampling on the GPU: greedy exactly, and sampled tokens have the target's distribution."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.verify_sampling import (  # noqa: E402
    verify_sampling,
    verify_sampling_bytes,
    verify_sampling_reference,
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def starts_of(rows, device):
    return torch.tensor([sum(rows[:i]) for i in range(len(rows) + 1)], dtype=torch.int32, device=device)


def greedy(logits, rows, drafts):
    """The accepted prefix and one more, sequence by sequence."""
    best, first, emitted = logits.float().argmax(-1).tolist(), 0, []
    for count in rows:
        tokens = []
        for row in range(first, first + count):
            tokens.append(best[row])
            if row + 1 == first + count or drafts[row] != best[row]:
                break
        emitted.append(tokens)
        first += count
    return emitted


@settings(deadline=None, max_examples=20)
@given(
    data=st.data(),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    vocab=st.sampled_from([1, 3, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_at_temperature_0_it_emits_what_plain_greedy_decoding_would(device, data, rows, vocab, dtype):
    logits = random(sum(rows), vocab).to(device, dtype)
    best = logits.float().argmax(-1).tolist()
    right = data.draw(st.lists(st.booleans(), min_size=sum(rows), max_size=sum(rows)), label="right drafts")
    drafts = [token if good else (token + 1) % vocab for token, good in zip(best, right, strict=True)]
    emitted = verify_sampling(
        logits,
        starts_of(rows, device),
        torch.tensor(drafts, dtype=torch.int64, device=device),
        torch.zeros(len(rows), device=device),
        torch.tensor([3], device=device),
        most_rows=4,
        config=Config({"BLOCK": 16}),
    )
    expected = greedy(logits, rows, drafts)
    assert emitted.counts.tolist() == [len(tokens) for tokens in expected]
    assert emitted.tokens.tolist() == [tokens + [-1] * (4 - len(tokens)) for tokens in expected]


def noise_of(seed, count, device):
    """The uniform numbers that the kernels will draw."""
    import triton
    import triton.language as tl

    @triton.jit
    def draw(seed, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out + at, tl.rand(tl.load(seed), at))

    size = triton.next_power_of_2(count)
    out = torch.empty(size, device=device)
    draw[(1,)](seed, out, SIZE=size)
    return out[:count]


@settings(deadline=None, max_examples=20)
@given(
    data=st.data(),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    vocab=st.sampled_from([1, 3, 100]),
    with_q=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_with_the_same_noise_it_emits_what_the_steps_of_the_algorithm_do(device, data, rows, vocab, with_q, seed):
    degrees = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(rows), max_size=len(rows)))
    temperature, starts = torch.tensor(degrees, device=device), starts_of(rows, device)
    logits, other = (random(sum(rows), vocab, seed=seed).to(device) for seed in (1, 2))
    q = torch.softmax(other, -1) if with_q else None
    drafts = torch.softmax(other, -1).argmax(-1)
    key = torch.tensor([seed], device=device)
    emitted = verify_sampling(
        logits,
        starts,
        drafts,
        temperature,
        key,
        most_rows=3,
        draft_probabilities=q,
        config=Config({"BLOCK": 16}),
    )
    noise = noise_of(key, sum(rows) + len(rows) * vocab, device)
    expected = verify_sampling_reference(logits, starts, drafts, temperature, noise, q)
    assert emitted.tokens.tolist() == [tokens + [-1] * (3 - len(tokens)) for tokens in expected]


@pytest.mark.parametrize("with_q", [False, True])
def test_the_algorithms_tokens_have_the_targets_distribution_whatever_the_drafts_were(with_q):
    """One draft from a q that differs much from p, or always the same token."""
    count, vocab, temperature = 6000, 5, 0.7
    row, other = random(vocab, seed=4), random(vocab, seed=5)
    p, q = torch.softmax(row / temperature, -1), torch.softmax(other, -1)
    generator = torch.Generator().manual_seed(6)
    drafts = torch.full((count, 2), 2)
    if with_q:
        drafts[:, 0] = torch.multinomial(q, count, replacement=True, generator=generator)
    emitted = verify_sampling_reference(
        row.expand(2 * count, vocab),
        starts_of([2] * count, "cpu"),
        drafts.flatten(),
        torch.full((count,), temperature),
        torch.rand(2 * count + count * vocab, generator=generator),
        q.expand(2 * count, vocab) if with_q else None,
    )

    def has_distribution_p(tokens):
        frequency = torch.bincount(torch.tensor(tokens), minlength=vocab) / len(tokens)
        return bool(((frequency - p).abs() < 4.5 * (p * (1 - p) / len(tokens)).sqrt()).all())

    assert has_distribution_p([tokens[0] for tokens in emitted])
    assert has_distribution_p([tokens[1] for tokens in emitted if len(tokens) == 2])
    # How often both are emitted is the acceptance: sum of min(p, q), of a point mass p of that token.
    acceptance = float(torch.minimum(p, q).sum() if with_q else p[2])
    accepted = sum(len(tokens) == 2 for tokens in emitted) / count
    assert abs(accepted - acceptance) < 4.5 * (acceptance * (1 - acceptance) / count) ** 0.5


def test_a_rejected_point_mass_is_never_emitted_again_and_a_certain_one_always_kept(device):
    """A draft that the target gives 0 is rejected, one that it gives 1 accepted; over 65 tokens, two parts."""
    count, vocab, config = 8, 65, Config({"BLOCK": 16})
    logits = torch.zeros(2 * count, vocab, device=device)
    logits[0::4, 7] = -torch.inf
    logits[2::4, 64] = 1e4
    drafts = torch.zeros(2 * count, dtype=torch.int64, device=device)
    drafts[0::4], drafts[2::4] = 7, 64
    ones = torch.ones(count, device=device)
    seed = torch.tensor([1], device=device)
    emitted = verify_sampling(logits, starts_of([2] * count, device), drafts, ones, seed, most_rows=2, config=config)
    assert emitted.counts.tolist() == [1, 2] * (count // 2)
    assert (emitted.tokens[0::2, 0] != 7).all() and (emitted.tokens[1::2, 0] == 64).all()
    again = verify_sampling(logits, starts_of([2] * count, device), drafts, ones, seed, most_rows=2, config=config)
    assert torch.equal(emitted.tokens, again.tokens)
    other = verify_sampling(logits, starts_of([2] * count, device), drafts, ones, seed + 1, most_rows=2, config=config)
    assert not torch.equal(emitted.tokens, other.tokens)


def test_declared_bytes_are_the_logits_and_each_sequences_last_row_again():
    logits = torch.zeros(6, 100)
    assert verify_sampling_bytes(logits, 2, with_draft_probabilities=False) == (6 + 2) * 400
    assert verify_sampling_bytes(logits, 2, with_draft_probabilities=True) == (6 + 2 + 2) * 400


def test_bad_arguments_are_named(device):
    good = dict(
        logits=torch.zeros(2, 9, device=device),
        row_start=starts_of([2], device),
        drafts=torch.zeros(2, dtype=torch.int64, device=device),
        temperature=torch.ones(1, device=device),
        seed=torch.zeros(1, dtype=torch.int64, device=device),
        most_rows=2,
    )
    for name, wrong in (
        ("logits", good["logits"].double()),
        ("row_start", good["row_start"].long()),
        ("drafts", good["drafts"][:1]),
        ("temperature", good["temperature"].half()),
        ("seed", good["seed"].int()),
        ("most_rows", 0),
        ("draft_probabilities", torch.zeros(2, 8, device=device)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            verify_sampling(**{**good, name: wrong})
