"""Commands are imported when they run, and the help that is shown without them says what they say."""

from __future__ import annotations

import subprocess
import sys

import typer
from typer.testing import CliRunner

from foretrace.commands import COMMANDS, app
from graph_predictor.cli.lazy_commands import LazyCommands


def test_sentences_of_the_help_are_those_of_the_commands() -> None:
    group = typer.main.get_command(app)
    for name, command in COMMANDS.items():
        paragraph = " ".join(group.commands[name].help.split("\n\n")[0].split())  # type: ignore[attr-defined]
        assert paragraph == command.sentence, name
        assert group.commands[name].name == name  # type: ignore[attr-defined]


def test_the_help_imports_no_command() -> None:
    code = ("import sys; from foretrace.commands import app, COMMANDS\n"
            "try: app(['--help'])\nexcept SystemExit: pass\n"
            "sys.exit(any(command.module in sys.modules for command in COMMANDS.values()))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_unknown_commands_are_refused() -> None:
    refused = CliRunner().invoke(app, ["predikt"])
    assert refused.exit_code == 2 and "predikt" in refused.output
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert "predict" in commands and commands.get("predikt") is None and len(commands) == len(COMMANDS)


def test_commands_can_be_added_and_deleted_as_in_any_group() -> None:
    commands = LazyCommands(COMMANDS)
    made = commands["workloads"]
    commands["again"] = made
    del commands["predict"]
    assert commands["again"] is made and "predict" not in commands and list(commands)[-1] == "again"
    assert len(commands) == len(COMMANDS)
