"""Does the decoder compute every family as transformers does?

Each model is tiny and random, made from its config object; weights are rounded to bf16 in both, all else is fp32. What
is left is the order of summation: 2e-4 on logits that spread over a few units.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.loading.packed import from_fp8, from_mxfp4
from membound.runtime.loading.weights import Weights, load_gguf, load_safetensors
from membound.runtime.plain import single_sequence

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4
BLOCK_SIZE = 8

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HEADS: dict[str, Any] = {"head_dim": 16}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
# name: (config class, what differs from _SMALL); windows are shorter than the test's sequences
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 7, **_HEADS}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-one-kv-head": ("Qwen3", {**_HEADS, "num_key_value_heads": 1}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**_MOE, "num_experts": 6, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, **_HEADS, "num_experts": 6, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma": ("Gemma", {**_HEADS, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        {
            **_HEADS,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **_HEADS,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**_MOE, **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **_MOE,
            **_LATENT,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek-v3": ("DeepseekV3", {**_MOE, **_LATENT, "q_lora_rank": 20, "rope_parameters": _YARN}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "glm": ("Glm", {**_HEADS, "attention_bias": True}),
    "glm4": ("Glm4", {**_HEADS, "attention_bias": True}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **_MOE,
            **_HEADS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_HEADS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None, "truncate": False},
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 6, "sliding_window_pattern": 3}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25, "hidden_size": 64}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.7}),
    "gpt2": ("GPT2", {"n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "gpt-neox-in-turn": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4, "use_parallel_residual": False}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 16,
            "use_bias": True,
        },
    ),
    "mamba": ("Mamba", {"state_size": 8, "intermediate_size": 96, "time_step_rank": 6}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_MOE,
            **_HEADS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


def tiny_model(family: str, folder: Path, **more: Any) -> Callable[[list[int]], Tensor]:
    """Saves a random model of a family, and returns what transformers computes: logits [tokens, vocab] of tokens."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SMALL | changes | more, attn_implementation="eager")
    torch.manual_seed(len(family))
    model = (
        getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM")(
            config
        )
        .float()
        .eval()
    )
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.copy_((torch.randn_like(parameter) * parameter.shape[-1] ** -0.5).bfloat16())
            elif parameter.is_floating_point():  # norms and biases are seldom all ones and zeros
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0].detach()


class Session:
    """Two sequences in scattered blocks, step by step."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cache: KvCache = decoder.new_cache(16, BLOCK_SIZE, seats=3)
        self.table = torch.tensor([[5, 2, 7, 9, 12, 3], [1, 6, 0, 8, 10, 4]], dtype=torch.int32)

    def step(self, *pieces: tuple[int, list[int], int, int]) -> list[Tensor]:
        """Takes tokens `start` to `end` of sequences; returns the logits of all of them, piece by piece."""
        positions = [p for _, _, start, end in pieces for p in range(start, end)]
        slots = [
            int(self.table[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for s, _, start, end in pieces
            for p in range(start, end)
        ]
        lengths = [end - start for _, _, start, end in pieces]
        batch = RaggedBatch(
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_len=torch.tensor([end for *_, end in pieces], dtype=torch.int32),
            block_table=self.table[[s for s, *_ in pieces]],
            most_queries=max(lengths),
            seats=torch.tensor([(2, 0)[s] for s, *_ in pieces]),
        )
        tokens = torch.tensor([t for _, ids, start, end in pieces for t in ids[start:end]])
        logits = self.decoder.forward(tokens, batch, self.cache, torch.arange(len(tokens)))
        return list(logits.split(lengths))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """Whole, and in chunks beside another sequence, and token by token."""
    reference = tiny_model(family, tmp_path)
    decoder = Decoder(*load_safetensors(tmp_path), ExactKernels(), "fp32")
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(3, 96, (n,), generator=generator).tolist() for n in (37, 22))
    expected = {0: reference(a), 1: reference(b)}
    assert expected[0].std() > 0.1

    num_blocks = 5
    batch = single_sequence(0, len(a), num_blocks, decoder.device)
    whole = decoder.forward(torch.tensor(a), batch, decoder.new_cache(num_blocks, BLOCK_SIZE * 2), torch.arange(len(a)))
    torch.testing.assert_close(whole, expected[0], rtol=0, atol=TOLERANCE)

    session = Session(decoder)
    steps = [
        ((0, a, 0, 13), (1, b, 0, 20)),
        ((1, b, 20, 21), (0, a, 13, 35)),
        ((0, a, 35, 36), (1, b, 21, 22)),
        ((0, a, 36, 37),),
    ]
    for pieces in steps:
        for (sequence, _, start, end), logits in zip(pieces, session.step(*pieces), strict=True):
            torch.testing.assert_close(logits, expected[sequence][start:end], rtol=0, atol=TOLERANCE)


class HalfKernels(TorchKernels):
    """The plain kernels with activations in bf16, as a GPU has them."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_dtype = torch.bfloat16


