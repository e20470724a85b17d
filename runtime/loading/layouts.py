"""By which names does each family store its tensors, and in which order are their rows?

A layout is data: for each of our parts the tensors of a file that make it, row after row. A stem stands for
`stem.weight` and, for a bias, `stem.bias`; a name that begins with "=" is the whole name. `{e}` is the number of an
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from membound.runtime.arithmetic import Pairs, Placement

Sources = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a family's models lie in a file.

    `pairs` says which elements of a head turn together: i and i + rotated / 2, or neighbours. `norm_offset` is added to
    the weights of norms (Gemma keeps them around 0). With `scaled_embedding` tokens are multiplied by sqrt(hidden).
    With `qkv_by_head` each head has its q, k and v together; matrices that are `turned` are kept as [k, n].
    """

    parts: Sources
    top: Sources
    layer: str
    placement: Placement = "before"
    pairs: Pairs = "halves"
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    qkv_by_head: bool = False
    turned: bool = False

    def with_parts(self, parts: Sources, **changes: object) -> Layout:
        """This layout with some parts elsewhere."""
        return replace(self, parts={**self.parts, **parts}, **changes)  # type: ignore[arg-type]

    def sources(self, part: str, mixer: str) -> tuple[str, ...]:
        """The names, after the layer's prefix, of the tensors that make a part; () for one that it does not know.

        `mixer` is the kind of the layer's mixer, before whose parts it may stand: "gated_delta_net.o".
        """
        found = self._lookup(self.parts, f"{mixer}.{part}") or self._lookup(self.parts, part)
        if found or not part.startswith("experts."):
            return found
        _, expert, rest = part.split(".", 2)
        return tuple(name.replace("{e}", expert) for name in self._lookup(self.parts, f"experts.{{e}}.{rest}"))

    def top_sources(self, part: str) -> tuple[str, ...]:
        """The names of the tensors that make a part that no layer has."""
        return self._lookup(self.top, part)

    @staticmethod
    def _lookup(table: Sources, part: str) -> tuple[str, ...]:
        suffix = ".weight"
        if part not in table and part.endswith("_bias"):
            part, suffix = part.removesuffix("_bias"), ".bias"
        given = table.get(part, ())
        stems = (given,) if isinstance(given, str) else given
        return tuple(stem[1:] if stem.startswith("=") else stem + suffix for stem in stems)


