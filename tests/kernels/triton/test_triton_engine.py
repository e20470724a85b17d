"""The engine serves on the Triton kernels with captured steps: it emits what the plain decoder finds likeliest.

A capture is stood in for by calling the same function on the same buffers again. Rounding to bf16 may choose another
token where two are equally likely: each emitted one is within 6 % of the spread of the plain logits from the largest.
"""

from __future__ import annotations

import pytest
import yaml

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.roofline.hardware import get_hardware  # noqa: E402
from membound.roofline.models import get_model  # noqa: E402
from membound.roofline.scenario import load_scenario, parse_scenario  # noqa: E402
from membound.runtime.cuda_graphs import DecodeGraphs, batch_buckets, captured_queries  # noqa: E402
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.engine import Runtime  # noqa: E402
from membound.runtime.kv.build import store_problem  # noqa: E402
from membound.runtime.plain import single_sequence  # noqa: E402
from membound.runtime.refusals import unmeasured, unmeasured_scenario  # noqa: E402
from membound.simulator.run import run  # noqa: E402
from membound.simulator.scheduling.recorder import Recorder  # noqa: E402
from membound.simulator.scheduling.workload import requests_for  # noqa: E402

MODEL = {
    "name": "tiny",
    "layers": 2,
    "hidden": 32,
    "vocab": 128,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 32},
    "ffn": {"kind": "gated", "intermediate": 48},
    "tie_embeddings": False,
    "max_context": 256,
    "source": "a test",
}
MIXTURE = {"kind": "moe", "experts": 4, "top_k": 2, "intermediate": 32}
LATENT = {
    "kind": "mla",
    "heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
STATE = {"kind": "mamba2", "heads": 4, "head_dim": 16, "d_state": 8}
KIVI4 = {"name": "kv_quantization", "format": "kivi4"}
# What of the model, and what of the scenario.
CASES = {
    "drafts": ({}, {"techniques": [{"name": "ngram_speculation", "gamma": 3}]}),
    "a tree of a head's drafts": ({}, {"techniques": [{"name": "medusa", "heads": 2, "tree_size": 4}]}),
    "latents and experts": ({"attention": LATENT, "ffn": MIXTURE}, {}),
    "states": ({"overrides": [{"layers": "1::2", "attention": STATE}]}, {}),
    "kivi": ({}, {"techniques": [KIVI4]}),
    "kivi and drafts": ({}, {"techniques": [KIVI4, {"name": "ngram_speculation", "gamma": 3}]}),
}


def replaying(steps):
    """In place of `decode_graphs`: graphs that call the decoder again, and list the steps that they ran."""

    def graphs_of(decoder, kv, max_blocks, max_num_seqs, guesses):
        assert decoder.graph_problem is None and not any(getattr(layer, "on_host", False) for layer in kv)
        exact, queries = not decoder.ignores_padding, captured_queries(decoder, kv, guesses)
        buckets = batch_buckets(max_num_seqs, exact=exact)

        def capture(function):
            def replay():
                steps.append(function)
                return function()

            return replay

        return DecodeGraphs(decoder, kv, max_blocks, buckets, capture, queries=queries, exact=exact), None

    return graphs_of


@pytest.mark.parametrize("case", CASES)
def test_what_is_served_by_captured_steps_is_the_plain_decoders_choice(case, tmp_path, monkeypatch, device):
    model, changes = CASES[case]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL | model))
    scenario = parse_scenario(
        {
            "name": "served",
            "model": str(tmp_path / "model.yaml"),
            "hardware": "A100-SXM4-80GB",
            "engine": {"max_num_seqs": 3, "max_batched_tokens": 64, "block_size": 16},
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 3},
                "requests": 3,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 8, "high": 20}},
                "output_tokens": {"kind": "fixed", "tokens": 5},
            },
            **changes,
        }
    )
    steps = []
    monkeypatch.setattr("membound.runtime.assembly.decode_graphs", replaying(steps))
    runtime, recorder = Runtime(device.type, kernels=TritonKernels(device.type)), Recorder()
    result = runtime.run(scenario, get_hardware(scenario.hardware), recorder=recorder)
    assert steps and not result.provenance.emulated
    loaded = runtime.model(scenario)
    plain = Decoder(loaded.spec, loaded.weights, TorchKernels(), "bf16")
    for request in requests_for(scenario, vocab=128):
        emitted = list(recorder.outputs[request.id])
        ids = torch.tensor([*request.prompt_ids, *emitted])
        batch = single_sequence(0, len(ids), 16, torch.device("cpu"))
        rows = torch.arange(len(request.prompt_ids) - 1, len(ids) - 1)
        logits = plain.forward(ids, batch, plain.new_cache(16, 16), rows)
        chosen = logits.gather(1, torch.tensor(emitted)[:, None])[:, 0]
        assert (logits.amax(1) - chosen <= 0.06 * (logits.amax(1) - logits.amin(1))).all(), request.id


def test_the_technique_table_of_a_gpu_runs_in_every_row_and_fewer_bytes_are_faster():
    """Predicted for the H200, where one would be measured."""
    scenario = load_scenario("llama-8b-gpu").with_value("hardware", "H200-SXM")
    (_, alone), *_, (_, together) = scenario.points()
    tpot = {"plain": tpot_s(alone), "plain of many": tpot_s(together)}
    for variant in scenario.compared():
        many = variant.scenario(together.with_techniques(()))
        assert unmeasured(many.setup) is None and unmeasured_scenario(many) is None, variant.name
        assert store_problem(many.setup, many.engine, get_model(many.model)) is None, variant.name
        tpot[variant.name] = tpot_s(many if variant.name.startswith("kv") else variant.scenario(alone))
    assert tpot["weight_quantization int4"] < tpot["int8_weights"] < tpot["plain"]
    assert tpot["kv_quantization kivi2"] < tpot["kv_quantization int8"] < tpot["plain of many"]


def tpot_s(scenario):
    return run(scenario).summary.tpot_s.mean
