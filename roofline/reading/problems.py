"""What is wrong with data that a pydantic model refused, in one sentence with field, value and what would be right?"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from membound.roofline.reading.meant import FIELDS, technique_meant
from membound.roofline.reading.nearest import nearest, nearest_first

# Problems that a sentence names one by one; of more it says how many there are.
_MOST_NAMED = 3
_MOST_SHOWN = 80


def one_sentence(error: ValidationError, of: type[BaseModel] | None = None) -> str:
    """The problems of a pydantic error as one sentence: all fields that are missing or unknown, else the first ones
    with field, value and what would be right. Of the model `of` it names the fields that there are, and paths are
    those that a person writes, without the tags of unions."""
    problems = [
        problem | {"path": _written(of, problem["loc"]), "example": _example(of, problem)}
        for problem in _told(error.errors())
    ]
    lacking = [problem for problem in problems if problem["type"] == "missing"]
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if problems[0] in lacking or problems[0] in unknown:
        said = []
        if lacking:
            missing = f"field{_s(lacking)} {_listed(map(_path, lacking))} {_are(lacking)} missing"
            said.append(f"{missing}{lacking[0]['example']}")
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
        return f"{named} is {shown(problem['input'])}, without a {_tag(problem)}; give one{problem['example']}"
    if problem["type"] == "union_tag_invalid":
        tag, known = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        close = technique_meant(str(tag)) or nearest(str(tag), known)
        meant = f" (meant: {close})" if close else ""
        unknown = f"{named} has the unknown {_tag(problem)} '{tag}'{meant}"
        return f"{unknown}; known are {', '.join(known)}{problem['example']}"
    if problem["type"] == "missing":
        return f"{named} is missing{problem['example']}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and isinstance(problem["input"], dict | BaseModel):
        return f"{named}: {message}" if field else message
    if not field and isinstance(problem["input"], bytes | bytearray):
        return wanted(problem)
    return f"{named} is {shown(problem['input'])}: {wanted(problem)}{problem['example']}"


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
    return ".".join(str(part) for part in problem["path"])


def _written(of: type[BaseModel] | None, place: Sequence[Any]) -> tuple[Any, ...]:
    """The path to pydantic's `place` as a person writes it: `arrivals.concurrency`, which pydantic calls
    `arrivals.closed_loop.concurrency`."""
    parts, path = [of] if of is not None else [], []
    for step in place:
        tagged = [part for part in parts if _has_tag(part, step)]
        if isinstance(step, int) or any(step in part.model_fields for part in parts) or not tagged:
            path.append(step)
        if not isinstance(step, int):
            parts = _inside(parts, step) or tagged
    return tuple(path)


def _hinted(problem: Any) -> str:
    """The field, with what may have been meant by it."""
    field = _path(problem)
    last = field.rpartition(".")[2]
    elsewhere = FIELDS.get(last, "")
    meant = FIELDS.get(field) or (elsewhere if elsewhere.isidentifier() else None)
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
            where = f"'{'.'.join(map(str, _written(of, place)))}' has" if place else "there are"
            said.append(f"{where} {', '.join(nearest_first(first, fields))}")
    advice = "remove it or check its spelling" if len(unknown) == 1 else "remove them or check their spelling"
    return "; ".join(["", advice, *said])


def _fields_at(of: Any, place: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for part in _parts_at(of, place) for name in part.model_fields))


def _parts_at(of: Any, place: Iterable[Any]) -> list[Any]:
    """The models that pydantic's `place` may lead to: names of fields, indexes, and tags of unions."""
    parts = [of]
    for step in place:
        if not isinstance(step, int):
            parts = _inside(parts, step) or [part for part in parts if _has_tag(part, step)]
    return parts


def _inside(parts: Sequence[Any], field: Any) -> list[type[BaseModel]]:
    """The models that a field of these may hold."""
    inner = [part.model_fields[field].annotation for part in parts if field in part.model_fields]
    return [model for one in inner for model in _models_in(one)]


# Problems that a look at one of the shapes answers.
_SHAPELESS = ("union_tag_not_found", "union_tag_invalid", "model_type", "dict_type", "model_attributes_type")


def _example(of: type[BaseModel] | None, problem: Any) -> str:
    """One shape that the part would take where it has several or the value is none, as `; for example think: {...}`."""
    place = list(problem["loc"])
    if of is None or not place:
        return ""
    if problem["type"] == "missing":
        place.pop()
    elif problem["type"] not in _SHAPELESS:
        return ""
    parts, written = _parts_at(of, place), _written(of, place)
    if (
        not written
        or isinstance(written[-1], int)
        or (problem["type"] == "missing" and written != _written(of, place[:-1]))
    ):
        return ""  # a part that has one shape names its fields
    if problem["type"] == "union_tag_invalid":
        ctx = problem["ctx"]
        close = nearest(str(ctx["tag"]), ctx["expected_tags"].replace("'", "").split(", "))
        parts.sort(key=lambda part: not _has_tag(part, close or ""))
    found = next((shape for part in parts if (shape := _shape(part)) is not None), None)
    return "" if found is None else f"; for example {written[-1]}: {found}"


def _shape(part: type[BaseModel]) -> str | None:
    """The fewest fields that make one, in the words of YAML; None where plain numbers do not make it valid."""
    fields = part.model_fields.items()
    tags = {name: info.default for name, info in fields if name in ("kind", "name") and isinstance(info.default, str)}
    values: dict[str, Any] = dict(tags)
    for name, info in fields:
        if info.is_required():
            values[name] = next((value for value in (1, 0.5) if _takes(part, name, value)), None)
    try:
        part.model_validate(values)
    except ValidationError:
        return None
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


def _takes(part: type[BaseModel], field: str, value: Any) -> bool:
    try:
        part.model_validate({field: value})
    except ValidationError as error:
        return all(problem["loc"][:1] != (field,) for problem in error.errors())
    return True


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
