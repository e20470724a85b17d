"""The Triton kernels under the runtime: a whole decoder agrees with the plain one, and each step takes its kernels.

Tolerances, on the tiny models' logits (standard deviation 1.6): 0.06 as the root of the mean square, measured 0.02 to
0.04 in the interpreter, which cuts bf16 off (0.015 to 0.027 for plain PyTorch with bf16 activations); 0.5 for a single
logit, measured 0.40 at one token whose attention is close to a tie.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels import dispatch  # noqa: E402
from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.launch import recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402
from membound.roofline.models.recurrent import Mamba2  # noqa: E402
from membound.roofline.techniques import KvEviction, engine_setup  # noqa: E402
from membound.runtime.calibration.calibrate import KINDS, CalibrationPlan, _Calibrator  # noqa: E402
from membound.runtime.calibration.host import HostGrid  # noqa: E402
from membound.runtime.calibration.layers import LAYER_KINDS, LayerGrid, LayerProbe  # noqa: E402
from membound.runtime.calibration.linears import LinearGrid  # noqa: E402
from membound.runtime.calibration.operators import Heads, Load, OperatorGrid  # noqa: E402
from membound.runtime.calibration.stopwatch import Stopwatch  # noqa: E402
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.kv.build import store_for  # noqa: E402
from membound.runtime.loading.weights import load_safetensors  # noqa: E402
from membound.runtime.plain import generate_plain, single_sequence  # noqa: E402

REFERENCE = Path(__file__).parents[3] / "data" / "reference"
TYPICAL, LARGEST = 0.06, 0.5
BLOCK_SIZE, MIB = 8, 2**20
LOADS = (Load(1, 20), Load(2, 20, 5), Load(1, 70, 70))
# Two sequences in scattered blocks: prompts, a chunk beside a decode step, drafts, decode steps of both and of one.
TABLE = torch.tensor([[5, 2, 7], [1, 6, 0]], dtype=torch.int32)
STEPS = ([(0, 5), (0, 3)], [(5, 10), (3, 4)], [(10, 11), (4, 6)], [(11, 12), (6, 7)], [(12, 13)])


class ExactKernels(TorchKernels):
    """Nothing rounded to bf16 but the weights."""

    kv_dtype = torch.float32


def batch_of(parts, device):
    """Tokens `start` to `end` of each sequence in turn."""
    positions = [torch.arange(start, end) for start, end in parts]
    slots = [TABLE[i, p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for i, p in enumerate(positions)]
    starts = torch.tensor([0] + [end - start for start, end in parts]).cumsum(0).int()
    return RaggedBatch(
        torch.cat(positions).to(device),
        torch.cat(slots).to(device),
        starts.to(device),
        torch.tensor([end for _, end in parts], dtype=torch.int32, device=device),
        TABLE[: len(parts)].to(device),
        max(end - start for start, end in parts),
    )


def all_logits(decoder):
    """Logits of every token of the steps, one after the other on the same cache."""
    ids = torch.arange(3, 23) % decoder.spec.vocab, torch.arange(90, 110) % decoder.spec.vocab
    kv = decoder.new_cache(8, BLOCK_SIZE)
    found = []
    for parts in STEPS:
        tokens = torch.cat([ids[i][start:end] for i, (start, end) in enumerate(parts)]).to(decoder.device)
        batch = batch_of(parts, decoder.device)
        found.append(decoder.forward(tokens, batch, kv, torch.arange(len(tokens), device=decoder.device)).cpu())
    return torch.cat(found)


@pytest.fixture(scope="module")
def kernels(device):
    return TritonKernels(device.type)


def assert_close(logits, expected):
    difference = (logits - expected).abs()
    assert difference.square().mean().sqrt() < TYPICAL
    assert difference.max() < LARGEST


@pytest.mark.parametrize(("name", "format"), [("tiny_qwen2", "bf16"), ("tiny_qwen3", "int8"), ("tiny_llama3", "bf16")])
def test_a_decoders_logits_are_the_plain_ones_through_prefill_drafts_and_decode(name, format, kernels, device):
    spec, weights = load_safetensors(REFERENCE / name)
    fast = all_logits(Decoder(spec, weights.to(device), kernels, format))
    assert fast.dtype == torch.float32
    assert_close(fast, all_logits(Decoder(spec, weights, ExactKernels(), format)))
    assert_close(fast, all_logits(Decoder(spec, weights, TorchKernels(), format)))


def test_plain_generation_goes_the_plain_way(kernels, device):
    spec, weights = load_safetensors(REFERENCE / "tiny_llama3")
    tokens = list(generate_plain(Decoder(spec, weights, ExactKernels(), "fp32"), [5, 9, 77, 3], 5))
    assert list(generate_plain(Decoder(spec, weights.to(device), kernels, "fp32"), [5, 9, 77, 3], 5)) == tokens


class OneByOne(TritonKernels):
    """Finds the attention that tokens receive sequence by sequence, as plain PyTorch does."""

    def attention_scores(self, *arguments, **options):
        return self._torch.attention_scores(*arguments, **options)


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_a_cache_that_evicts_keeps_the_tokens_that_it_would_keep_sequence_by_sequence(policy, kernels, device):
    spec, weights = load_safetensors(REFERENCE / "tiny_llama3")
    setup = engine_setup((KvEviction(policy=policy, budget=12, recent=4),))
    found = []
    for set_ in (kernels, OneByOne(device.type)):
        decoder = Decoder(spec, weights.to(device), set_, "bf16").storing(store_for(setup, set_, device))
        kv, start = decoder.new_cache(4, BLOCK_SIZE), 0
        for end in (20, 21, 22, 23):
            ids, batch = torch.arange(5 + start, 5 + end, device=device), single_sequence(start, end, 4, device)
            logits = decoder.forward(ids, batch, kv, torch.arange(end - start, device=device))
            start = end
        found.append((logits, torch.stack([layer.positions for layer in kv])))
    assert torch.equal(found[0][1], found[1][1]) and torch.allclose(found[0][0], found[1][0], atol=0.05)


def test_every_probe_of_the_calibration_runs_on_them(kernels, device):
    plan = CalibrationPlan(
        working_sets=(MIB,),
        linears=LinearGrid(n=(64,), k=(64, 96), m=(1, 3)),
        operators=OperatorGrid(tokens=(1, 3), widths=(256,), heads=(Heads(2, 1, 64),), loads=LOADS),
        host=HostGrid(sequences=(1,), vocab=(256,), drafts=(0,), steps=3),
        pool_bytes=16 * MIB,
    )
    calibrator = _Calibrator(kernels, device.type, plan)
    seconds = [*calibrator.bandwidth.measure([MIB]), *calibrator.host.measure()]
    for kind in KINDS:
        seconds += calibrator.operators.measure(kind)
    assert {"bf16", "int8", "int4", "sparse24"} <= set(calibrator.linears.formats) <= set(plan.linears.formats)
    for format in calibrator.linears.formats:
        seconds += [s for s in calibrator.linears.measure(format, True) if s == s]  # too long a cell is NaN
    assert len(seconds) > 20 and min(seconds) > 0


@pytest.mark.parametrize(
    ("new", "kernel"),
    [
        ([1, 1, 1], "decode_attention_kernel"),
        ([5, 1, 5], "verify_attention_kernel"),
        ([64], "verify_attention_kernel"),
        ([65, 1], "prefill_attention_kernel"),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_a_steps_longest_part_chooses_its_attention(new, kernel, told):
    starts = torch.tensor([0, *new]).cumsum(0).int()
    batch = RaggedBatch(
        torch.zeros(sum(new), dtype=torch.int64),
        torch.zeros(sum(new), dtype=torch.int64),
        starts,
        torch.full((len(new),), 200, dtype=torch.int32),
        torch.zeros(len(new), 20, dtype=torch.int32),
        max(new) if told else None,
    )
    q, blocks = torch.zeros(sum(new), 4, 64).bfloat16(), torch.zeros(20, 16, 2, 64).bfloat16()
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        out = TritonKernels("cpu").attention(q, blocks, blocks, batch, 1.0)
    assert record.launches[0].name == kernel
    assert out.shape == (sum(new), 256)


def test_a_draft_sees_what_is_before_it_and_itself():
    starts = torch.tensor([0, 64, 67], dtype=torch.int32)
    empty = torch.zeros(67, dtype=torch.int64)
    batch = RaggedBatch(empty, empty, starts, torch.tensor([64, 3]), torch.zeros(2, 4, dtype=torch.int32))
    masks = [mask % 2**64 for mask in TritonKernels("cpu")._chain(batch).tolist()]
    assert masks == [2 ** (j + 1) - 1 for j in range(64)] + [1, 3, 7]


def test_int8_linears_multiply_what_the_plain_ones_do(kernels, device):
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 96, generator=random) for size in (40, 5))
    packed = kernels.pack(weight.to(device), "int8")
    assert packed.scale is not None and packed.data.dtype == torch.int8
    exact = x.bfloat16().double() @ (packed.data.double().cpu() * packed.scale.double().cpu()[:, None]).t()
    y = kernels.linear(x.bfloat16().to(device), packed)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double().cpu(), exact, rtol=2**-7, atol=1e-2)


def test_a_gpu_gets_the_triton_kernels_where_they_run_and_else_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.kernels_for("cuda").name == "torch"
    assert "finds no GPU" in (dispatch.why_not_triton() or "")
    with pytest.raises(ValueError, match="finds no GPU"):
        dispatch.kernels_for("cuda", prefer="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert dispatch.kernels_for("cuda").name == "torch"
    assert dispatch.why_not_triton() == (
        "Tesla V100 has compute capability 7.0; the Triton kernels need 8.0 or newer, whose tensor cores multiply bf16"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    # A driver that is not there fails as one does whose launcher cannot be built.
    assert "it needs a C compiler and this Python's headers" in (dispatch.missing_for_triton("cuda") or "")
    monkeypatch.setattr(dispatch, "driver_problem", lambda: None)
    assert dispatch.kernels_for("cuda").name == "triton" and dispatch.why_not_triton() is None
    assert dispatch.kernels_for("cuda", prefer="torch").name == "torch"
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert "unset it to run them on the GPU" in (dispatch.missing_for_triton("cuda") or "")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton cannot be imported" in (dispatch.missing_for_triton("cuda") or "")


def test_kernels_are_refused_on_a_device_that_is_not_theirs():
    with pytest.raises(ValueError, match="the Triton kernels run on a GPU, not on cpu"):
        dispatch.kernels_for("cpu", prefer="triton")
    with pytest.raises(ValueError, match=r"the C\+\+ kernels run on a CPU, not on cuda"):
        dispatch.kernels_for("cuda", prefer="cpp")


def test_a_calibration_measures_grouped_experts_and_states_in_place(kernels, device):
    state = Mamba2(heads=2, head_dim=16, d_state=16)
    grid = LayerGrid(tokens=(2,), hidden=(64,), experts=((4, 2),), states=(state,), loads=(Load(2, 8),), cell_s=1e-4)
    probe = LayerProbe(kernels, Stopwatch(kernels, device.type), grid)
    assert all(mixture.together is not None for *_, mixture in probe._mixtures())
    assert all(seconds > 0 for kind in LAYER_KINDS for seconds in probe.measure(kind))
