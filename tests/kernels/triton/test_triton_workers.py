"""What checks and times kernels survives one that dies or hangs, and what was found before it is on the disk."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.bench.check import CASES, Checked, check_apart
from membound.kernels.bench.workers import WORKER_BYTES, answers, workers_for

DIES, HANGS, LOSES_ITS_DEVICE = 3, 4, 5
SCRIPT = f"""
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    case = int(line)
    if case == {DIES}:
        print("an illegal address", file=sys.stderr, flush=True)
        os._exit(7)
    if case == {HANGS}:
        time.sleep(60)
    lost = case == {LOSES_ITS_DEVICE}
    print(json.dumps({{"row": {{"case": case, "process": os.getpid()}}, "goes_on": not lost}}), flush=True)
    if lost:
        break
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_case_that_ends_its_process_is_one_row_and_all_others_are_answered(workers):
    found = list(answers([sys.executable, "-c", SCRIPT], range(8), workers, limit_s=3.0))
    assert sorted(answer.case for answer in found) == list(range(8))
    problems = {answer.case: answer.problem for answer in found if answer.row is None}
    assert problems == {
        DIES: "its process ended with code 7: an illegal address",
        HANGS: "took longer than 3 s and was ended",
    }
    assert all(answer.row["case"] == answer.case for answer in found if answer.row)
    if workers == 1:
        processes = {answer.case: answer.row["process"] for answer in found if answer.row}
        assert processes[0] == processes[1] == processes[2] != processes[LOSES_ITS_DEVICE] != processes[6]


def test_where_no_process_starts_the_reason_is_said_once():
    with pytest.raises(RuntimeError, match=r"no process to run the kernels starts: its process .* no driver"):
        list(answers([sys.executable, "-c", "raise SystemExit('no driver')"], range(3), 2))


@given(cores=st.integers(1, 256), free_bytes=st.integers(0, 2**40))
def test_processes_side_by_side_have_a_core_and_their_memory_each(cores, free_bytes):
    workers = workers_for(cores, free_bytes)
    assert 1 <= workers <= cores
    assert workers == 1 or workers * WORKER_BYTES <= free_bytes


def test_a_worker_checks_what_the_command_checks(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import torch

    number = next(n for n, case in enumerate(CASES) if case.kernel == "silu_mul" and case.small)
    ((answered, row),) = check_apart([number], torch.device("cpu"), 5, workers=4)
    assert answered == number and isinstance(row, Checked) and row.right, row
