"""How does a mistake on the command line read?"""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError

from membound.roofline.reading.nearest import did_you_mean
from membound.roofline.reading.problems import shown, wanted

# Of click, which typer brings along under a private name: what every mistake on the command line is.
UsageError: Any = typer.BadParameter.__base__


def misused(error: Any) -> str:
    """An error of the command line as one sentence; the help where there was nothing but the command's name."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    return f"membound: {_sentence(error)}"


def _sentence(error: Any) -> str:
    context, param = error.ctx, getattr(error, "param", None)
    if isinstance(error.__cause__, ValidationError) and param is not None:
        problem = error.__cause__.errors()[0]
        return f"{_called(param)} is {shown(problem['input'])}: {_instead(problem)}"
    if type(error).__name__ == "MissingParameter" and param is not None:
        return f"{_called(param)} is missing; {param.help or 'give it'}; `{context.command_path} --help` says more"
    said = str(error.message).rstrip(".")
    if type(error).__name__ == "NoSuchOption":
        known = [option for one in context.command.params for option in one.opts if option.startswith("--")]
        return f"there is no option {error.option_name}{_or_help(error.option_name, known, context)}"
    if said.startswith("No such command"):
        name = said.split("'")[1]
        return f"there is no command '{name}'{_or_help(name, context.command.list_commands(context), context)}"
    if said.startswith("Got unexpected extra argument"):
        extra = said.rpartition("(")[2].rstrip(")")
        return f"'{extra}' is one argument too many; `{context.command_path} --help` lists what it takes"
    return f"{said[:1].lower()}{said[1:]}"


def _or_help(name: str, known: list[str], context: Any) -> str:
    """What is like it, or where all are listed."""
    return did_you_mean(name, known) or f"; `{context.command_path} --help` lists those that there are"


def _called(param: Any) -> str:
    option = str(param.opts[0])
    return f"option {option}" if option.startswith("-") else f"argument {option.upper()}"


def _instead(problem: Any) -> str:
    said = wanted(problem)
    return f"give {said.partition('is not one of ')[2]}".replace("'", "") if "is not one of" in said else said
