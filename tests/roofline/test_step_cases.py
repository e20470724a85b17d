"""Are rows of end-to-end tables read as the deployments and loads that they measured?"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from membound.roofline.memory import weights_bytes
from membound.roofline.parallel import Parallelism
from membound.roofline.validation.step_cases import StepCase, case_of
from membound.roofline.validation.tables import END_TO_END_COLUMNS, read_table

RUN = {
    "source": "lab",
    "engine": "vllm",
    "gpu": "H100-SXM5",
    "n_gpu": 1,
    "tp": 1,
    "pp": 1,
    "model": "Llama-3.1-8B",
    "weight_dtype": "bf16",
    "trust": "A",
    "batch_or_concurrency": 8,
    "input_len": 512,
    "output_len": 64,
    "metric": "tpot_ms",
    "value": 8.0,
}


def cases(folder: Path, *rows: Mapping[str, object]) -> list[StepCase]:
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, END_TO_END_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({**RUN, **row} for row in rows)
    return [case_of(row) for row in read_table(path).rows]


def test_attention_that_is_divided_by_sequences_is_known_by_nvidias_word(tmp_path: Path) -> None:
    mixture = {"model": "Qwen3-30B-A3B", "n_gpu": 4}
    words = {"tp": 1, "notes": "attn DP 4; EP 4"}, {"tp": "", "notes": "published as DEP4"}, {"tp": "", "notes": "TEP4"}
    layouts = [case.deployment.setup.parallel for case in cases(tmp_path, *(mixture | said for said in words))]
    assert layouts == [Parallelism(dp=4, ep=4), Parallelism(dp=4, ep=4), Parallelism(tp=4, ep=4)]


def test_requests_that_are_all_there_run_in_waves_of_which_the_last_may_be_nearly_empty(tmp_path: Path) -> None:
    """An engine takes 1024 at once: as many more requests take one more wave, whether it is full or not."""
    run = {
        "gpu": "H200-SXM",
        "batch_or_concurrency": "max",
        "input_len": 64,
        "output_len": 512,
        "metric": "throughput_tok_s_total",
    }
    counts = (1024, 2048, 1000, 1040)
    made = cases(tmp_path, *(run | {"notes": f"requests {count}"} for count in counts))
    full, twice, nearly, barely = (case.predict() for case in made)
    assert [case.batch for case in made] == [1024, 1024, 1000, 1024]
    assert twice == pytest.approx(full) and nearly == pytest.approx(full, rel=0.03)
    assert barely < 0.95 * full


@pytest.mark.parametrize(("model", "gib"), [("gpt-oss-20b", 11.27), ("gpt-oss-120b", 59.02)])
def test_files_of_gpt_oss_have_the_size_that_llama_cpp_prints(tmp_path: Path, model: str, gib: float) -> None:
    (case,) = cases(tmp_path, {"engine": "llama.cpp", "model": model, "weight_dtype": "mxfp4"})
    held = weights_bytes(case.deployment.model, case.deployment.setup)
    assert held / 2**30 == pytest.approx(gib, rel=0.01)


def test_requests_whose_outputs_vary_empty_the_engine_one_by_one(tmp_path: Path) -> None:
    run = {"batch_or_concurrency": "max", "input_len": 220, "output_len": 200, "metric": "throughput_tok_s_total"}
    equal, varied = cases(
        tmp_path, *(run | {"notes": "requests 300", "flags": flags} for flags in ("", "dataset_lengths"))
    )
    assert varied.predict() < 0.7 * equal.predict()


def test_tensorrt_llm_starts_no_request_whose_whole_output_does_not_fit(tmp_path: Path) -> None:
    run = {"batch_or_concurrency": "max", "input_len": 100, "output_len": 9900, "metric": "throughput_tok_s_total"}
    known = {"model": "Qwen3-8B", "act_dtype": "bf16", "kv_dtype": "bf16"}
    trt = {"engine": "TensorRT-LLM"}
    whole = {"engine_version": "0.14"} | trt, {"engine_version": "1.2"} | trt
    shares = {"engine": "vLLM", "engine_version": "0.16"}, {"source": "mlperf_v4.1", "engine_version": "0.14"} | trt
    for context, rows in ((10_000.0, whole), (5050.0, shares)):
        for case in cases(tmp_path, *(run | known | row for row in rows)):
            assert case.batch == case.deployment.largest_batch(context)


def test_an_engine_takes_as_much_into_a_step_as_it_does_by_itself_on_the_device(tmp_path: Path) -> None:
    """vLLM's server has 256 seats and 2,048 tokens on an A100, and four times as much on an H100."""
    run = {"engine_version": "0.11", "batch_or_concurrency": "max", "input_len": 64, "metric": "throughput_tok_s_total"}
    served = {"flags": "online_interleaved_prefill"}
    small, large = cases(tmp_path, *(run | served | {"gpu": gpu} for gpu in ("A100-SXM4-80GB", "H100-SXM5")))
    assert (small.batch, small.deployment.chunk_tokens) == (256, 2048)
    assert (large.batch, large.deployment.chunk_tokens) == (1024, 8192)
