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
        assert (paragraph, group.commands[name].name) == (command.sentence, name)  # type: ignore[attr-defined]
    refused = CliRunner().invoke(app, ["predikt"])
    assert refused.exit_code == 2 and "predikt" in refused.output


@pytest.mark.parametrize("code", [
    # The help imports no command.
    "from foretrace.commands import app, COMMANDS\ntry: app(['--help'])\nexcept SystemExit: pass\n"
    "assert not any(command.module in sys.modules for command in COMMANDS.values())",
    # A command imports what it works with only when it works.
    "from foretrace.commands import app\ntry: app(['predict', '--help'])\nexcept SystemExit: pass\n"
    "assert 'numpy' not in sys.modules",
    # A module that is callable is so when it is late.
    "from step_views.cli.running import LateModule, imported_late\n"
    "with imported_late():\n    import tracer.capture\n"
    "assert type(tracer.capture) is LateModule\n"
    "try:\n    tracer.capture('')\n"
    "except Exception as error:\n    assert type(error).__name__ == 'CaptureError', error\n"
    "assert type(tracer.capture).__name__ == '_CallableModule'"], ids=["help", "command", "callable"])
def test_a_fresh_process_imports_what_it_needs(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_commands_can_be_added_and_deleted_as_in_any_group() -> None:
    commands = LazyCommands(COMMANDS)
    assert "predict" in commands
    assert commands.get("predikt") is None
    commands["again"] = made = commands["workloads"]
    del commands["predict"]
    assert commands["again"] is made and "predict" not in commands and list(commands)[-1] == "again"
    assert len(commands) == len(COMMANDS)


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
