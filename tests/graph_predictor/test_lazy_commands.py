"""Commands are imported when they run, and the help that is shown without them says what they say."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import planner
from foretrace.commands import COMMANDS, app
from step_views.cli.running import LazyCommands, imported_late


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


def test_a_command_imports_what_it_works_with_only_when_it_works() -> None:
    code = ("import sys; from foretrace.commands import app\n"
            "try: app(['predict', '--help'])\nexcept SystemExit: pass\n"
            "sys.exit('numpy' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_late_module_runs_once_where_imports_go_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.py").write_text("import sys\nsys.runs = getattr(sys, 'runs', 0) + 1\nclass Kind: pass\n"
                                       "from planner import second\nkinds = [Kind, *second.kinds()]\n")
    (tmp_path / "second.py").write_text("from planner.first import Kind\ndef kinds(): return [Kind]\n")
    monkeypatch.setattr(planner, "__path__", [*planner.__path__, str(tmp_path)])
    with imported_late():
        first = importlib.import_module("planner.first")
    assert not hasattr(sys, "runs")
    one, other = first.kinds
    assert one is other and sys.runs == 1  # type: ignore[attr-defined]
    assert "planner.first" in sys.modules and type(first) is ModuleType
    for name in ("first", "second"):
        del sys.modules[f"planner.{name}"], planner.__dict__[name]
    del sys.runs  # type: ignore[attr-defined]


def test_a_module_that_is_callable_is_so_when_it_is_late() -> None:
    code = ("from step_views.cli.running import LateModule, imported_late\n"
            "with imported_late():\n    import tracer.capture\n"
            "assert type(tracer.capture) is LateModule\n"
            "try:\n    tracer.capture('')\n"
            "except Exception as error:\n    assert type(error).__name__ == 'CaptureError', error\n"
            "assert type(tracer.capture).__name__ == '_CallableModule'\n")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
