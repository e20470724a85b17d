"""Which requests did somebody record? One reader for the trace formats that people have.

A format is a container (CSV, JSON lines, a JSON array) and the names of its columns. Files are read as a stream: a
trace of any size takes the memory of one line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from membound.roofline.errors import MemboundError
from membound.roofline.part import MAX_TOKENS
from membound.roofline.workload import TraceFile, TraceFormatName
from membound.simulator.scheduling.prefix import PrefixChain

MAX_LINE = 4 * 2**20
READ = 2**18
MOONCAKE_BLOCK = 512
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TraceFormat:
    """Names of a format's columns; its times have `ticks_per_s`, date and time count in microseconds."""

    name: TraceFormatName
    container: Literal["csv", "lines", "array"]
    input: str
    output: str
    time: str | None = None
    ticks_per_s: float = 1.0
    dated: bool = False
    hash_ids: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.time, self.input, self.output, self.hash_ids) if name)


FORMATS = (
    # Azure LLM inference traces 2023 and 2024 (Azure/AzurePublicDataset): the second has a time zone
    TraceFormat("azure", "csv", "ContextTokens", "GeneratedTokens", "TIMESTAMP", 1e6, dated=True),
    # BurstGPT (HPMLL/BurstGPT), all releases; Session ID, Elapsed time, Model and Log Type are not used
    TraceFormat("burstgpt", "csv", "Request tokens", "Response tokens", "Timestamp"),
    # processed traces of vidur (microsoft/vidur)
    TraceFormat("vidur", "csv", "num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    # Mooncake (kvcache-ai/Mooncake): milliseconds, hash ids of 512-token blocks
    TraceFormat("mooncake", "lines", "input_length", "output_length", "timestamp", 1e3, hash_ids="hash_ids"),
    # LLMServingSim (casys-kaist/LLMServingSim): lengths of ShareGPT requests
    TraceFormat("llmservingsim", "lines", "input_toks", "output_toks", "arrival_time_ns", 1e9),
    # ShareGPT: text without times; the first question of a conversation and its answer
    TraceFormat("sharegpt", "array", "conversations", "conversations"),
)


class TraceRow(NamedTuple):
    """A recorded request; `time_s` counts from the beginning of the window, 0 where the format has no times."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: PrefixChain | None


class _Record(NamedTuple):
    """A row as it stands in the file: where, and its values by column."""

    place: str
    values: dict[str, Any]


def read_trace(trace: TraceFile) -> Iterator[TraceRow]:
    """The requests of a trace's window, in order of time.

    Raises MemboundError with file, line, column and value at the first thing that is wrong.
    """
    try:
        with Path(trace.file).open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(trace, file)
    except OSError as error:
        raise MemboundError(f"trace '{trace.file}' cannot be read: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError:
        raise MemboundError(f"trace '{trace.file}' is not UTF-8 text; give CSV, JSON lines or JSON") from None


def _rows(trace: TraceFile, file: TextIO) -> Iterator[TraceRow]:
    form = _format_of(trace, file)
    _check_options(trace, form)
    first = last = None
    last_s, end_s = 0.0, math.inf if trace.duration_s is None else trace.start_s + trace.duration_s
    some = False
    for place, values in _records(trace, form, file):
        ticks = _ticks(form, place, values)
        if last is not None and ticks < last:
            raise MemboundError(
                f"{place}, column {form.time} is {values[form.time]!r}, earlier than the row before; "
                "sort the rows by time"
            )
        first, last = ticks if first is None else first, ticks
        last_s = (ticks - first) / form.ticks_per_s
        if last_s >= end_s:
            break
        if last_s < trace.start_s:
            continue
        row = _row(trace, form, place, values, last_s - trace.start_s)
        if row is not None:
            some = True
            yield row
    if last is None:
        raise MemboundError(f"trace '{trace.file}' holds no request")
    if not some:
        raise MemboundError(
            f"trace '{trace.file}' has no request with tokens in the window from start_s {trace.start_s:g} on; its "
            f"rows reach {last_s:g} s"
        )


def _check_options(trace: TraceFile, form: TraceFormat) -> None:
    if form.name == "sharegpt" and trace.chars_per_token is None:
        raise MemboundError(
            f"trace '{trace.file}' is text without token counts; give chars_per_token, for instance 4 for English"
        )
    if form.name != "sharegpt" and trace.chars_per_token is not None:
        raise MemboundError(f"trace '{trace.file}' has token counts, so chars_per_token changes nothing; remove it")
    if form.time is None and (trace.start_s or trace.duration_s is not None or hasattr(trace, "speed")):
        raise MemboundError(
            f"trace '{trace.file}' has no times ({form.name}); use it as prompts, with arrivals of another kind and "
            "without start_s and duration_s"
        )


def _format_of(trace: TraceFile, file: TextIO) -> TraceFormat:
    """The given format, else the one whose columns the first line has."""
    if trace.format != "auto":
        return next(form for form in FORMATS if form.name == trace.format)
    head = file.read(MAX_LINE)
    file.seek(0)
    line = head.lstrip().split("\n", 1)[0].strip()
    if not line:
        raise MemboundError(f"trace '{trace.file}' is empty")
    if line.startswith("version https://git-lfs"):
        raise MemboundError(f"trace '{trace.file}' is a Git LFS pointer, not the data; fetch the file that it names")
    container = {"[": "array", "{": "lines"}.get(line[0], "csv")
    if container == "array" or '"conversations"' in line:
        return next(form for form in FORMATS if form.name == "sharegpt")
    if container == "lines":
        present = _parsed(line, f"trace '{trace.file}' line 1").keys()
    else:
        present = [name.strip() for name in next(csv.reader([line]))]
    for form in FORMATS:
        if form.container == container and set(form.columns) <= set(present):
            return form
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in FORMATS)
    raise MemboundError(
        f"trace '{trace.file}' line 1 has the columns {', '.join(present)[:200]}, which are those of no known format "
        f"({known})"
    )


def _records(trace: TraceFile, form: TraceFormat, file: TextIO) -> Iterator[_Record]:
    match form.container:
        case "csv":
            return _csv_records(trace, form, file)
        case "lines":
            return _line_records(trace, form, file)
        case "array":
            return _conversation_records(trace, file)


def _csv_records(trace: TraceFile, form: TraceFormat, file: TextIO) -> Iterator[_Record]:
    reader = csv.reader(_lines(trace, file))
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in form.columns if name not in header]:
            raise MemboundError(
                f"trace '{trace.file}' line 1 lacks the column {missing[0]}, which {form.name} has; "
                f"it has {', '.join(header)[:200] or 'none'}"
            )
        at = [(name, header.index(name)) for name in form.columns]
        for cells in reader:
            if not cells:
                continue
            place = f"trace '{trace.file}' line {reader.line_num}"
            if len(cells) != len(header):
                raise MemboundError(f"{place} has {len(cells)} columns, the header has {len(header)}")
            yield _Record(place, {name: cells[index] for name, index in at})
    except csv.Error as error:
        raise MemboundError(f"trace '{trace.file}' line {reader.line_num} is not CSV: {error}") from None


def _line_records(trace: TraceFile, form: TraceFormat, file: TextIO) -> Iterator[_Record]:
    for number, line in enumerate(_lines(trace, file), start=1):
        if not line.strip():
            continue
        place = f"trace '{trace.file}' line {number}"
        values = _parsed(line, place)
        if missing := [name for name in form.columns if name not in values]:
            raise MemboundError(f"{place} lacks {missing[0]}, which {form.name} has")
        yield _Record(place, values)


def _conversation_records(trace: TraceFile, file: TextIO) -> Iterator[_Record]:
    """Text of the first question and its answer, from a JSON array of conversations or one on each line."""
    for number, item in enumerate(_json_items(trace, file), start=1):
        place = f"trace '{trace.file}' conversation {number}"
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise MemboundError(f"{place} has no list 'conversations'")
        try:
            said = [(str(turn["from"]), str(turn["value"])) for turn in turns]
        except (TypeError, KeyError):
            raise MemboundError(f"{place} has a turn without 'from' and 'value'") from None
        asked = next((i for i, (who, _) in enumerate(said) if who in ("human", "user")), len(said))
        answered = len(said) > asked + 1 and said[asked + 1][0] not in ("human", "user", "system")
        question, answer = (said[asked][1], said[asked + 1][1]) if answered else ("", "")
        yield _Record(place, {"question": question, "answer": answer})


def _json_items(trace: TraceFile, file: TextIO) -> Iterator[Any]:
    """The items of a JSON array or of JSON lines, holding little more than one of them."""
    decoder = json.JSONDecoder()
    text = file.read(READ).lstrip()
    is_array, number = text.startswith("["), 0
    at, complete = int(is_array), False
    while True:
        at = _separators(text, at)
        if text.startswith("]", at) if is_array else complete and at == len(text):
            return
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if complete or len(text) - at > 16 * MAX_LINE:
                raise MemboundError(f"trace '{trace.file}' ends within conversation {number + 1}: not JSON") from None
            # twice as much each time, so that a long item is not tried again for each of its pieces
            more = file.read(max(READ, len(text) - at))
            text, at, complete = text[at:] + more, 0, not more
        else:
            number += 1
            yield item


def _separators(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _lines(trace: TraceFile, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise MemboundError(f"trace '{trace.file}' line {number} is longer than {MAX_LINE} characters")
        yield line


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise MemboundError(f"{place} is not a complete JSON object: {line.strip()[:60]!r}") from None
    if not isinstance(values, dict):
        raise MemboundError(f"{place} is {type(values).__name__}, not a JSON object")
    return values


def _row(trace: TraceFile, form: TraceFormat, place: str, values: dict[str, Any], time_s: float) -> TraceRow | None:
    if form.container == "array":
        assert trace.chars_per_token is not None
        counts = [math.ceil(len(values[part]) / trace.chars_per_token) for part in ("question", "answer")]
    else:
        counts = [_token_count(place, name, values[name]) for name in (form.input, form.output)]
    if 0 in counts:
        match trace.zero_tokens:
            case "drop":
                return None
            case "refuse":
                names = ("question", "answer") if form.container == "array" else (form.input, form.output)
                raise MemboundError(
                    f"{place}, column {names[counts.index(0)]} is 0, as for a failed request; set zero_tokens to "
                    "'drop' to leave such rows out, or to 'one' to count them as one token"
                )
    prompt, output = (max(1, count) for count in counts)
    prefix = None if form.hash_ids is None else _prefix(place, form.hash_ids, values[form.hash_ids], prompt)
    return TraceRow(time_s, prompt, output, prefix)


def _token_count(place: str, column: str, value: Any) -> int:
    number = _number(value)
    if not (number.is_integer() and 0 <= number <= MAX_TOKENS):
        raise MemboundError(f"{place}, column {column} is {value!r}: give a whole number from 0 to {MAX_TOKENS}")
    return int(number)


def _ticks(form: TraceFormat, place: str, values: dict[str, Any]) -> float:
    if form.time is None:
        return 0
    value = values[form.time]
    if not form.dated:
        number = _number(value)
        if not 0 <= number < math.inf:
            raise MemboundError(f"{place}, column {form.time} is {value!r}: give a number that is not negative")
        return number
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        raise MemboundError(
            f"{place}, column {form.time} is {value!r}: give date and time such as 2023-11-16 18:17:03.979960"
        ) from None
    # a time without zone is taken as UTC: only differences count
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _number(value: Any) -> float:
    """The number that a cell or a JSON value is; nan for everything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _prefix(place: str, column: str, hash_ids: Any, prompt_tokens: int) -> PrefixChain:
    blocks = -(-prompt_tokens // MOONCAKE_BLOCK)
    if not isinstance(hash_ids, list) or not all(type(id) is int and 0 <= id < 2**63 for id in hash_ids):
        raise MemboundError(f"{place}, column {column} is {str(hash_ids)[:60]}: give a list of whole numbers")
    if len(hash_ids) != blocks:
        raise MemboundError(
            f"{place}, column {column} has {len(hash_ids)} ids, but {prompt_tokens} tokens fill {blocks} blocks of "
            f"{MOONCAKE_BLOCK}"
        )
    ends = (*range(MOONCAKE_BLOCK, prompt_tokens, MOONCAKE_BLOCK), prompt_tokens)
    return PrefixChain(tuple(hash_ids), ends)
