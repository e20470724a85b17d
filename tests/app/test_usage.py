"""Does every command have its help, and is every mistake on the command line one sentence that says what was meant?"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer

from membound.app.commands.root import app


def _commands(group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


COMMANDS = list(_commands(typer.main.get_command(app)))


def test_the_walk_finds_sub_commands() -> None:
    assert {(), ("measure",), ("import",), ("kernels", "check")} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_its_help(membound, command: tuple[str, ...]) -> None:
    code, out, err = membound(*command, "--help")
    assert (code, err) == (0, "") and "Usage" in out and "--help" in out


def test_the_version_is_the_distribution_s(membound) -> None:
    code, out, _ = membound("--version")
    assert code == 0 and out.startswith("membound ") and out.split()[1][0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predit"], "there is no command 'predit'; did you mean 'predict'?"),
        (["zzz"], "`membound --help` lists those that there are"),
        (["kernels", "chekc"], "did you mean 'check'?"),
        (["predict", "live-cpu", "--bacth", "3"], "there is no option --bacth; did you mean '--batch'?"),
        (["predict", "live-cpu", "--batch", "x"], "option --batch is 'x': give a whole number"),
        (["predict", "live-cpu", "more"], "'more' is one argument too many"),
        (["predict"], "argument SCENARIO is missing"),
        (["experiment", "x6"], "argument NAME is 'x6': give x1, x2, x3, x4, x5"),
        (["validate", "a.csv", "--leave-out", "foo"], "option --leave-out is 'foo': give device, source"),
        (["catalog", "device"], "did you mean 'devices'?"),
        (["predict", "live-cup"], "did you mean 'live-cpu'?"),
        (["stack", "plan-70b", "--techniques", "EAGLE"], "did you mean 'eagle'?"),
    ],
)
def test_a_mistake_is_one_sentence_that_says_what_was_meant(membound, arguments: list[str], says: str) -> None:
    code, out, err = membound(*arguments)
    assert (code, out) == (2, "") and says in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("module", ["typer.main", "membound.app.commands.planning"])
def test_ctrl_c_is_one_word_while_the_command_is_still_being_imported(module: str) -> None:
    command = [sys.executable, "-P", "-X", "importtime", "-m", "membound.app.cli", "scenarios"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.split("|")[-1].strip() == module:
            process.send_signal(signal.SIGINT)
            break
    said = [line for line in process.stderr if not line.startswith("import time:")]
    assert (process.wait(30), said) == (130, ["interrupted\n"])
