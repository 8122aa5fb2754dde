"""Files that fit each other, and the command line on them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.lora.files import Command, Files


@pytest.fixture
def files(tmp_path: Path) -> "Files":
    from tests.lora.files import matching

    return matching(tmp_path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Command":
    from examples import convert_lora

    def run(files: Any, *options: str) -> tuple[int, str, str]:
        arguments = [str(files.checkpoint), str(files.base), str(files.out), *options]
        monkeypatch.setattr(sys, "argv", ["convert_lora", *arguments])
        status = convert_lora.main()
        seen = capsys.readouterr()
        return status, seen.out, seen.err.strip()

    return run
