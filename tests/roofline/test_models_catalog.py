"""Does the catalog hold the models that tables name, under all their names, with the published sizes?"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from membound.roofline.models import ModelError, catalog, get_model, normalise_name
from membound.roofline.models.catalog import catalog as load_catalog
from membound.roofline.models.files import resolve_model
from membound.roofline.models.names import lookup_keys

FACTS = Path(__file__).parents[3] / "shared" / "facts"


def rows(name: str) -> Iterator[dict[str, str]]:
    path = FACTS / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize("name", [name for name in catalog() if get_model(name).published_params_b])
def test_parameters_are_within_half_a_percent_of_the_published_count(name: str) -> None:
    spec = get_model(name)
    assert spec.published_params_source
    assert (spec.params + spec.idle_params) / 1e9 == pytest.approx(spec.published_params_b, rel=0.005)


def test_most_models_have_a_published_count() -> None:
    without = [name for name in catalog() if get_model(name).published_params_b is None]
    assert len(without) < 0.07 * len(catalog())


def test_the_facts_models_are_here_with_their_parameters_and_kv_bytes() -> None:
    for row in rows("models.csv"):
        spec = get_model(row["model"])
        assert spec.published_params_b is not None, spec.name
        assert spec.kv_bytes_per_token(16) == float(row["kv_bytes_per_token_fp16"]), spec.name
        assert spec.params / 1e9 == pytest.approx(float(row["total_params_B(computed)"]), rel=0.006), spec.name
        assert spec.active_params / 1e9 == pytest.approx(float(row["active_params_B(computed)"]), rel=0.01), spec.name
        assert (spec.layers, spec.hidden) == (int(row["layers"]), int(row["hidden"]))


@pytest.mark.parametrize("table", ["measured_e2e_dev.csv", "measured_ops_dev.csv", "peer_predictions.csv"])
def test_every_model_that_a_table_names_is_known(table: str) -> None:
    for name in {row["model"] for row in rows(table)} - {""}:
        get_model(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("smollm2-135m", "SmolLM2-135M"),
        ("mlx-community/Qwen3-4B-Instruct-2507-4bit-g32", "Qwen3-4B"),
        ("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M", "Qwen3-30B-A3B"),
        ("google/gemma-3-27b-it-qat-q4_0-gguf", "Gemma-3-27B"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "DeepSeek-V3"),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4", "Mistral-Large-3"),
        ("cyankiwi/GLM-4.7-Flash-AWQ-4bit", "GLM-4.7-Flash"),
        ("llama 8B Q4_K - Medium", "Llama-3.1-8B"),
        ("deepseek-r1:70b", "Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct-FP8", "Llama-3.1-8B"),
        ("Llama 2-13B", "Llama-2-13B"),
        ("llama2-70b-99.9", "Llama-2-70B"),
        ("LLaMA 70B", "Llama-2-70B"),
        ("Vicuna-7B-v1.3", "Llama-7B"),
        ("Mistral-7B-Instruct-v0.1", "Mistral-7B-v0.1"),
        ("Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "Qwen3-235B-A22B"),
        ("Qwen2.5-72B-Instruct-GPTQ-Int4", "Qwen2.5-72B"),
        ("gemma-2b-it", "Gemma-2B"),
        ("gemma-2-2b-it", "Gemma-2-2B"),
        ("nvidia/DeepSeek-R1-0528-NVFP4", "DeepSeek-V3"),
        ("Qwen2.5-7B-Instruct.Q4_K_M", "Qwen2.5-7B"),
        ("GPT-J 6B", "GPT-J-6B"),
        ("gptj-99.9", "GPT-J-6B"),
        ("LLaMA-v2-7B", "Llama-2-7B"),
        ("lmsys/vicuna-7b-v1.5-16k", "Llama-7B"),
        ("DeepSeek-V3-0324", "DeepSeek-V3"),
        ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "Llama-3.1-8B"),
        ("qwen3 8B Q4_K - Medium", "Qwen3-8B"),
        ("Phi-3-mini-128k-instruct", "Phi-3-mini-128k"),
        ("llama3_1-405b", "Llama-3.1-405B"),
        ("llama3.1-8b-edge", "Llama-3.1-8B"),
        ("RedHatAI/Qwen3-8B-FP8-block", "Qwen3-8B"),
        ("unsloth/Qwen3-32B-unsloth-bnb-4bit", "Qwen3-32B"),
        ("qwen3:30b", "Qwen3-30B-A3B"),
        ("qwen3-coder:30b-a3b-q4_K_M", "Qwen3-30B-A3B"),
        ("deepseek-v3.1:671b", "DeepSeek-V3"),
        ("kimi-k2:1t", "Kimi-K2"),
        ("phi4-mini:3.8b", "Phi-4-mini"),
        ("command-r7b:7b", "Command-R7B"),
        ("llama4:16x17b", "Llama-4-Scout-17B-16E"),
    ],
)
def test_a_name_is_found_with_what_does_not_change_a_shape(name: str, known: str) -> None:
    assert get_model(name) is get_model(known)


def test_numbers_in_names_are_not_run_together() -> None:
    assert normalise_name("Llama-2-13B") == normalise_name("llama2_13b") == "llama2-13b"
    assert normalise_name("Llama-213B") == "llama213b"
    assert normalise_name("Qwen3-8B-2507") != normalise_name("Qwen3-8B")
    assert list(lookup_keys("Qwen3-8B-v1.0-2507")) == ["qwen3-8bv1.0-2507", "qwen3-8bv1.0", "qwen3-8b"]
    assert list(lookup_keys("LLaMA-v9-7B")) == ["llamav9-7b"]  # a version before the size is another model


@pytest.mark.parametrize("name", ["kimi-k2:70b", "phi4-mini:0b", "qwen3:31b"])
def test_a_size_that_no_model_of_the_family_has_is_unknown(name: str) -> None:
    with pytest.raises(ModelError, match="not in the catalog"):
        get_model(name)


def test_an_unknown_name_gets_close_matches_or_examples() -> None:
    with pytest.raises(ModelError, match=r"'Llama-3\.1-9B' is not in the catalog: did you mean .*Llama-3\.1-8B"):
        get_model("Llama-3.1-9B")
    with pytest.raises(ModelError, match=r"known are \d+ models, such as Llama-3\.1-8B"):
        get_model("zzzz")
    with pytest.raises(ModelError, match="''"):
        get_model("")


def test_every_name_and_alias_means_one_model() -> None:
    for name in catalog():
        for alias in (name, *get_model(name).aliases):
            assert get_model(alias).name == name


def test_loading_is_quick_and_one_model_does_not_check_the_others() -> None:
    def once_s() -> float:
        load_catalog.cache_clear()
        start_s = time.process_time()
        get_model("Qwen3-8B")
        return time.process_time() - start_s

    # 0.06 s alone on two cores; what another test left to the garbage collector may fall into one of three.
    assert min(once_s() for _ in range(3)) < 0.5
    assert len(load_catalog()._specs) == 1


def test_a_model_is_also_a_folder_or_a_yaml_file(tmp_path: Path) -> None:
    config = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99, '
    config += '"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512}'
    (tmp_path / "config.json").write_text(config)
    assert resolve_model(str(tmp_path)) == resolve_model(str(tmp_path / "config.json"))
    yaml = "name: mine\nlayers: 2\nhidden: 64\nvocab: 99\ntie_embeddings: false\nmax_context: 512\n"
    yaml += "attention: {kind: gqa, heads: 4, kv_heads: 4, head_dim: 16}\nffn: {kind: gated, intermediate: 128}\n"
    (tmp_path / "mine.yaml").write_text(yaml)
    mine = resolve_model(str(tmp_path / "mine.yaml"))
    assert mine.groups() == resolve_model(str(tmp_path)).groups() and "mine.yaml" in mine.source


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", ["a.json", "not JSON", "config.json"]),
        ("a.json", "[1]", ["a.json", "config.json"]),
        ("a.yaml", "a: [", ["a.yaml", "not YAML"]),
        ("a.yaml", "1: 2", ["a.yaml", "fields"]),
        ("a.yaml", "name: x", ["layers", "x", "required"]),
        ("a.json", None, ["a.json", "cannot be read"]),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_sentence(
    name: str, content: str | None, words: list[str], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as refusal:
        resolve_model(str(tmp_path / name))
    message = str(refusal.value)
    assert all(word in message for word in words) and "\n" not in message, message
