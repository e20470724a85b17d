"""What plain data does a YAML text hold? Refused in one sentence where it holds none, or would grow without end."""

from __future__ import annotations

import datetime
import re
from typing import Any

import yaml

from membound.roofline.errors import MemboundError
from membound.roofline.reading.problems import shown

# A text of a person has a few hundred values; beyond this it is something else, and reading it takes minutes.
_MOST_BYTES = 10 * 2**20
# Values that aliases may bring beyond those that are written out: nine lines of nine aliases each are 400 million.
_MOST_ALIASED = 10_000


# What a person can do about what a YAML reader says, by a part of its words.
_REMEDIES = (
    (r"'\\t' that cannot start", "indent with spaces, not with tabs"),
    (r"character (\S+) that cannot start", "quote the text that begins with {}"),
    (r"mapping values are not allowed", "check the indentation, and quote a text that has a colon"),
    (r"expected <block end>", "check the indentation against the lines above"),
    (r"expected ',' or '(.)'", "a comma or a closing {} is missing"),
    (r"unexpected end of stream", "a quotation mark is not closed"),
    (r"undefined alias '(.*)'", "quote *{}, or name with &{} what it repeats"),
    (r"could not determine a constructor", "remove the tag, which begins with an exclamation mark"),
)


def _remedy(problem: str) -> str:
    """What to do about it, after a colon; empty where nobody knows."""
    for said, remedy in _REMEDIES:
        if found := re.search(said, problem):
            return ": " + remedy.replace("{}", found[1] if found.groups() else "")
    return ""


class _TwiceError(yaml.MarkedYAMLError):
    """A mapping has a key twice, of which YAML readers keep the last without a word."""


class _Loader(yaml.SafeLoader):
    """Reads plain data; refuses a key that a mapping has twice, and aliases that grow without end."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_aliases(node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _TwiceError(problem=key.value, problem_mark=key.start_mark)
                seen.add(key.value)
        return node


class _EndlessError(Exception):
    """Aliases bring more values than a person means."""


def _check_aliases(root: yaml.Node) -> None:
    """Counts what aliases bring before anything is made of it."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # what holds itself is found when its values are checked
            inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            if isinstance(node, yaml.CollectionNode):
                sizes[id(node)] += sum(map(size, inner))
        return sizes[id(node)]

    if size(root) > len(sizes) + _MOST_ALIASED:
        raise _EndlessError


def _check_plain(value: Any, origin: str, dates: bool, within: tuple[Any, ...] = ()) -> None:
    """Raises MemboundError for what JSON cannot hold: dates, bytes, lone surrogates, and lists that hold themselves."""
    if any(value is outer for outer in within):
        raise MemboundError(f"{origin} has a {'list' if isinstance(value, list) else 'mapping'} that holds itself")
    match value:
        case dict():
            for key, inner in value.items():
                _check_plain(key, origin, dates)
                _check_plain(inner, origin, dates, (*within, value))
        case list():
            for inner in value:
                _check_plain(inner, origin, dates, (*within, value))
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise MemboundError(f"{origin} has the text {value[:60]!a} with half a character; remove it")
        case None | bool() | int() | float():
            pass
        case datetime.date() if dates:
            pass
        case _:
            raise MemboundError(
                f"{origin} has {shown(str(value))}, which YAML reads as a {type(value).__name__}; quote it"
            )


def parse_yaml(text: str, origin: str, *, dates: bool = False) -> Any:
    """Plain data from YAML, where asked for with dates; raises MemboundError with one sentence, also for values such as
    a 45th of a month."""
    if len(text) > _MOST_BYTES:
        raise MemboundError(f"{origin} has {len(text) / 2**20:,.0f} MiB of YAML; give {_MOST_BYTES >> 20} MiB at most")
    try:
        document = yaml.load(text, _Loader)
        _check_plain(document, origin, dates)
        return document
    except MemboundError:
        raise
    except _TwiceError as error:
        again = error.problem_mark.line + 1 if error.problem_mark else 0
        raise MemboundError(
            f"{origin} has the key {shown(error.problem)} twice in one mapping, again at line {again}; keep one"
        ) from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise MemboundError(
            f"{origin} is not valid YAML{line}{_remedy(getattr(error, 'problem', None) or '')}"
        ) from None
    except _EndlessError:
        raise MemboundError(
            f"{origin} repeats parts of itself by aliases (*name) until it has more than {_MOST_ALIASED:,} values; "
            "write out what it means"
        ) from None
    except RecursionError:
        raise MemboundError(f"{origin} is not valid YAML: it is nested too deep") from None
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise MemboundError(f"{origin} has a value that YAML cannot read ({str(error)[:80]}); quote it") from None
