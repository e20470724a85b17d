"""What is wrong with data that a pydantic model refused, in one sentence with field, value and what would be right?"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from membound.roofline.reading.nearest import nearest, nearest_first

# What people write where a scenario has another name for it.
MEANT = {
    **{degree: f"parallel.{degree}" for degree in ("tp", "pp", "dp", "ep", "cp")},
    **dict.fromkeys(("gpus", "num_gpus", "tensor_parallel"), "parallel.tp"),
    **dict.fromkeys(("batch", "batch_size"), "option --batch, or workload.arrivals.concurrency"),
    **dict.fromkeys(("context", "context_length"), "option --context, or workload.prompts"),
    **dict.fromkeys(("gpu", "device", "devices"), "hardware"),
    **dict.fromkeys(("profile", "batching", "max_num_seqs", "max_batched_tokens", "block_size"), "engine.{}"),
    **dict.fromkeys(("arrivals", "requests", "prompts", "output_tokens", "task", "seed"), "workload.{}"),
    **dict.fromkeys(("concurrency", "rate_rps"), "workload.arrivals.{}"),
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), "slo.{}"),
    **dict.fromkeys(("quantization", "speculation", "technique"), "techniques"),
}
# Problems that a sentence names one by one; of more it says how many there are.
_MOST_NAMED = 3
_MOST_SHOWN = 80


def one_sentence(error: ValidationError, of: type[BaseModel] | None = None) -> str:
    """The problems of a pydantic error as one sentence: all fields that are missing or unknown, else the first ones
    with field, value and what would be right. Of the model `of` it names the fields that there are."""
    problems = _told(error.errors())
    lacking = [problem for problem in problems if problem["type"] == "missing"]
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if problems[0] in lacking or problems[0] in unknown:
        said = [f"field{_s(lacking)} {_listed(map(_path, lacking))} {_are(lacking)} missing"] if lacking else []
        if unknown:
            said.append(f"field{_s(unknown)} {_listed(map(_hinted, unknown))} {_are(unknown)} unknown")
        rest = [problem for problem in problems if problem not in lacking and problem not in unknown]
        return ", and ".join(said) + _advice(unknown, of) + "".join(f"; also {_single(problem)}" for problem in rest)
    more = len(problems) - _MOST_NAMED
    return "; also ".join(map(_single, problems[:_MOST_NAMED])) + (f" ({more} more)" if more > 0 else "")


def _told(problems: Sequence[Any]) -> list[Any]:
    """The problems without those that follow from another: of a list whose item is wrong, and of a union's further
    members at the same place."""
    told: dict[tuple[Any, ...], Any] = {}
    for problem in problems:
        told.setdefault(tuple(part for part in problem["loc"] if not _is_type(part)), problem)
    inner = {place[:length] for place in told for length in range(1, len(place))}
    return [problem for place, problem in told.items() if place not in inner]


def _is_type(part: Any) -> bool:
    return isinstance(part, str) and (part in ("int", "float", "str", "bool") or "[" in part)


def _single(problem: Any) -> str:
    field = _path(problem)
    named = f"field '{field}'" if field else "it"
    if problem["type"] == "union_tag_not_found":
        return f"{named} is {shown(problem['input'])}, without a {_tag(problem)}; give one"
    if problem["type"] == "union_tag_invalid":
        tag, known = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        close = nearest(str(tag), known)
        meant = f" (meant: {close})" if close else ""
        return f"{named} has the unknown {_tag(problem)} '{tag}'{meant}; known are {', '.join(known)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and isinstance(problem["input"], dict | BaseModel):
        return f"{named}: {message}" if field else message
    if not field and isinstance(problem["input"], bytes | bytearray):
        return wanted(problem)
    return f"{named} is {shown(problem['input'])}: {wanted(problem)}"


def wanted(problem: Any) -> str:
    """What would be right instead of a value that pydantic refused."""
    say = _WANTED.get(problem["type"])
    if say is not None:
        return say(problem.get("ctx") or {})
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}".rstrip(".")


def _least(ctx: dict[str, Any]) -> str:
    return f"give at least {ctx['min_length']} of them"


def _most(ctx: dict[str, Any]) -> str:
    return f"give at most {ctx['max_length']} of them"


_WANTED: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), lambda _: "give a whole number"),
    "int_parsing_size": lambda _: "give a whole number of fewer digits",
    **dict.fromkeys(("float_parsing", "float_type"), lambda _: "give a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), lambda _: "give true or false"),
    "string_type": lambda _: "give text",
    "string_too_short": lambda _: "give some text",
    "string_pattern_mismatch": lambda ctx: (
        "give letters, digits, dots, hyphens and underscores, and begin with a letter or a digit"
        if ctx["pattern"] == r"^\w[\w.-]*$"
        else f"give text that matches {ctx['pattern']}"
    ),
    **dict.fromkeys(("tuple_type", "list_type"), lambda _: "give a list"),
    "too_short": _least,
    "too_long": _most,
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), lambda _: "give its fields, as KEY: VALUE"),
    "json_invalid": lambda ctx: f"it is not JSON ({ctx['error']})",
}


def shown(value: Any) -> str:
    """A value as a person wrote it, shortened: nothing is `empty`, and only the outer levels of nested data show."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    try:
        text = _short.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxtuple = 2, 4, 4, 4