@pytest.mark.parametrize("family", ["gemma2", "deepseek-v3", "gpt-oss", "qwen3-next", "glm4-moe", "mamba2"])
def test_rounding_activations_or_k_and_v_costs_little(family: str, tmp_path: Path) -> None:
    """On average a twentieth of the logits' spread: more where a rounded score sends a token to another expert."""
    reference = tiny_model(family, tmp_path)
    model, ids = load_safetensors(tmp_path), list(range(5, 35))
    expected = reference(ids)
    for kernels in (HalfKernels(), kernels_for("cpu")):
        decoder = Decoder(*model, kernels, "bf16")
        cache, got = decoder.new_cache(2, 16), []
        for start, end in ((0, 29), (29, 30)):
            batch = single_sequence(start, end, 2, decoder.device)
            got.append(decoder.forward(torch.tensor(ids[start:end]), batch, cache, torch.arange(end - start)))
        assert (torch.cat(got) - expected).abs().mean() < expected.std() / 20


_EVEN_YARN = {"rope_parameters": _YARN | {"mscale": 0.9}}
# family: the architecture of its GGUF, and what of the family a GGUF has no words for
GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {}),
    "qwen2-moe": ("qwen2moe", {"mlp_only_layers": []}),
    "qwen3-moe": ("qwen3moe", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3}),
    "deepseek-v2": ("deepseek2", {}),
    "deepseek-v2-groups": ("deepseek2", _EVEN_YARN),
    "deepseek-v3": ("deepseek2", _EVEN_YARN),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {}),
    "gpt-oss": ("gpt-oss", {}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {"use_bias": False}),  # llama.cpp has no biases there
}


@pytest.mark.parametrize("family", GGUF)
def test_a_gguf_is_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    arch, changes = GGUF[family]
    tiny_model(family, tmp_path, **changes)
    write_gguf(tmp_path, arch, tmp_path / "model.gguf")
    spec, weights = load_gguf(tmp_path / "model.gguf")
    expected_spec, expected = load_safetensors(tmp_path)
    assert (spec.params, spec.max_context) == (expected_spec.params, expected_spec.max_context)
    assert_same(weights, expected)
    ids = torch.arange(5, 30)
    logits = []
    for model in ((spec, weights), (expected_spec, expected)):
        decoder = Decoder(*model, ExactKernels(), "fp32")
        batch = single_sequence(0, len(ids), 2, decoder.device)
        logits.append(decoder.forward(ids, batch, decoder.new_cache(2, 16), torch.arange(len(ids))))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def assert_same(left: Weights, right: Weights) -> None:
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=0, msg=lambda t, n=name: f"{n}: {t}")
    torch.testing.assert_close(left.embed, right.embed)
    torch.testing.assert_close(left.lm_head, right.lm_head)


