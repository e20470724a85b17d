"""The fitter finds what made the rows, ignores what cannot be, and leaves alone what nothing shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from membound.roofline.hardware import get_hardware
from membound.roofline.hardware.links import hops, link_for
from membound.roofline.hardware.power import power_share
from membound.roofline.times.fitting import errors, fit_all, fit_parameters, prior_parameters
from membound.roofline.times.kernel_fits import ANY, find_fit
from membound.roofline.validation.kernel_batches import KernelBatch, batches
from membound.roofline.validation.kernel_cases import case_of
from membound.roofline.validation.tables import OPERATOR_COLUMNS, Row

TRUE = {
    "launch_s": 5e-6,
    "bandwidth_share": 0.7,
    "matrix_share": 0.8,
    "wave_loss": 0.2,
    "cache_bytes_per_cycle": 12.0,
}


def gemms(gpu: str = "H100-SXM5") -> KernelBatch:
    shapes = [(m, n, k) for m in (1, 16, 256, 4096) for n, k in ((4096, 4096), (28672, 4096), (4096, 14336))]
    rows = []
    for line, (m, n, k) in enumerate(shapes):
        given = {"source": "made", "gpu": gpu, "op": "gemm", "m": str(m), "n": str(n), "k": str(k), "dtype": "bf16"}
        rows.append(Row(line, dict.fromkeys(OPERATOR_COLUMNS, "") | given, 1.0))
    (batch,) = batches(case_of(row) for row in rows)
    return replace(batch, measured_s=batch.predict(TRUE))


def test_parameters_that_made_the_rows_are_found():
    batch = gemms()
    found = fit_parameters("gemm", [batch], prior_parameters("gemm"))
    assert np.max(np.abs(errors([batch], found))) < 0.05
    assert found["bandwidth_share"] == pytest.approx(0.7, rel=0.05)
    assert found["matrix_share"] == pytest.approx(0.8, rel=0.05)


def test_noise_moves_a_fit_less_than_it_moves_the_rows():
    batch = gemms()
    noisy = replace(batch, measured_s=batch.measured_s * np.exp(np.random.default_rng(1).normal(0, 0.1, 12)))
    found = fit_parameters("gemm", [noisy], prior_parameters("gemm"))
    assert np.sqrt(np.mean((batch.predict(found) / batch.measured_s - 1) ** 2)) < 0.1


def test_one_wild_row_does_not_carry_the_fit():
    batch = gemms()
    measured = batch.measured_s.copy()
    measured[5] *= 20
    found = fit_parameters("gemm", [replace(batch, measured_s=measured)], prior_parameters("gemm"))
    assert np.median(np.abs(errors([batch], found))) < 0.05


def test_without_rows_the_prior_stands():
    assert fit_parameters("moe", [], prior_parameters("moe")) == prior_parameters("moe")


def test_rows_faster_than_the_roofs_take_no_part():
    batch = gemms()
    cheating = replace(batch, measured_s=np.where(np.arange(12) < 6, batch.measured_s, batch.measured_s / 50))
    assert list(cheating.possible()) == [True] * 6 + [False] * 6
    assert all(fit.rows == 6 for fit in fit_all([cheating]))


def test_a_device_with_many_rows_does_not_outvote_another():
    slow, many = gemms("A100-SXM4-80GB"), gemms("H100-SXM5")
    slow = replace(slow, measured_s=slow.measured_s * 1.5)

    def between(times: int) -> dict[str, float]:
        return fit_parameters("gemm", [slow, *[many] * times], prior_parameters("gemm"), across="devices")

    assert between(30) == pytest.approx(between(1), rel=1e-2)


def test_a_device_alone_moves_others_less_than_itself():
    batch = gemms()
    slow = replace(batch, measured_s=batch.measured_s * 3.0)
    own = fit_parameters("gemm", [slow], prior_parameters("gemm"))
    others = fit_parameters("gemm", [slow], prior_parameters("gemm"), across="devices")
    prior = prior_parameters("gemm")
    for name in ("bandwidth_share", "matrix_share"):
        assert own[name] < others[name] < prior[name]


def prompts(gpu: str, **sizes: float) -> KernelBatch:
    given = {"source": "made", "gpu": gpu, "op": "prefill_attention", "batch": "1", "dtype": "bf16"}
    heads = {"n_heads": "32", "n_kv_heads": "8", "head_dim": "128", "q_len": "4096"}
    (batch,) = batches([case_of(Row(1, dict.fromkeys(OPERATOR_COLUMNS, "") | given | heads | sizes, 1.0))])
    return batch


def test_prompts_take_the_longer_the_more_of_what_the_mask_hides_is_computed():
    p = prior_parameters("prefill_attention")
    skipped, computed = (prompts("A100-SXM4-80GB").predict(p | {"masked_share": share})[0] for share in (0.01, 1.0))
    assert 1.6 < computed / skipped < 2.0


@pytest.mark.parametrize("gpu", ["A100-SXM4-80GB", "H100-SXM5", "B200-SXM"])
def test_no_prompt_is_faster_than_its_exponentials(gpu: str):
    """16 a cycle and unit, however fast the products are."""
    hardware = get_hardware(gpu)
    p = prior_parameters("prefill_attention") | {"softmax_per_cycle": 16.0, "matrix_share": 100.0}
    least_s = 32 * 4096 * 4097 / 2 / (16.0 * hardware.compute_units * hardware.clock_hz)
    assert prompts(gpu).predict(p)[0] > least_s


def test_blackwell_ultra_has_more_exponentials():
    p = prior_parameters("prefill_attention")
    assert prompts("B200-SXM").predict(p)[0] > prompts("B300-SXM").predict(p)[0]


def test_fits_are_found_from_the_device_outwards():
    fits = {(f.family, f.kernel, f.scope, f.library): f for f in fit_all([gemms()])}
    for gpu, scope in (
        ("H100-SXM5", "H100-SXM5"),
        ("H200-SXM", "Hopper HBM"),
        ("A100-SXM4-80GB", "HBM"),
        ("L40S", ANY),
    ):
        assert find_fit(fits, get_hardware(gpu), "gemm", "bf16").scope == scope
    assert find_fit(fits, get_hardware("H100-SXM5"), "gemm", "nvfp4").kernel == "bf16"


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("A100-PCIe-80GB", 252.9),
        ("A100-SXM4-80GB", 271.2),
        ("H100-SXM5", 794.5),
        ("GH200-144GB", 828.6),
        ("B200-SXM", 1745.0),
        ("GB200", 1822.0),
        ("B300-SXM", 1769.0),
        ("MI300X", 668.4),
        ("MI325X", 784.9),
        ("MI355X", 1565.0),
        ("Gaudi-2", 418.7),
    ],
)
def test_power_sustains_about_the_best_published_product(gpu, tflops):
    """Maximum achievable matmul FLOPS, stas00/ml-engineering; within 15 %."""
    hardware = get_hardware(gpu)
    sustained = hardware.peak_flops("bf16") * power_share(hardware, "bf16") / 1e12
    assert sustained == pytest.approx(tflops, rel=0.15)


@pytest.mark.parametrize("gpu", ["H100-SXM5", "B200-SXM", "L40S"])
def test_a_narrower_format_is_held_down_more_and_still_faster(gpu):
    hardware = get_hardware(gpu)
    assert power_share(hardware, "fp8") < power_share(hardware, "bf16") <= 1
    fast, slow = (hardware.peak_flops(d) * power_share(hardware, d) for d in ("fp8", "bf16"))
    assert fast > slow


def test_collectives_beyond_a_node_send_only_a_share_over_the_network():
    h100 = get_hardware("H100-SXM5")
    (alone,) = hops(h100, "allreduce", 1e8, 8)
    assert alone.link is h100.scale_up
    inside, between = hops(h100, "allreduce", 1e8, 32)
    assert (inside.ranks, between.ranks) == (8, 4)
    assert between.link is h100.scale_out
    assert between.message_bytes == pytest.approx(1e8 / 8)


def test_bridged_pairs_talk_over_the_host_beyond_their_pair():
    pair = get_hardware("A100-PCIe-80GB-NVLink-pair")
    assert link_for(pair, 2)[0] is pair.scale_up
    assert link_for(pair, 4) == (pair.host, True)
