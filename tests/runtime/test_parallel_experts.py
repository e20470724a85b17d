"""A mixture of experts that several processes hold is the mixture: experts divided, split, or some of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.loading.weights import random_weights
from membound.runtime.parallel.shards import Share, shard_spec, shard_weights
from membound.runtime.plain import generate_plain

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
}
FAMILIES = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}


def scenario_of(folder: Path, family: str, **parallel: int) -> Scenario:
    config = folder / family / "config.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps(FAMILIES[family]), encoding="utf-8")
    chosen = load_scenario("live-cpu").model_copy(update={"model": str(config), "weights": "random", "techniques": ()})
    chosen = chosen.with_value(
        "workload.prompts", {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 4, "high": 20}}
    )
    chosen = chosen.with_value("workload.output_tokens", {"kind": "uniform", "low": 2, "high": 12})
    return chosen.with_value("workload.requests", 5).with_value("parallel", parallel)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_the_parts_of_a_mixture_sum_to_the_mixture(family: str, tp: int, ep: int) -> None:
    spec = ModelSpec.from_hf_config(FAMILIES[family], family)
    if tp > 2 and family == "qwen3_moe":
        pytest.skip("two KV heads")
    weights = random_weights(spec, seed=0)
    kernels = kernels_for("cpu", batch_invariant=True)
    whole = Decoder(spec, weights, kernels, "fp32").mixtures()
    x = torch.randn(7, spec.hidden)
    sums, parallel = {layer: torch.zeros_like(x) for layer in whole}, Parallelism(tp=tp, ep=ep)
    held = 0
    for rank in range(tp):
        part = Decoder(shard_spec(spec, parallel), shard_weights(spec, weights, Share(rank, parallel)), kernels, "fp32")
        for layer, mixture in part.mixtures().items():
            sums[layer] += mixture(x)
            held += sum(linear.nbytes for name, linear in mixture.linears() if name.startswith("experts."))
    for layer, mixture in whole.items():
        torch.testing.assert_close(sums[layer], mixture(x), rtol=1e-4, atol=1e-5)
    assert held == sum(
        linear.nbytes for mixture in whole.values() for name, linear in mixture.linears() if name.startswith("experts.")
    )


@pytest.mark.parametrize(
    ("model", "tp", "ep", "said"),
    [
        ("Qwen1.5-MoE-A2.7B", 8, 8, "parallel.ep is 8, but ffn.experts of Qwen1.5-MoE-A2.7B is 60"),
        ("DeepSeek-V3", 3, 1, "attention.heads of DeepSeek-V3 is 128"),
        ("Qwen3-30B-A3B", 8, 8, "attention.kv_heads of Qwen3-30B-A3B is 4"),
        ("Mamba-2.8B", 2, 1, "has others; set it to 1"),
    ],
)
def test_what_does_not_divide_is_refused(model: str, tp: int, ep: int, said: str) -> None:
    with pytest.raises(MemboundError, match=said):
        shard_spec(get_model(model), Parallelism(tp=tp, ep=ep))


@pytest.mark.parametrize(("family", "ep"), [("mixtral", 2), ("deepseek_v3", 2), ("qwen3_moe", 2), ("mixtral", 1)])
def test_two_processes_write_the_tokens_of_one(family: str, ep: int, tmp_path: Path) -> None:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    alone = runtime.decoder(scenario_of(tmp_path, family))
    together = runtime.decoders.engine_decoder(scenario_of(tmp_path, family, tp=2, ep=ep))
    for prompt in ([5, 9, 2, 7], list(range(40, 70)), [3]):
        assert list(generate_plain(together, prompt, 10)) == list(generate_plain(alone, prompt, 10))
    assert together.weight_bytes < 0.8 * alone.weight_bytes
    runtime.close()


def test_experts_in_two_processes_serve_as_one_does(tmp_path: Path) -> None:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    h100 = get_hardware("H100-SXM5")
    plain = runtime.run(scenario_of(tmp_path, "deepseek_v3"), h100)
    divided = runtime.run(scenario_of(tmp_path, "deepseek_v3", tp=2, ep=2), h100)
    runtime.close()
    assert divided.outputs == plain.outputs