_GATED_EXPERT = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")
LLAMA = Layout(
    parts={
        "mixer_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
        "router": "mlp.gate",
        "experts.{e}.gate_up": _GATED_EXPERT,
        "experts.{e}.down": "mlp.experts.{e}.down_proj",
    },
    top={
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
    },
    layer="model.layers.{}.",
)
_AROUND = {
    "mixer_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
GEMMA = replace(LLAMA, norm_offset=1.0, scaled_embedding=True)
GEMMA2 = GEMMA.with_parts(_AROUND, placement="around")
OLMO2 = LLAMA.with_parts(
    {"mixer_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}, placement="after"
)
MIXTRAL = LLAMA.with_parts(
    {
        "router": "block_sparse_moe.gate",
        "experts.{e}.gate_up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        "experts.{e}.down": "block_sparse_moe.experts.{e}.w2",
    }
)
QWEN_MOE = LLAMA.with_parts(
    {
        "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_down": "mlp.shared_expert.down_proj",
        "shared_gate": "mlp.shared_expert_gate",
    }
)
QWEN3_NEXT = QWEN_MOE.with_parts(
    {
        "qkvz": "linear_attn.in_proj_qkvz",
        "ba": "linear_attn.in_proj_ba",
        "gated_delta_net.o": "linear_attn.out_proj",
        "conv": "linear_attn.conv1d",
        "a": "=linear_attn.A_log",
        "dt_bias": "=linear_attn.dt_bias",
        "gated_norm": "linear_attn.norm",
    },
    norm_offset=1.0,
)
SHARED_EXPERTS = LLAMA.with_parts(
    {
        "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "shared_down": "mlp.shared_experts.down_proj",
        "router_bias": "=mlp.gate.e_score_correction_bias",
    }
)
DEEPSEEK = SHARED_EXPERTS.with_parts(
    {
        "q": "self_attn.q_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "q_a_kv_a": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "q_b": "self_attn.q_b_proj",
        "kv_b": "self_attn.kv_b_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "kv_a_norm": "self_attn.kv_a_layernorm",
    },
    pairs="neighbours",
)
PHI3 = LLAMA.with_parts({"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"})
GLM = replace(LLAMA.with_parts({"gate_up": "mlp.gate_up_proj"}), pairs="neighbours")
GLM4 = GLM.with_parts(
    {"mixer_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}, placement="around"
)
GPT_OSS = LLAMA.with_parts(
    {
        "router": "mlp.router",
        "sinks": "=self_attn.sinks",
        "experts.{e}.gate_up": "=mlp.experts.gate_up_proj",
        "experts.{e}.gate_up_bias": "=mlp.experts.gate_up_proj_bias",
        "experts.{e}.down": "=mlp.experts.down_proj",
        "experts.{e}.down_bias": "=mlp.experts.down_proj_bias",
    }
)
STARCODER2 = LLAMA.with_parts({"up": "mlp.c_fc", "down": "mlp.c_proj"})
COHERE = replace(LLAMA, placement="parallel", pairs="neighbours")
PHI = Layout(
    parts={
        "mixer_norm": "input_layernorm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
    top={"embed": "model.embed_tokens", "final_norm": "model.final_layernorm", "lm_head": "lm_head"},
    layer="model.layers.{}.",
    placement="parallel",
)
GPT2 = Layout(
    parts={
        "mixer_norm": "ln_1",
        "ffn_norm": "ln_2",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    top={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{}.",
    turned=True,
)
GPT_NEOX = Layout(
    parts={
        "mixer_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    top={"embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
    layer="gpt_neox.layers.{}.",
    placement="parallel",
    qkv_by_head=True,
)
OPT = Layout(
    parts={
        "mixer_norm": "self_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
    },
    top={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    layer="model.decoder.layers.{}.",
)
GRANITE_MOE = LLAMA.with_parts(
    {
        "router": "block_sparse_moe.router.layer",
        "experts.{e}.gate_up": "block_sparse_moe.input_linear",
        "experts.{e}.down": "block_sparse_moe.output_linear",
    }
)
MAMBA2 = Layout(
    parts={
        "mixer_norm": "norm",
        "in_proj": "mixer.in_proj",
        "out_proj": "mixer.out_proj",
        "x_proj": "mixer.x_proj",
        "dt_proj": "mixer.dt_proj",
        "conv": "mixer.conv1d",
        "a": "=mixer.A_log",
        "d": "=mixer.D",
        "dt_bias": "=mixer.dt_bias",
        "gated_norm": "mixer.norm",
    },
    top={"embed": "backbone.embeddings", "final_norm": "backbone.norm_f", "lm_head": "lm_head"},
    layer="backbone.layers.{}.",
)
MAMBA1 = MAMBA2.with_parts({"dt_bias": "=mixer.dt_proj.bias"})
_RWKV = Layout(
    parts={
        "mixer_norm": "ln1",
        "ffn_norm": "ln2",
        "o": "att.output",
        "group_norm": "att.ln_x",
        "up": "ffn.key",
        "down": "ffn.value",
        "receptance": "ffn.receptance",
    },
    top={"embed": "emb", "final_norm": "ln_out", "lm_head": "head", "embedding_norm": "blocks.0.ln0"},
    layer="blocks.{}.",
)
RWKV6 = _RWKV.with_parts(
    {
        "shift": tuple(f"=att.time_maa_{name}" for name in "xwkvrg"),
        "shift_a": "=att.time_maa_w1",
        "shift_b": "=att.time_maa_w2",
        "rkvg": ("att.receptance", "att.key", "att.value", "att.gate"),
        "decay": "=att.time_decay",
        "decay_a": "=att.time_decay_w1",
        "decay_b": "=att.time_decay_w2",
        "bonus": "=att.time_faaaa",
        "ffn_shift": ("=ffn.time_maa_k", "=ffn.time_maa_r"),
    }
)
RWKV7 = _RWKV.with_parts(
    {
        "shift": tuple(f"=att.x_{name}" for name in "rwkvag"),
        "rkv": ("att.receptance", "att.key", "att.value"),
        "low_rank_a": tuple(f"=att.{name}1" for name in "wavg"),
        "low_rank_b": tuple(f"=att.{name}2" for name in "wavg"),
        "decay": "=att.w0",
        "rate": "=att.a0",
        "value": "=att.v0",
        "k_k": "=att.k_k",
        "k_a": "=att.k_a",
        "r_k": "=att.r_k",
        "ffn_shift": "=ffn.x_k",
    }
)

# by the architecture of a config.json
SAFETENSORS: dict[str, Layout] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), LLAMA),
    **dict.fromkeys(("SmolLM3ForCausalLM", "SeedOssForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM"), LLAMA),
    **dict.fromkeys(("StableLmForCausalLM", "Qwen3MoeForCausalLM"), LLAMA),
    "Qwen2MoeForCausalLM": QWEN_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "MixtralForCausalLM": MIXTRAL,
    "GemmaForCausalLM": GEMMA,
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), GEMMA2),
    "Mistral3ForConditionalGeneration": LLAMA,
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), OLMO2),
    "Phi3ForCausalLM": PHI3,
    "PhiForCausalLM": PHI,
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), DEEPSEEK),
    "Glm4MoeForCausalLM": SHARED_EXPERTS,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "GptOssForCausalLM": GPT_OSS,
    "Starcoder2ForCausalLM": STARCODER2,
    "GraniteForCausalLM": LLAMA,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "OPTForCausalLM": OPT,
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), COHERE),
    "Mamba2ForCausalLM": MAMBA2,
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM"), MAMBA1),
    **dict.fromkeys(("Rwkv6ForCausalLM", "RWKV6ForCausalLM"), RWKV6),
    **dict.fromkeys(("Rwkv7ForCausalLM", "RWKV7ForCausalLM"), RWKV7),
}

