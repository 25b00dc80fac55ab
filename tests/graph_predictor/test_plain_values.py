"""Values of options as typer makes them, and no pydantic for those that are there already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from graph_predictor.cli.plain_values import with_plain_values

ROOT = Path(__file__).resolve().parents[2]


def command(given: list[Any]) -> Any:
    """A command with one parameter of each kind, which notes what it is given."""
    def main(
        name: str, paths: Annotated[list[str] | None, typer.Option()] = None, text: str | None = None,
        count: Annotated[int | None, typer.Option(min=1)] = None, factor: float = 1.0, on: bool = False,
        file: Annotated[Path | None, typer.Option()] = None,
    ) -> None:
        given.append((name, paths, text, count, factor, on, file))

    app = typer.Typer()
    app.command()(main)
    return typer.main.get_command(app)


@pytest.mark.parametrize("arguments", [
    ["x"], ["x", "--text", "y"], ["x", "--paths", "a", "--paths", "b"], ["x", "--count", "3", "--factor", "2"],
    ["x", "--on"], ["x", "--file", "f"], ["x", "--count", "0"], ["x", "--count", "y"], ["x", "--factor", "y"], [],
    ["--help"], ["", "--text", ""],
])
def test_values_are_those_that_typer_makes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    typers: list[Any] = []
    ours: list[Any] = []
    expected = outcome(command(typers), arguments), capsys.readouterr().out
    found = outcome(with_plain_values(command(ours)), arguments), capsys.readouterr().out
    assert (ours, found) == (typers, expected)


def outcome(made: Any, arguments: list[str]) -> str:
    """How a command ended."""
    try:
        made.main(arguments, prog_name="made", standalone_mode=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_command_of_texts_imports_no_pydantic() -> None:
    program = ("import sys; from foretrace.commands import main; sys.argv = ['foretrace', 'predict', 'nowhere']\n"
               "try:\n    main()\nexcept SystemExit:\n    print('pydantic' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False"]
