"""Which formats of traces do people have, and what is the next record in a file of each?

A format is a container (CSV, JSON lines, a JSON array) and the names of its columns. Files are read as a stream: a
trace of any size takes the memory of one line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TextIO

from membound.roofline.errors import MemboundError
from membound.roofline.reading.problems import kind_of
from membound.roofline.scenario.workload import TraceFile, TraceFormatName

MAX_LINE = 4 * 2**20
READ = 2**18


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
        """The columns that are read, in the order of a record's values."""
        return tuple(name for name in (self.input, self.output, self.time, self.hash_ids) if name)


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
    TraceFormat("sharegpt", "array", "question", "answer"),
)

# A row as it stands in the file: its line (or item) and the values of the format's columns, in their order.
Record = tuple[int, Sequence[Any]]


@dataclass(frozen=True)
class Source:
    """A file and its format, and how its errors name a place in it."""

    trace: TraceFile
    form: TraceFormat

    def place(self, number: int) -> str:
        unit = "conversation" if self.form.container == "array" else "line"
        return f"trace '{self.trace.file}' {unit} {number}"

    def bad(self, number: int, column: str, value: Any, advice: str) -> MemboundError:
        return MemboundError(f"{self.place(number)}, column {column} is {str(repr(value))[:60]}{advice}")


def format_of(trace: TraceFile, file: TextIO) -> TraceFormat:
    """The given format, else the one whose columns the first line has."""
    if trace.format != "auto":
        return next(form for form in FORMATS if form.name == trace.format)
    line = file.readline(READ)
    while line and not line.strip():
        line = file.readline(READ)
    if line.lstrip().startswith("{") and len(line) == READ:
        line += file.readline(MAX_LINE)
    file.seek(0)
    line = line.strip()
    if not line:
        raise MemboundError(f"trace '{trace.file}' is empty")
    if "\0" in line:
        raise MemboundError(f"trace '{trace.file}' is no text; give a CSV, JSON or JSON Lines file")
    if line.startswith("version https://git-lfs"):
        raise MemboundError(f"trace '{trace.file}' is a Git LFS pointer, not the data; fetch the file that it names")
    container = {"[": "array", "{": "lines"}.get(line[0], "csv")
    if container == "array" or '"conversations"' in line:
        return next(form for form in FORMATS if form.name == "sharegpt")
    if container == "lines":
        present = list(_parsed(line, trace.file, 1))
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


def records(source: Source, file: TextIO) -> Iterator[Record]:
    match source.form.container:
        case "csv":
            return _csv_records(source, file)
        case "lines":
            return _line_records(source, file)
        case "array":
            return _conversation_records(source, file)


def _csv_records(source: Source, file: TextIO) -> Iterator[Record]:
    form = source.form
    reader = csv.reader(_lines(source.trace, file))
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in form.columns if name not in header]:
            raise MemboundError(
                f"{source.place(1)} lacks the column {missing[0]}, which {form.name} has; "
                f"it has {', '.join(header)[:200] or 'none'}"
            )
        pick, columns = itemgetter(*(header.index(name) for name in form.columns)), len(header)
        for cells in reader:
            if len(cells) == columns:
                yield reader.line_num, pick(cells)
            elif cells:
                raise MemboundError(
                    f"{source.place(reader.line_num)} has {len(cells)} columns, the header has {columns}"
                )
    except csv.Error as error:
        raise MemboundError(f"{source.place(reader.line_num)} is not CSV: {error}") from None


def _line_records(source: Source, file: TextIO) -> Iterator[Record]:
    columns = source.form.columns
    for number, line in enumerate(_lines(source.trace, file), start=1):
        if not line.strip():
            continue
        row = _parsed(line, source.trace.file, number)
        try:
            yield number, [row[name] for name in columns]
        except KeyError as error:
            raise MemboundError(f"{source.place(number)} lacks {error.args[0]}, which {source.form.name} has") from None


def _conversation_records(source: Source, file: TextIO) -> Iterator[Record]:
    """Tokens of the first question and its answer, from a JSON array of conversations or one on each line."""
    chars_per_token = source.trace.chars_per_token
    assert chars_per_token is not None, "checked with the options"
    for number, item in enumerate(_json_items(source.trace, file), start=1):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise MemboundError(f"{source.place(number)} has no list 'conversations'")
        try:
            said = [(str(turn["from"]), str(turn["value"])) for turn in turns]
        except (TypeError, KeyError):
            raise MemboundError(f"{source.place(number)} has a turn without 'from' and 'value'") from None
        asked = next((i for i, (who, _) in enumerate(said) if who in ("human", "user")), len(said))
        answered = len(said) > asked + 1 and said[asked + 1][0] not in ("human", "user", "system")
        texts = (said[asked][1], said[asked + 1][1]) if answered else ("", "")
        yield number, [math.ceil(len(text) / chars_per_token) for text in texts]


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


def _parsed(line: str, file: str, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise MemboundError(
            f"trace '{file}' line {number} is not a complete JSON object: {line.strip()[:60]!r}"
        ) from None
    if not isinstance(values, dict):
        raise MemboundError(f"trace '{file}' line {number} is {kind_of(values)}, not a JSON object")
    return values
