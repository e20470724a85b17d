"""The bytes that the kernels declare are those by which the roofline predicts: one truth in two places."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton.decode_attention import decode_attention_bytes  # noqa: E402
from membound.kernels.triton.kv_blocks import KvBlocks  # noqa: E402
from membound.kernels.triton.linear_byte import ByteWeight  # noqa: E402
from membound.kernels.triton.linear_int4 import Int4Weight  # noqa: E402
from membound.kernels.triton.linear_int8 import Int8Weight  # noqa: E402
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight  # noqa: E402
from membound.kernels.triton.linear_sparse import SparseWeight  # noqa: E402
from membound.kernels.triton.linear_w8a8 import Fp8Blocks  # noqa: E402
from membound.kernels.triton.mla_decode import mla_decode_bytes  # noqa: E402
from membound.kernels.triton.mla_prefill import mla_prefill_bytes, mla_prefill_flops  # noqa: E402
from membound.kernels.triton.moe_experts import ExpertWeights  # noqa: E402
from membound.kernels.triton.rms_norm import rms_norm_bytes  # noqa: E402
from membound.kernels.triton.round_rows import round_blocks, round_rows, round_rows_bytes, round_step  # noqa: E402
from membound.kernels.triton.silu_mul import silu_mul_bytes  # noqa: E402
from membound.roofline.models import get_model  # noqa: E402
from membound.roofline.precision import get_precision  # noqa: E402
from membound.roofline.shape import StepShape  # noqa: E402
from membound.roofline.step import step_operators  # noqa: E402
from membound.roofline.techniques import EngineSetup  # noqa: E402

N, K = 192, 1024


@pytest.mark.parametrize(
    ("precision", "weight"),
    [
        ("int8", lambda dense: ByteWeight.quantize(dense, "int8")),
        ("fp8_row", lambda dense: ByteWeight.quantize(dense, "fp8")),
        ("int4_g128", lambda dense: Int4Weight.quantize(dense, 128, symmetric=True)),
        ("int4_g64_zero", lambda dense: Int4Weight.quantize(dense, 64, symmetric=False)),
        ("mxfp4", Mxfp4Weight.quantize),
        ("bf16_sparse24", lambda dense: SparseWeight.prune(dense.bfloat16())),
        ("fp8_block", lambda dense: Fp8Blocks.quantize(dense, 128)),
        ("q8_0", lambda dense: Int8Weight.quantize(dense, 32)),
    ],
)
def test_a_packed_weight_takes_what_its_precision_says(precision, weight):
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    assert weight(dense).nbytes == get_precision(precision).matrix_bytes(N, K)


@pytest.mark.parametrize(
    ("format", "precision"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"), ("int8", "int8_head"), ("int4", "int4_head_zero16")],
)
def test_a_cached_token_takes_what_its_precision_says(format, precision):
    kv = KvBlocks.zeros(format, 1, 16, 8, 128, "cpu")
    assert kv.token_bytes() == get_precision(precision).cache_bytes(1, 2 * 8, 128)


@pytest.mark.parametrize(
    ("precision", "rounded"),
    [
        ("int8", lambda x: round_rows(x, "int8")),
        ("fp8_row", lambda x: round_rows(x, "fp8")),
        ("fp8", lambda x: round_step(x, "fp8")),
        ("fp8_g128", round_blocks),
    ],
)
def test_rounded_activations_take_what_their_precision_says(device, precision, rounded):
    x = torch.zeros(3, K, dtype=torch.bfloat16, device=device)
    assert round_rows_bytes(x, rounded(x)) == x.nbytes + get_precision(precision).matrix_bytes(3, K)


def test_decode_attention_norms_and_activation_of_llama_move_what_the_operators_say():
    batch, context = 3, 100
    model = get_model("Llama-3.1-8B")
    operators = {
        op.name: op for op in step_operators(model, EngineSetup(), StepShape.decode(batch, context), activation_bytes=2)
    }
    hidden = torch.empty(batch, 4096, dtype=torch.bfloat16, device="meta")
    q = torch.empty(batch, 32, 128, dtype=torch.bfloat16, device="meta")
    kv = KvBlocks.zeros("bf16", 8, 16, 8, 128, "meta")
    assert decode_attention_bytes(q, kv, [context] * batch) == operators["attention"].bytes
    assert rms_norm_bytes(hidden, residual=False, quantized=False) == operators["first_norm"].bytes
    assert rms_norm_bytes(hidden, residual=True, quantized=False) == operators["norms"].bytes
    gate_up = torch.empty(batch, 2 * 14336, dtype=torch.bfloat16, device="meta")
    assert silu_mul_bytes(gate_up, quantized=False) == operators["silu_mul"].bytes


def test_latent_attention_of_deepseek_moves_what_the_operator_says():
    batch, context = 3, 100
    shape = StepShape.decode(batch, context)
    operators = step_operators(get_model("DeepSeek-V3"), EngineSetup(), shape, activation_bytes=2)
    q = torch.empty(batch, 128, 576, dtype=torch.bfloat16, device="meta")
    found = [op.bytes for op in operators if op.name.endswith("attention") and op.kind == "attention"]
    assert found
    assert all(moved == mla_decode_bytes(q, [context] * batch, 512) for moved in found)


def test_unpacked_latents_of_deepseek_take_what_the_operator_says_but_for_copies_of_the_shared_keys():
    """The operator has a key of every head in memory, as other engines do; the kernel reads the rotated part once."""
    new, context = [64, 100], [64, 100]
    shape = StepShape.of((0, count, 1) for count in new)
    operators = step_operators(get_model("DeepSeek-V3"), EngineSetup(), shape, activation_bytes=2)
    (found,) = {op.bytes: op for op in operators if op.name.endswith("attention_unpacked")}.values()
    q = torch.empty(sum(new), 128, 192, dtype=torch.bfloat16, device="meta")
    unpacked = torch.empty(sum(context), 128, 256, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(sum(context), 64, dtype=torch.bfloat16, device="meta")
    copies = 127 * sum(context) * 64 * 2
    assert mla_prefill_bytes(q, unpacked, keys) == found.bytes - copies
    assert mla_prefill_flops(q, 128, new, context) == found.flops


@pytest.mark.parametrize("format", ["int4_g64_zero", "fp8_block"])
def test_an_expert_takes_what_its_precision_says(format):
    dense = torch.randn(3, N, K, generator=torch.Generator().manual_seed(0))
    if format == "fp8_block":
        packed = [Fp8Blocks.quantize(one, 128) for one in dense]
        experts = ExpertWeights(
            "fp8_blocks", *(torch.stack(t) for t in zip(*((w.data, w.scale) for w in packed), strict=True))
        )
    else:
        packed = [Int4Weight.quantize(one, 64, symmetric=False) for one in dense]
        data, scale, zero = (torch.stack(t) for t in zip(*((w.data, w.scale, w.zero) for w in packed), strict=True))
        experts = ExpertWeights("int4", data, scale, rows=N, zero=zero)
    assert experts.expert_bytes == get_precision(format).matrix_bytes(N, K)