def write_gguf(folder: Path, arch: str, path: Path) -> None:
    """Converts a folder as llama.cpp's script does; the names of tensors are those of its package."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata_of(config, arch).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else add
        add(f"{arch}.{key}", value)
    enum = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    for name, tensor in converted(load_file(folder / "model.safetensors"), config, arch).items():
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(stem)
        assert found, name
        if suffix not in ("A_log", "D") and not found.endswith((".weight", ".bias")):
            found = f"{found}.{suffix if suffix == 'bias' else 'weight'}"
        writer.add_tensor(found, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What the script writes of a config.json."""
    heads, rope = config.get("num_attention_heads"), config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 1 << 20),
        "embedding_length": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim"),
        "attention.sliding_window": config.get("sliding_window"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("layer_norm_epsilon")),
        "attention.layer_norm_epsilon": config.get("norm_epsilon"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.freq_base": rope.get("rope_theta"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "leading_dense_block_count": config.get("first_k_dense_replace"),
    }
    kind = rope.get("rope_type", "default")
    if kind != "default":
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if arch == "deepseek2":
        nope, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        found |= {
            "attention.key_length": nope + turned,
            "attention.value_length": config["v_head_dim"],
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.q_lora_rank": config["q_lora_rank"],
            "rope.dimension_count": turned,
            "rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0),
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": bool(config["norm_topk_prob"]),
            "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        }
        if config["model_type"] == "deepseek_v3" or config["topk_method"] != "greedy":
            found |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if arch in ("mamba", "mamba2"):
        inner = config["intermediate_size"] if arch == "mamba" else config["expand"] * config["hidden_size"]
        found |= {
            "ssm.conv_kernel": config["conv_kernel"],
            "ssm.inner_size": inner,
            "ssm.state_size": config["state_size"],
            "ssm.time_step_rank": config["num_heads"] if arch == "mamba2" else config["time_step_rank"],
            "ssm.group_count": config.get("n_groups"),
        }
    return {key: value for key, value in found.items() if value is not None}


def converted(tensors: dict[str, Tensor], config: dict[str, Any], arch: str) -> dict[str, Tensor]:
    """The tensors under the names that the package knows: experts stacked, what is folded folded."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if "A_log" in name:
            tensor = -tensor.exp().unsqueeze(1) if arch == "mamba2" else -tensor.exp()
        elif name.endswith(".D") and arch == "mamba2":
            tensor = tensor.unsqueeze(1)
        elif name.endswith("mixer.norm.weight"):
            tensor = tensor.unflatten(0, (config["n_groups"], -1))
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        elif arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        elif name.endswith("kv_b_proj.weight") and config["model_type"] == "deepseek_v3":
            by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
            k, tensor = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = k.transpose(1, 2)
            name = name.replace("kv_b_proj", "v_b_proj")
        elif name.endswith("shared_expert_gate.weight"):
            tensor = tensor.flatten()
        if ".experts.gate_up_proj" in name:  # gpt-oss: one tensor of all experts, gate and up alternating
            suffix = "bias" if name.endswith("bias") else "weight"
            rows = tensor.unsqueeze(1) if suffix == "bias" else tensor
            gate, up = (rows[..., i::2].transpose(1, 2) for i in range(2))
            for part, piece in (("gate", gate), ("up", up)):
                whole = piece.squeeze(-1) if suffix == "bias" else piece
                found[name.split("gate_up_proj")[0] + f"{part}_proj.{suffix}"] = whole
        elif ".experts.down_proj" in name and name.count(".experts.down_proj_bias"):
            found[name.replace("down_proj_bias", "down_proj.bias")] = tensor
        elif name.endswith(".experts.down_proj"):
            found[name + ".weight"] = tensor.transpose(1, 2)
        elif match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}


def test_fp8_in_blocks_is_unpacked(tmp_path: Path) -> None:
    """DeepSeek-V3 is published so: a scale for each 128 x 128 elements, here for smaller blocks too."""
    generator = torch.Generator().manual_seed(0)
    for shape, grid in (((300, 200), (3, 2)), ((64, 48), (1, 1)), ((40, 16), (40, 1)), ((128, 256), (1, 2))):
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(grid, generator=generator) + 0.5
        row, column = (
            torch.arange(size) // (128 if parts < size else 1) for size, parts in zip(shape, grid, strict=True)
        )
        expected = values.float() * scale[row[:, None].clamp(max=grid[0] - 1), column.clamp(max=grid[1] - 1)]
        torch.testing.assert_close(from_fp8(values, scale), expected)


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (3, 8, 2), dtype=torch.uint8, generator=generator)
    torch.testing.assert_close(from_mxfp4(blocks, scales), convert(blocks, scales, dtype=torch.float32))


def test_a_folder_in_fp8_and_one_level_further_in_is_read(tmp_path: Path) -> None:
    """A Gemma 3 as its multimodal releases store it, one matrix of it in fp8."""
    tiny_model("gemma3", tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    spec, plain = load_safetensors(tmp_path)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "tie_word_embeddings": True}
    name, scale = "model.layers.1.self_attn.o_proj.weight", torch.tensor([[0.25]])
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    moved = {f"language_model.{key}": value for key, value in tensors.items()} | {
        f"language_model.{name}_scale_inv": scale
    }
    save_file(moved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(outer))
    inner_spec, inner = load_safetensors(tmp_path)
    assert inner_spec.stack == spec.stack and inner.arithmetic == plain.arithmetic
    exact = (tensors[name].float() * scale).bfloat16()
    torch.testing.assert_close(inner.layers[1]["o"], exact)
    torch.testing.assert_close(inner.layers[2]["o"], plain.layers[2]["o"])
