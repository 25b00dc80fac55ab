"""An edit is one file: what it declares makes it an option, an axis and a candidate."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from graph_predictor.edits.registry import OPTIONS, chosen, made, switched
from step_views.reports.opportunities import candidates
from tracer.errors import ForetraceError

CAPTURE = str(Path(__file__).parents[2] / "traces" / "dlrm-cpu")
TOY = '''
"""Python that takes a share of its time."""

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import Scenario


@dataclass(frozen=True)
class Toy:
    """Host time times a factor."""

    factor: float

    def describe(self) -> str:
        return f"toy × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        return replace(scenario, host=replace(scenario.host, factor=scenario.host.factor * self.factor))


@dataclass(frozen=True)
class ToySwitch:
    """Nothing."""

    def describe(self) -> str:
        return "toy switched"

    def apply(self, scenario: Scenario) -> Scenario:
        return scenario
'''


ROWS = """
from graph_predictor.edits import registry
registry.OPTIONS += (
    registry.EditOption("toy_edit", "Toy", "toy", "Host time × a FACTOR of the toy's.", takes="FACTOR",
                        tries={"a toy": 0.5}, bounds={"no host": 0.001}),
    registry.EditOption("toy_edit", "ToySwitch", "toy-switch", "The toy without a value."))
"""


def test_one_file_is_an_option_an_axis_and_a_candidate(tmp_path: Path) -> None:
    """What three commands say, of a process in which the toy is a file and two rows."""
    (tmp_path / "toy_edit.py").write_text(TOY)
    commands = {
        "predict": [CAPTURE, "--toy", "0.5", "--toy-switch"],
        "sweep": [CAPTURE, "--toy", "1,0.5", "--edits", "none,toy-switch", "-o", "p.csv", "--jobs", "1"],
        "opportunities": [CAPTURE, "--top", "100"]}
    code = ("import json, sys\nimport graph_predictor.edits\n"
            f"graph_predictor.edits.__path__.append({str(tmp_path)!r})\n{ROWS}"
            "from typer.testing import CliRunner\nfrom foretrace.commands import app\n"
            "print(json.dumps({name: json.loads(CliRunner().invoke(app, [name, *words, '--json']).stdout)\n"
            f"                  for name, words in {commands!r}.items()}}))")
    path = [str(tmp_path), *(entry for entry in sys.path if entry)]
    found = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], text=True,
                           capture_output=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["predict"]["edits"] == ["toy × 0.5", "toy switched"]
    assert said["sweep"]["axes"] == ["toy", "edits"]
    times = {(row["toy"], row["edits"]): row["step_time_us"] for row in said["sweep"]["rows"]}
    assert len(times) == 4 and times[0.5, "none"] < times[1.0, "none"]
    tried = {one["name"]: (one["option"], one["is_bound"]) for one in said["opportunities"]["opportunities"]}
    assert tried["a toy"] == ("--toy 0.5", False) and tried["no host"] == ("--toy 0.001", True)


def test_every_row_names_a_class_that_is_there() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names) >= 17
    for option in OPTIONS:
        edit = getattr(import_module(f"graph_predictor.edits.{option.module}"), option.edit)
        assert callable(edit.describe) and callable(edit.apply)
    assert all(candidate.option.startswith("--") for candidate in candidates())


def test_values_become_edits_in_one_order() -> None:
    edits = {"straggler": "0:10%", "host": 0.5, "clock": 1.0, **switched(["no-recompute", "cuda-graphs"])}
    assert list(chosen(edits)) == ["host", "cuda-graphs", "recompute", "straggler"]
    assert [edit.describe() for edit in made(chosen(edits))] == [
        "host time × 0.5", "CUDA graphs", "recomputation off", "rank 0 slower by 10%"]
    with pytest.raises(ForetraceError, match="warp-drive"):
        switched(["warp-drive"])