GGUF_LLAMA = Layout(
    parts={
        "mixer_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate_up": ("ffn_gate", "ffn_up"),
        "up": "ffn_up",
        "down": "ffn_down",
        "router": "ffn_gate_inp",
        "experts.{e}.gate_up": ("ffn_gate_exps", "ffn_up_exps"),
        "experts.{e}.down": "ffn_down_exps",
        "shared_gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
        "shared_down": "ffn_down_shexp",
        "shared_gate": "ffn_gate_inp_shexp",
    },
    top={"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"},
    layer="blk.{}.",
)
# converters add Gemma's 1 to its norms, so that they have no offset here
_GGUF_GEMMA = replace(GGUF_LLAMA, scaled_embedding=True)
_GGUF_GEMMA2 = _GGUF_GEMMA.with_parts(
    {"mixer_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}, placement="around"
)
_GGUF_MAMBA = Layout(
    parts={
        "mixer_norm": "attn_norm",
        "in_proj": "ssm_in",
        "out_proj": "ssm_out",
        "x_proj": "ssm_x",
        "dt_proj": "ssm_dt",
        "conv": "ssm_conv1d",
        "a": "=ssm_a",
        "d": "=ssm_d",
        "dt_bias": "=ssm_dt.bias",
        "gated_norm": "ssm_norm",
    },
    top={"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"},
    layer="blk.{}.",
)
# by `general.architecture`; llama.cpp reorders q and k of llama, so that neighbours turn together
GGUF: dict[str, Layout] = {
    "llama": replace(GGUF_LLAMA, pairs="neighbours"),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2"), GGUF_LLAMA),
    "gemma": _GGUF_GEMMA,
    **dict.fromkeys(("gemma2", "gemma3"), _GGUF_GEMMA2),
    "phi3": GGUF_LLAMA.with_parts({"qkv": "attn_qkv", "gate_up": "ffn_up"}),
    "olmo2": GGUF_LLAMA.with_parts(
        {"mixer_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}, placement="after"
    ),
    "deepseek2": GGUF_LLAMA.with_parts(
        {
            "q": "attn_q",
            "kv_a": "attn_kv_a_mqa",
            "q_a_kv_a": ("attn_q_a", "attn_kv_a_mqa"),
            "q_b": "attn_q_b",
            "kv_b": "attn_kv_b",
            "q_a_norm": "attn_q_a_norm",
            "kv_a_norm": "attn_kv_a_norm",
            "router_bias": "=exp_probs_b.bias",
        },
        pairs="neighbours",
    ),
    "gpt-oss": GGUF_LLAMA.with_parts({"ffn_norm": "post_attention_norm", "sinks": "attn_sinks"}),
    **dict.fromkeys(("mamba", "mamba2"), _GGUF_MAMBA),
}
