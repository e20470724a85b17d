"""Do GGUF and safetensors give the same weights, and are wrong files refused in a sentence?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from membound.roofline.models import ModelSpec, get_model
from membound.roofline.reading.gguf_file import GgufError, GgufFile
from membound.runtime.loading.layouts import GGUF_LLAMA, LLAMA
from membound.runtime.loading.weights import Weights, WeightsError, load_gguf, load_safetensors, random_weights

TINY = ("tiny_qwen2", "tiny_qwen3", "tiny_llama3")


def write_gguf(folder: Path, path: Path, without: str = "") -> None:
    """Converts a Hugging Face folder as llama.cpp does: q and k rows of llama interleaved, vectors in fp32."""
    spec, weights = load_safetensors(folder)
    arch = json.loads((folder / "config.json").read_text())["model_type"]
    tensors = load_file(folder / "model.safetensors")
    parts = ("mixer_norm", "ffn_norm", "qkv", "qkv_bias", "o", "q_norm", "k_norm", "gate_up", "down")
    top = ("embed", "final_norm", "lm_head")
    gguf_names = {
        theirs: ours
        for sources in (
            *((LLAMA.sources(part, "gqa"), GGUF_LLAMA.sources(part, "gqa")) for part in parts),
            *((LLAMA.top_sources(part), GGUF_LLAMA.top_sources(part)) for part in top),
        )
        for theirs, ours in zip(*sources, strict=True)
    }
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn.intermediate)
    writer.add_head_count(spec.attention.heads)
    writer.add_head_count_kv(spec.attention.kv_heads)
    writer.add_key_length(spec.attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab)
    if weights.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", weights.rope_factors.numpy())
    for name, tensor in tensors.items():
        prefix, rest = "", name
        if name.startswith("model.layers."):
            i, rest = name.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{i}."
        for part, heads in (("q_proj.weight", spec.attention.heads), ("k_proj.weight", spec.attention.kv_heads)):
            if arch == "llama" and rest.endswith(part):
                tensor = interleaved(tensor, heads)
        if prefix + gguf_names[rest] != without:
            writer.add_tensor(prefix + gguf_names[rest], tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's `LlamaModel.permute`."""
    n, k = weight.shape
    return weight.reshape(heads, 2, n // heads // 2, k).swapaxes(1, 2).reshape(n, k)


def assert_same(left: Weights, right: Weights) -> None:
    def named(weights: Weights) -> dict[str, Tensor | None]:
        top = {key: value for key, value in vars(weights).items() if key not in ("layers", "origin", "arithmetic")}
        return top | {f"{i}.{k}": v for i, layer in enumerate(weights.layers) for k, v in layer.items()}

    ours, theirs = named(left), named(right)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-6, atol=0, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", TINY)
def test_a_gguf_gives_the_weights_of_the_safetensors_it_was_made_from(
    name: str, reference: Path, tmp_path: Path
) -> None:
    write_gguf(reference / name, tmp_path / "model.gguf")
    spec, weights = load_gguf(tmp_path / "model.gguf")
    expected_spec, expected = load_safetensors(reference / name)
    provenance = {"name", "source", "rope_scaling", "norm_eps"}  # a GGUF holds the scaling as a tensor, eps in fp32
    assert spec.model_dump(exclude=provenance) == expected_spec.model_dump(exclude=provenance)
    assert_same(weights, expected)


def test_shapes_precisions_and_tying_are_as_promised(smollm2: tuple[ModelSpec, Weights]) -> None:
    spec, weights = smollm2
    assert weights.lm_head is weights.embed and weights.embed.shape == (49152, 576)
    layer = weights.layers[-1]
    assert {name: tuple(layer[name].shape) for name, _, _ in spec.layer_linears()} == {
        name: (n, k) for name, n, k in spec.layer_linears()
    }
    assert {layer[name].dtype for name, _, _ in spec.layer_linears()} == {torch.bfloat16}
    assert {layer["mixer_norm"].dtype, layer["ffn_norm"].dtype, weights.final_norm.dtype} == {torch.float32}
    assert weights.origin == "SmolLM2-135M-Instruct.Q4_1.gguf, dequantized to bf16: these weights were 4-bit once"


def test_moving_weights_keeps_them_tied(reference: Path) -> None:
    _, weights = load_safetensors(reference / "tiny_qwen2")
    moved = weights.to("cpu")
    assert moved.lm_head is moved.embed
    assert_same(moved, weights)


def test_a_sharded_folder_is_one_model(reference: Path, tmp_path: Path) -> None:
    source = reference / "tiny_qwen3"
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_safetensors(tmp_path)[1], load_safetensors(source)[1])


def test_random_weights_have_the_shapes_and_the_number_of_layers_asked_for() -> None:
    spec = get_model("Qwen3-8B").model_copy(update={"vocab": 1000, "hidden": 512})
    weights = random_weights(spec, seed=1, layers=2)
    assert len(weights.layers) == 2 and weights.lm_head is not weights.embed
    for layer in weights.layers:
        assert {(name, *layer[name].shape) for name, _, _ in spec.layer_linears()} == set(spec.layer_linears())
        assert "q_norm" in layer and "qkv_bias" not in layer
    down = weights.layers[0]["down"].float()
    assert down.std().item() == pytest.approx(spec.ffn.intermediate**-0.5, rel=0.02)
    assert "2 of 36 layers" in weights.origin


def test_random_weights_are_equal_for_equal_seeds_only() -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"vocab": 100, "layers": 1})
    assert_same(random_weights(spec, seed=3), random_weights(spec, seed=3))
    assert not torch.equal(random_weights(spec, seed=3).embed, random_weights(spec, seed=4).embed)


def test_a_missing_tensor_is_named(reference: Path, tmp_path: Path) -> None:
    write_gguf(reference / "tiny_qwen2", tmp_path / "model.gguf", without="blk.1.attn_k.bias")
    with pytest.raises(GgufError, match=r"model\.gguf has no tensor blk\.1\.attn_k\.bias"):
        load_gguf(tmp_path / "model.gguf")


def copy_of(folder: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_a_wrong_folder_is_refused_in_one_sentence(reference: Path, tmp_path: Path) -> None:
    source = reference / "tiny_qwen3"
    with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
        load_safetensors(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"shape \[80, 48\].*needs \[88, 48\]|needs \[176, 48\]"):
        load_safetensors(copy_of(source, tmp_path / "shape", intermediate_size=88))
    with pytest.raises(WeightsError, match=r"has no tensor model\.layers\.2\."):
        load_safetensors(copy_of(source, tmp_path / "deep", num_hidden_layers=3))
    damaged = copy_of(source, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read as safetensors"):
        load_safetensors(damaged)
    (damaged / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json is not JSON"):
        load_safetensors(damaged)


def test_quantized_safetensors_are_refused(reference: Path, tmp_path: Path) -> None:
    folder = copy_of(reference / "tiny_qwen3", tmp_path / "int8")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"down_proj\.weight is torch\.int8: it must be float32, .* with scales"):
        load_safetensors(folder)


def test_smollm2_opens_with_all_its_tensors_and_metadata(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    assert len(file.tensors) == 272 and len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.tensors["blk.29.ffn_down.weight"].shape == (576, 1536)
