"""What tests of the app share: the console script, called in this process."""

from __future__ import annotations

import sys

import pytest

from membound.app import cli


@pytest.fixture
def membound(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Calls the console script here; returns its exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["membound", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        code = left.value.code
        return code if isinstance(code, int) else 0, *capsys.readouterr()

    return call