def kind_of(value: Any) -> str:
    """What plain data is, in the words of YAML."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true or false"
    kinds: tuple[tuple[Any, str], ...] = (
        (dict, "a mapping"),
        (list, "a list"),
        (str, "text"),
        ((int, float), "a number"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "a date")


def _path(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _hinted(problem: Any) -> str:
    """The field, with what may have been meant by it."""
    field = _path(problem)
    last = field.rpartition(".")[2]
    meant = MEANT.get(field) or (MEANT.get(last, "") if MEANT.get(last, "").isalpha() else None)
    return f"{field}' (meant: {meant.format(field)})" if meant else f"{field}'"


def _advice(unknown: Sequence[Any], of: type[BaseModel] | None) -> str:
    """What to do about unknown fields: which there are instead, at each place, those that read most alike first."""
    if not unknown:
        return ""
    places: dict[tuple[Any, ...], str] = {}
    for problem in unknown:
        places.setdefault(tuple(problem["loc"][:-1]), str(problem["loc"][-1]))
    said = []
    for place, first in places.items() if of is not None else ():
        fields = _fields_at(of, place)
        if fields:
            where = f"'{'.'.join(map(str, place))}' has" if place else "there are"
            said.append(f"{where} {', '.join(nearest_first(first, fields))}")
    advice = "remove it or check its spelling" if len(unknown) == 1 else "remove them or check their spelling"
    return "; ".join(["", advice, *said])


def _fields_at(of: Any, place: Iterable[Any]) -> list[str]:
    """The fields of the part that pydantic's `place` leads to: names of fields, indexes, and tags of unions."""
    parts = [of]
    for step in place:
        if isinstance(step, int):
            continue
        inner = [part.model_fields[step].annotation for part in parts if step in part.model_fields]
        parts = [m for one in inner for m in _models_in(one)] if inner else [p for p in parts if _has_tag(p, step)]
    return list(dict.fromkeys(name for part in parts for name in part.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _has_tag(part: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(info.annotation) for info in part.model_fields.values())


def _listed(fields: Iterable[str]) -> str:
    """`'a', 'b' and 'c'`, where what follows a field's name closes its own quote."""
    quoted = [f"'{field}" if field.endswith(("'", ")")) else f"'{field}'" for field in fields]
    return " and ".join(part for part in (", ".join(quoted[:-1]), quoted[-1]) if part)


def _s(problems: Sequence[Any]) -> str:
    return "" if len(problems) == 1 else "s"


def _are(problems: Sequence[Any]) -> str:
    return "is" if len(problems) == 1 else "are"


def _tag(problem: Any) -> str:
    return str(problem["ctx"]["discriminator"]).strip("'")
