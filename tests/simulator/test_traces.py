"""Recorded traces are read as they stand, in every format, and what is wrong in them is one sentence."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.scenario.workload import TraceFile, Workload
from membound.simulator.scheduling.prefix import BlockName, blocks_of
from membound.simulator.scheduling.workload import request_stream
from membound.simulator.scheduling.workload.traces import read_trace

REAL = Path(__file__).resolve().parents[3] / "shared" / "facts" / "traces"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:03.009930+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9,2,ChatGPT,36,29,65,API log
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314,396,109\n"
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 1500, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}
"""
LENGTHS = """{"input_toks": 2358, "output_toks": 531, "arrival_time_ns": 46926808}
{"input_toks": 1034, "output_toks": 769, "arrival_time_ns": 347938951}
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 81}]},
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "h" * 8},
            {"from": "gpt", "value": "“[],” and {"},
            {"from": "human", "value": "more"},
        ],
    },
]
FILES = {
    "azure": (AZURE, [(0.0, 2162, 5), (0.007405, 2399, 6), (3.0, 76, 15)]),
    "burstgpt": (BURSTGPT, [(0.0, 472, 18), (40.0, 1087, 230)]),
    "burstgpt-3": (BURSTGPT_3, [(0.0, 906, 446), (51.0, 36, 29)]),
    "vidur": (VIDUR, [(0.0, 374, 44), (4.314, 396, 109)]),
    "mooncake": (MOONCAKE, [(0.0, 1100, 52), (1.5, 1024, 26)]),
    "llmservingsim": (LENGTHS, [(0.0, 2358, 531), (0.301012143, 1034, 769)]),
}


def rows(path: Path, text: str | bytes, **options) -> list[tuple[float, int, int]]:
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text, "utf-8")
    return [row[:3] for row in read_trace(TraceFile(file=str(path), **options))]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("given", [False, True])
def test_each_format_is_known_by_its_columns_or_by_name(tmp_path, name, given):
    text, expected = FILES[name]
    options = {"format": name.split("-")[0]} if given else {}
    read = rows(tmp_path / "trace", text, zero_tokens="drop", **options)
    assert read == [(pytest.approx(time_s, abs=1e-9), prompt, output) for time_s, prompt, output in expected]


@pytest.mark.parametrize("ending", ["\r\n", "\n\n"])
def test_foreign_line_ends_blank_lines_and_a_byte_order_mark_change_nothing(tmp_path, ending):
    text = "\ufeff" + AZURE.replace("\n", ending)
    assert rows(tmp_path / "a", text) == rows(tmp_path / "b", AZURE)


@pytest.mark.parametrize("lines", [False, True])
def test_conversations_give_the_first_question_and_its_answer(tmp_path, lines):
    text = "\n".join(map(json.dumps, SHAREGPT)) if lines else json.dumps(SHAREGPT, indent=1)
    assert rows(tmp_path / "a", text, chars_per_token=4) == [(0.0, 10, 21), (0.0, 2, 3)]


def test_a_large_array_of_conversations_streams(tmp_path):
    """8 MB of text in less than a quarter of its size, and more than one buffer of it."""
    path = tmp_path / "large.json"
    item = {"conversations": [{"from": "human", "value": "q" * 900}, {"from": "gpt", "value": "a" * 100}]}
    path.write_text(json.dumps([item] * 8000))
    tracemalloc.start()
    read = sum(1 for _ in read_trace(TraceFile(file=str(path), chars_per_token=4)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == 8000 and peak < path.stat().st_size / 4


def test_one_item_longer_than_the_buffer_is_read(tmp_path):
    item = {"conversations": [{"from": "human", "value": "q" * 3_000_000}, {"from": "gpt", "value": "a" * 8}]}
    assert rows(tmp_path / "long", json.dumps([item, item]), chars_per_token=4) == [(0.0, 750_000, 2)] * 2


def test_a_window_counts_from_the_first_row_and_its_times_from_the_window(tmp_path):
    text = BURSTGPT_3.splitlines()[0] + "\n" + "".join(f"{100 + i},s,1,m,{i + 1},1,1,log\n" for i in range(50))
    read = rows(tmp_path / "a", text, start_s=10, duration_s=5)
    assert read == [(float(i), 11 + i, 1) for i in range(5)]


def test_rows_without_tokens_are_refused_dropped_or_one(tmp_path):
    with pytest.raises(MemboundError, match=r"line 4, column Response tokens is 0.*zero_tokens"):
        rows(tmp_path / "a", BURSTGPT)
    assert len(rows(tmp_path / "a", BURSTGPT, zero_tokens="drop")) == 2
    assert rows(tmp_path / "a", BURSTGPT, zero_tokens="one")[-1] == (113.0, 417, 1)


HOSTILE = {
    "nothing": ("", "is empty"),
    "blanks": ("\n \n", "is empty"),
    "header only": (AZURE.splitlines()[0], "holds no request"),
    "other header": ("a,b,c\n1,2,3\n", "line 1 has the columns a, b, c, which are those of no known format"),
    "other keys": ('{"prompt": 3}\n', "line 1 has the columns prompt, which"),
    "nan tokens": (AZURE.replace("2399", "NaN"), "line 3, column ContextTokens is 'NaN': give a whole number"),
    "negative tokens": (AZURE.replace("2399", "-7"), "line 3, column ContextTokens is '-7'"),
    "half a token": (AZURE.replace("2399", "0.5"), "line 3, column ContextTokens is '0.5'"),
    "too many tokens": (AZURE.replace("2399", "1e12"), "line 3, column ContextTokens is '1e12'"),
    "grouped digits": (AZURE.replace("2399", "2_399"), "line 3, column ContextTokens is '2_399'"),
    "no date": (AZURE.replace("2024-05-10 00:00:03.009930+00:00", "noon"), "line 4, column TIMESTAMP is 'noon'"),
    "unsorted dates": (
        AZURE.replace("00:00:03.009930", "00:00:00.000001"),
        "line 4, column TIMESTAMP is '2024-05-10 00:00:00.000001.*earlier than the row before; sort",
    ),
    "unsorted numbers": (BURSTGPT.replace("\n45,", "\n4,"), "line 3, column Timestamp is '4', earlier"),
    "negative time": (BURSTGPT.replace("\n5,", "\n-5,"), "line 2, column Timestamp is '-5'"),
    "infinite time": (BURSTGPT.replace("\n5,", "\ninf,"), "line 2, column Timestamp is 'inf'"),
    "short row": (AZURE + "2024-05-10 00:00:04+00:00,5\n", "line 5 has 2 columns, the header has 3"),
    "cut line": (MOONCAKE[:-30], "line 2 is not a complete JSON object"),
    "json nan": (MOONCAKE.replace("1500", "NaN"), "line 2, column timestamp is nan"),
    "json text": (MOONCAKE.replace("1024", '"many"'), "line 2, column input_length is 'many'"),
    "json truth": (MOONCAKE.replace("1024", "true"), "line 2, column input_length is True"),
    "json list": (MOONCAKE + "[1]\n", "line 3 is a list, not a JSON object"),
    "missing key": (MOONCAKE + '{"timestamp": 9}\n', "line 3 lacks input_length"),
    "too few hash ids": (
        MOONCAKE.replace("[46, 47]", "[46]"),
        "line 2, column hash_ids has 1 ids, but 1024 tokens fill 2",
    ),
    "no hash ids": (MOONCAKE.replace("[46, 47]", "[46, 4.5]"), "line 2, column hash_ids is .*whole numbers"),
    "deep": ('{"timestamp": ' + "[" * 100_000, "line 1 is not a complete JSON object"),
    "binary": (b"\xff\xfe\x00\x01", "is not UTF-8 text"),
    "null bytes": (AZURE.replace("2399", "\0"), "line 3"),
    "no text": ("\0" * 5000, "is no text"),
    "pointer": ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    "one endless line": ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x" * (5 * 2**20), "line 2 is longer than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence_with_file_line_and_value(tmp_path, name):
    text, sentence = HOSTILE[name]
    with pytest.raises(MemboundError, match=sentence) as caught:
        rows(tmp_path / "bad trace", text)
    assert "bad trace" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps(SHAREGPT)[:-1], "ends within conversation 3"),
        (json.dumps(SHAREGPT)[:-9], "ends within conversation 2"),
        ('[{"conversations": 3}]', "conversation 1 has no list"),
        ('[{"conversations": [{"from": "human"}]}]', "conversation 1 has a turn without"),
        ('[{"conversations": []}]', "conversation 1, column question is 0"),
        ("[]", "holds no request"),
    ],
)
def test_broken_conversations_are_one_sentence(tmp_path, text, sentence):
    with pytest.raises(MemboundError, match=sentence):
        rows(tmp_path / "a", text, chars_per_token=4)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (json.dumps(SHAREGPT), {}, "give chars_per_token"),
        (AZURE, {"chars_per_token": 4}, "chars_per_token changes nothing"),
        (json.dumps(SHAREGPT), {"chars_per_token": 4, "duration_s": 5}, "has no times"),
        (AZURE, {"start_s": 100}, "no request with tokens in the window from start_s 100 on; its rows reach 3 s"),
        (AZURE, {"format": "burstgpt"}, "line 1 lacks the column Request tokens, which burstgpt has; it has TIMESTAMP"),
        (MOONCAKE, {"format": "llmservingsim"}, "line 1 lacks input_toks"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, text, options, sentence):
    with pytest.raises(MemboundError, match=sentence):
        rows(tmp_path / "a", text, **options)


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path):
    for path in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(MemboundError, match="cannot be read"):
            next(read_trace(TraceFile(file=str(path))))


def replay(path: Path, **changes) -> list:
    arrivals = {"kind": "trace", "file": str(path), **changes.pop("arrivals", {})}
    return list(request_stream(Workload.model_validate({"arrivals": arrivals, **changes})))


def test_a_replay_keeps_times_and_lengths_and_speed_compresses_it(tmp_path):
    path = tmp_path / "vidur.csv"
    path.write_text(VIDUR)
    requests = replay(path)
    assert [(r.id, r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0, 0.0, 374, 44),
        (1, 4.314, 396, 109),
    ]
    assert replay(path, arrivals={"speed": 2.0})[1].arrival_s == 4.314 / 2
    assert len(replay(path, requests=1)) == 1 and len(replay(path, requests=10**6)) == 2
    fixed = replay(path, output_tokens={"kind": "fixed", "tokens": 9})
    assert [(r.prompt_tokens, r.output_tokens) for r in fixed] == [(374, 9), (396, 9)]


def test_rows_of_a_trace_at_other_times_begin_again_after_the_last(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(LENGTHS)
    workload = {
        "arrivals": {"kind": "constant", "rate_rps": 2.0},
        "prompts": {"kind": "trace", "file": str(path)},
        "requests": 5,
    }
    requests = list(request_stream(Workload.model_validate(workload)))
    assert [r.prompt_tokens for r in requests] == [2358, 1034, 2358, 1034, 2358]
    assert [r.arrival_s for r in requests] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_long_trace_streams_in_bounded_memory(tmp_path):
    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n")
        file.writelines(f"{i / 8},{i % 900 + 1},{i % 90 + 1}\n" for i in range(60_000))
    workload = Workload.model_validate({"arrivals": {"kind": "trace", "file": str(path)}})
    tracemalloc.start()
    count = sum(1 for _ in request_stream(workload))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # a chunk of 8192 rows and its requests; all 60,000 would take over 12 MB
    assert count == 60_000 and peak < 5 * 2**20


def real(name: str) -> Path:
    if not REAL.is_dir():
        pytest.skip(f"the real traces are not beside the checkout ({REAL})")
    return REAL / name


def test_the_azure_code_trace_has_its_published_size_and_quantiles():
    """8,819 rows over 3,436 s, inter-arrival CV 13.2, input p50/p99 1469/7436: facts/simulator-notes.md section 5."""
    requests = replay(real("AzureLLMInferenceTrace_code_2023.csv"))
    gaps = np.diff([request.arrival_s for request in requests])
    assert len(requests) == 8819 and requests[-1].arrival_s == pytest.approx(3436, abs=1)
    assert gaps.std() / gaps.mean() == pytest.approx(13.2, abs=0.1)
    np.testing.assert_allclose(np.quantile([r.prompt_tokens for r in requests], [0.5, 0.99]), [1469, 7436])


def test_the_mooncake_trace_reuses_the_share_of_blocks_that_was_computed_for_it():
    """36.6 % of the prompt's blocks hit an infinite cache: facts/simulator-notes.md section 5."""
    requests = replay(real("mooncake_conversation_trace.jsonl"))
    assert len(requests) == 12_031
    seen: set[BlockName] = set()
    hit = total = 0
    for request in requests:
        blocks = blocks_of(request.prefix.spans(512))
        hit += sum(1 for _ in itertools.takewhile(seen.__contains__, blocks))
        total += request.prompt_tokens / 512
        seen.update(blocks)
    assert hit / total == pytest.approx(0.366, abs=0.015)
